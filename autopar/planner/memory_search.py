"""Find plans within a memory budget, by resharding and by rematerialization.

In: a candidate made without a budget, the budget. Out: the fastest candidate found that fits, perhaps with rematerialized
activations; where none fits, what is missing and the ways out, priced. Both ways are compared by the predicted step time.
"""

from __future__ import annotations

import math
import time

from autopar.errors import TimeLimitError
from autopar.planner.candidate import Candidate, Planning
from autopar.planner.fork_pool import Least
from autopar.planner.remat_search import RematSearch, levels_of
from autopar.planner.reshard_to_fit import TooLargeError, resharded_to_fit
from autopar.planner.ways_out import NothingFitsError, missing, ways_out


def within_budget(
    budget: float,
    free: Candidate,
    planning: Planning,
    *,
    rematerialize: bool,
    any_that_fits: bool = False,
    time_limit_s: float = math.inf,
    fastest: Least | None = None,
) -> Candidate:
    """The fastest plan found within a budget.

    Args:
        free: the plan without a budget, which does not fit. rematerialize: whether activations may be rematerialized.
        any_that_fits: return the first plan found: one that reshards, or rematerializes most.
        time_limit_s: after that, return the fastest plan found that fits.
        fastest: seconds of the fastest plan on any mesh so far. The search ends where no plan that fits could be faster;
            the result then need not fit.

    Raises:
        NothingFitsError: none fits.
        TimeLimitError: the solver found none in time.
    """
    found: list[Candidate] = []
    late: TimeLimitError | None = None
    least, estimate = free, None
    deadline = time.monotonic() + time_limit_s
    levels = levels_of(free) if rematerialize else []
    try:
        found.append(resharded_to_fit(budget, free, planning, at_least=not levels))
    except TooLargeError as short:
        least, estimate = short.least, short.estimate
    except TimeLimitError as error:
        late = error
    if levels and not (any_that_fits and found):
        own_s = min((made.compared_s for made in found), default=math.inf)
        levels = levels[-1:] if any_that_fits else levels
        search = RematSearch(budget, free, planning, levels, least, own_s, fastest, deadline)
        try:
            rematerialized = search.fastest()
            found += [] if rematerialized is None else [rematerialized]
        except TimeLimitError as error:
            late = error
        least = search.least
        if search.outdone is not None:
            found = found or [search.outdone]
    if found:
        return min(found, key=lambda made: made.compared_s)
    if late is not None or estimate is None:
        raise late or TimeLimitError(f"planning for mesh {free.formulation.mesh} ended without a plan")
    priced = estimate

    def ways(split_over_time: bool) -> list[str]:
        return ways_out(
            budget, free, least, priced, planning, rematerialize=rematerialize, split_over_time=split_over_time
        )

    raise NothingFitsError(missing(budget, least), ways, least.peak_bytes)
