"""Find assignments of a part of a problem that fit a memory limit, and price its memory for a better bound.

In: a `Part` with a memory limit, and the `Incumbent`. Out: the `Dual` of the part's memory. Assignments and bounds found on
the way go to the incumbent.
"""

from __future__ import annotations

import time

import numpy as np

from autopar.solve.elimination import Elimination
from autopar.solve.incumbent import Incumbent
from autopar.solve.live_instants import instants_of
from autopar.solve.memory_dual import Dual, assignments_at_high_prices, price_memory
from autopar.solve.minimum_memory import minimum_memory
from autopar.solve.search_part import Part

_FIT_SHARE = 0.3  # of the remaining time, to find an assignment that fits
_COMBINE_SHARE = 0.3  # of the remaining time, to combine assignments into an incumbent


def priced(part: Part, elimination: Elimination, free: tuple[int, ...], best: Incumbent) -> Dual | None:
    """Price the memory of a part; None if no assignment that fits was found.

    Args:
        free: the optimum without the memory limit.
        best: record of the assignments and bounds found.
    """
    problem, instants = part.problem, instants_of(part.problem)
    fitting = _fitting(part, elimination, best)
    if not fitting:
        return None
    dual = price_memory(problem, instants, elimination, [free, fitting], deadline=best.deadline)
    best.raise_bound(dual.bound - part.rounding_error(dual.bound, dual.offset))
    for choices in dual.assignments:
        best.keep(part.expand(choices))
    if best.is_open() and dual.assignments:
        met = part.within([np.unique(strategies) for strategies in zip(*dual.assignments, strict=True)])
        if met is not None:
            best.branch(met, best.until(_COMBINE_SHARE), relative_gap=1e-4)
    return dual


def _fitting(part: Part, elimination: Elimination, best: Incumbent) -> tuple[int, ...]:
    """Some assignment of a part that fits; empty if none was found."""
    problem = part.problem
    for choices in assignments_at_high_prices(problem, instants_of(problem), elimination):
        best.keep(part.expand(choices))
        if problem.fits(choices) and np.isfinite(problem.evaluate(choices)):
            return choices
    return least_memory(part, best)


def least_memory(part: Part, best: Incumbent) -> tuple[int, ...]:
    """The assignment of a part with the lowest peak memory if it fits; empty if none was found."""
    problem, limit = part.problem, part.problem.memory_limit
    assert limit is not None
    for relative_gap in (5e-3, 1e-6):
        share = _FIT_SHARE * (best.deadline - time.monotonic())
        least = minimum_memory(problem, time_limit_s=share, relative_gap=relative_gap)
        if least.lower_bound > limit * (1 + 1e-6):
            best.raise_bound(np.inf)
            break
        if least.choices and problem.fits(least.choices):
            best.keep(part.expand(least.choices))
            return least.choices
    return ()
