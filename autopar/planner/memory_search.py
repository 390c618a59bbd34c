"""Plans that keep to a memory budget: by splitting otherwise, and by computing forward values again.

In: a candidate made without a budget, the budget. Out: the fastest candidate found that fits, perhaps of the program with
some of its values computed again; where none does, what is missing and the ways out, priced. The two are weighed in the
plan's own prediction.
"""

from __future__ import annotations

import math
import time

from autopar.errors import TimeLimitError
from autopar.planner.candidate import Candidate, Planning
from autopar.planner.fork_pool import Least
from autopar.planner.remat_search import RematSearch, ladder_of
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
    """The fastest plan found that keeps to a budget.

    Args:
        free: the plan without one, which does not. rematerialize: whether values may be computed again.
        any_that_fits: the first plan found will do: one that splits otherwise, or computes most again.
        time_limit_s: once it has passed, the fastest plan found that fits will do.
        fastest: seconds of the fastest plan on any mesh so far. Where what fits could not be faster, a plan that is slower
            will do, whether it fits or not.

    Raises:
        NothingFitsError: none does.
        TimeLimitError: the solver found none in its time.
    """
    found: list[Candidate] = []
    late: TimeLimitError | None = None
    least, estimate = free, None
    deadline = time.monotonic() + time_limit_s
    rungs = ladder_of(free) if rematerialize else []
    try:
        found.append(resharded_to_fit(budget, free, planning, at_least=not rungs))
    except TooLargeError as short:
        least, estimate = short.least, short.estimate
    except TimeLimitError as error:
        late = error
    if rungs and not (any_that_fits and found):
        own_s = min((made.compared_s for made in found), default=math.inf)
        rungs = rungs[-1:] if any_that_fits else rungs
        climb = RematSearch(budget, free, planning, rungs, least, own_s, fastest, deadline)
        try:
            again = climb.fastest()
            found += [] if again is None else [again]
        except TimeLimitError as error:
            late = error
        least = climb.least
        if climb.outdone is not None:
            found = found or [climb.outdone]
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
