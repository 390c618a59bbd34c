"""Minimise the peak memory over all assignments of finite cost.

    minimise    z
    subject to  sum_(u live at t) m_u . x_u <= z    for every instant t
                x an assignment of finite cost

In: a `Problem`; its limit is ignored, and its costs matter only where they are `inf`. Out: `MinimumMemory`. Without
costs nearly every strategy is dominated, so the reduced problem is small. Memory rows are added as they are violated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.live_instants import instants_of
from autopar.solve.mip import End, bound_error
from autopar.solve.mip_encoding import Columns
from autopar.solve.presolve import Overdue, Reduced, reduce
from autopar.solve.problem import Problem

_OBJECTIVE = 1e5  # size of the scaled objective
_ROWS_A_ROUND = 4


@dataclass(frozen=True, slots=True)
class MinimumMemory:
    """An assignment of low peak memory, and a lower bound of the peak.

    Args:
        choices: the assignment; empty if none was found or none has finite cost.
        peak_bytes: peak memory of the assignment; `inf` without one.
        lower_bound: lower bound of the peak of every assignment of finite cost, in bytes; `inf` if there is none.
    """

    choices: tuple[int, ...]
    peak_bytes: float
    lower_bound: float


def minimum_memory(problem: Problem, time_limit_s: float = 60.0, *, relative_gap: float = 5e-3) -> MinimumMemory:
    """The least peak of any assignment of finite cost.

    Args:
        time_limit_s: seconds after which the best assignment so far is returned.
        relative_gap: largest relative excess of the peak over the minimum.
    """
    deadline = time.monotonic() + time_limit_s
    try:
        reduced = reduce(_costless(problem), deadline=deadline)
    except Overdue:
        return MinimumMemory((), np.inf, 0.0)
    if reduced is None:
        return MinimumMemory((), np.inf, np.inf)
    choices, bound = _least_peak(reduced, deadline, relative_gap)
    if not choices:
        return MinimumMemory((), np.inf, bound)
    full = reduced.expand(choices)
    peak = problem.peak_memory(full)
    return MinimumMemory(full, peak, min(bound, peak))


def _costless(problem: Problem) -> Problem:
    """The problem with every finite cost set to 0, and limit 0, so that every instant counts."""
    free = {id(e.costs): np.where(np.isfinite(e.costs), 0.0, np.inf) for e in problem.edges}
    return Problem(
        tuple(np.where(np.isfinite(c), 0.0, np.inf) for c in problem.node_costs),
        tuple(replace(e, costs=free[id(e.costs)]) for e in problem.edges),
        problem.usages,
        0.0,
    )


def _least_peak(reduced: Reduced, deadline: float, relative_gap: float) -> tuple[tuple[int, ...], float]:
    """The assignment of the reduced problem with the lowest peak found, and a lower bound of the peak."""
    problem, columns = reduced.problem, Columns(reduced.problem)
    if all(len(c) == 1 for c in problem.node_costs):
        choices = (0,) * len(problem.node_costs)
        return choices, problem.peak_memory(choices)
    instants = instants_of(problem)
    most = sum(float(np.max(u.amounts)) for u in problem.usages)
    rows: dict[int, tuple[np.ndarray, float]] = {}

    def add_rows(loads: np.ndarray) -> bool:
        worst = [int(i) for i in np.argsort(-loads, kind="stable")[:_ROWS_A_ROUND]]
        new = [i for i in worst if i not in rows and loads[i] > bound]
        for i in new:
            rows[i] = (columns.memory_row(instants.live_at(i)) / most, 0.0)
        return bool(new)

    from autopar.solve.highs import solve_mip  # noqa: PLC0415 - running a saved plan must not need OR-Tools

    best: tuple[int, ...] = ()
    peak, bound = np.inf, 0.0
    add_rows(instants.loads_of([float(np.min(u.amounts)) for u in instants.usages]))
    while True:
        outcome = solve_mip(
            columns.programme(costs=np.zeros(columns.count), memory=tuple(rows.values()), peak_cost=_OBJECTIVE),
            time_limit_s=max(0.01, deadline - time.monotonic()),
            relative_gap=0.2 * relative_gap,
        )
        if outcome.end is End.INFEASIBLE:
            return (), np.inf
        if outcome.end is End.INTERRUPTED:
            raise KeyboardInterrupt
        bound = max(bound, (outcome.bound - bound_error(columns.terms, _OBJECTIVE)) * most / _OBJECTIVE)
        if outcome.values is None:
            return best, bound
        choices = columns.decode(outcome.values)
        loads = instants.loads(choices)
        if float(loads.max()) < peak:
            best, peak = choices, float(loads.max())
        if peak <= bound * (1 + relative_gap) or not add_rows(loads) or time.monotonic() > deadline:
            return best, bound
