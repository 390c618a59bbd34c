"""Find plans within a memory budget, by resharding and by rematerialization.

In: a candidate over the memory budget, a `MeshTask`. Out: the candidate with the lowest predicted step time that fits; where none
fits, an error with the missing memory and the priced ways out.
"""

from __future__ import annotations

import math
import time

from autopar.errors import TimeLimitError
from autopar.planner.candidate import Candidate
from autopar.planner.fork_pool import SharedMinimum
from autopar.planner.mesh_task import MeshTask
from autopar.planner.remat_search import RematSearch, levels_of
from autopar.planner.reshard_to_fit import TooLargeError, resharded_to_fit
from autopar.planner.ways_out import NothingFitsError, missing, ways_out


def within_budget(task: MeshTask, unlimited: Candidate, fastest: SharedMinimum) -> Candidate:
    """The fastest plan found within the memory budget.

    The search ends early where no plan that fits can be the fastest; the result then may exceed the budget.

    Args:
        unlimited: the plan without a memory limit, which does not fit.
        fastest: seconds of the fastest plan on any mesh so far.

    Raises:
        NothingFitsError: no plan fits.
        TimeLimitError: the solver found no plan in time.
    """
    request, found = task.request, list[Candidate]()
    timeout: TimeLimitError | None = None
    smallest, estimate = unlimited, None
    deadline = time.monotonic() + request.time_limit_s
    levels = levels_of(unlimited) if request.rematerialize else []
    try:
        found.append(resharded_to_fit(task, unlimited, minimize_peak=not levels))
    except TooLargeError as error:
        smallest, estimate = error.smallest, error.estimate
    except TimeLimitError as error:
        timeout = error
    if levels and not (request.any_that_fits and found):
        own_s = min((candidate.step_time_s for candidate in found), default=math.inf)
        levels = levels[-1:] if request.any_that_fits else levels
        search = RematSearch(task, unlimited, levels, smallest, own_s, fastest, deadline)
        try:
            rematerialized = search.fastest()
            found += [] if rematerialized is None else [rematerialized]
        except TimeLimitError as error:
            timeout = error
        smallest = search.smallest
        if search.slower is not None:
            found = found or [search.slower]
    if found:
        return min(found, key=lambda candidate: candidate.step_time_s)
    if timeout is not None or estimate is None:
        raise timeout or TimeLimitError(f"planning for mesh {unlimited.formulation.mesh} ended without a plan")
    estimated = estimate

    def ways(accumulate: bool) -> list[str]:
        return ways_out(task, unlimited, smallest, estimated, accumulate=accumulate)

    raise NothingFitsError(missing(task.budget_bytes, smallest), ways, smallest.peak_bytes)
