"""Branch and bound by HiGHS, with memory rows added as they are violated.

In: a `Problem`, best already reduced. Out: `Branched`: the best assignment found, a bound, and how it ended.
A round solves the programme with the memory rows so far; if its solution holds too much at some instants,
their rows are added. Every round's bound holds for the whole problem, for rows are only missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.highs import End, solve_mip
from autopar.solve.instants import Instants, instants_of
from autopar.solve.problem import ROUNDING, Problem
from autopar.solve.programme import Columns

Report = Callable[[float, float], None]
_OBJECTIVE = 1e4  # what the objective is scaled to: far above HiGHS's tolerances of 1e-7, far below 1/eps
_ROWS_A_ROUND = 4
_FEW_ROWS = 24  # so many are all there from the start


@dataclass(frozen=True, slots=True)
class Branched:
    """`choices` is empty where nothing was found; `bound` is `inf` where there is nothing to find."""

    choices: tuple[int, ...]
    cost: float
    bound: float
    end: End


def branch(
    problem: Problem,
    *,
    deadline: float,
    incumbent: tuple[int, ...] = (),
    relative_gap: float = 1e-7,
    report: Report | None = None,
) -> Branched:
    """Solve a problem by HiGHS.

    Args:
        problem: all node costs are finite; `reduce` makes it so.
        deadline: on the clock of `time.monotonic`.
        incumbent: an assignment that fits, to start from and to fall back on.
        relative_gap: distance of cost and bound that counts as optimal.
        report: called with the cost of the best that is known to fit and the bound, in seconds.
    """
    columns = Columns(problem)
    costs = columns.costs()
    scale = _OBJECTIVE / _typical(problem, incumbent)
    rows = _MemoryRows(problem, columns)
    best, least = incumbent, problem.evaluate(incumbent) if incumbent else np.inf
    bound = -np.inf

    def tell(cost: float, low: float) -> None:
        if report is not None:  # with rows missing, what HiGHS has found may not fit
            report(cost / scale if problem.memory_limit is None else least, max(bound, low / scale))

    while True:
        outcome = solve_mip(
            columns.programme(costs=costs * scale, memory=rows.rows),
            time_limit_s=max(0.01, deadline - time.monotonic()),
            hint=columns.encode(best) if best else None,
            relative_gap=relative_gap,
            report=tell,
        )
        if outcome.end is End.INFEASIBLE:
            return Branched(best, least, least, End.OPTIMAL if best else End.INFEASIBLE)
        bound = max(bound, outcome.bound / scale)
        fits = False
        if outcome.values is not None:
            choices = columns.decode(outcome.values)
            cost = problem.evaluate(choices)
            fits = not rows.add_violated(choices)
            if fits and cost < least:
                best, least = choices, cost
            if fits and outcome.end is End.OPTIMAL:  # so says HiGHS, to its tolerance
                bound = max(bound, cost - relative_gap * abs(cost))
        if best and least - bound <= relative_gap * abs(least):
            return Branched(best, least, min(bound, least), End.OPTIMAL)
        if outcome.end is not End.OPTIMAL:
            return Branched(best, least, min(bound, least), outcome.end)
        if time.monotonic() > deadline:
            return Branched(best, least, min(bound, least), End.STOPPED)


def _typical(problem: Problem, incumbent: tuple[int, ...]) -> float:
    """A cost, in seconds, of about the size of the optimum's variable part."""
    if incumbent and (cost := abs(problem.evaluate(incumbent))) > 0.0:
        return cost
    finite = [c[np.isfinite(c)] for c in problem.node_costs] + [e.costs[np.isfinite(e.costs)] for e in problem.edges]
    total = sum(float(np.median(np.abs(c))) for c in finite if c.size)
    return total or max((float(np.abs(c).max()) for c in finite if c.size), default=0.0) or 1.0


class _MemoryRows:
    """The memory rows of a programme, as they come to matter."""

    def __init__(self, problem: Problem, columns: Columns) -> None:
        self.rows: list[tuple[np.ndarray, float]] = []
        self._problem, self._columns = problem, columns
        self._limit = problem.memory_limit
        self._instants: Instants | None = instants_of(problem) if problem.memory_limit is not None else None
        self._present: set[int] = set()
        if self._instants is not None and 0 < len(self._instants.times) <= _FEW_ROWS:
            for position in range(len(self._instants.times)):
                self._add(position)
        elif self._instants is not None and len(self._instants.times):
            # Without any row the first solution holds far too much; where most is held on average, most will be.
            typical = self._instants.loads_of([float(np.mean(u.amounts)) for u in self._instants.usages])
            self._add(int(typical.argmax()))

    def add_violated(self, choices: Sequence[int]) -> bool:
        """Add rows that forbid an assignment; False if it fits."""
        if self._instants is None or self._limit is None:
            return False
        excess = self._instants.loads(choices) - self._limit * (1 + ROUNDING)
        worst = np.argsort(-excess, kind="stable")[:_ROWS_A_ROUND]
        violated = [int(i) for i in worst if excess[i] > 0]
        for position in violated:
            if position in self._present:
                self.rows.append(self._cover(position, choices))
            else:
                self._add(position)
        return bool(violated)

    def _add(self, position: int) -> None:
        assert self._instants is not None and self._limit is not None
        unit = max(abs(self._limit), 1.0)
        held = self._columns.memory_row(self._instants.live_at(position))
        self.rows.append((held / unit, self._limit / unit))
        self._present.add(position)

    def _cover(self, position: int, choices: Sequence[int]) -> tuple[np.ndarray, float]:
        """A row without tolerance, for a violation too slight for HiGHS to see: of the nodes live then,
        not all may take a strategy that holds as much as the chosen one or more."""
        assert self._instants is not None
        held = self._columns.memory_row(self._instants.live_at(position))
        row, nodes = np.zeros(len(held)), 0
        for node, choice in enumerate(choices):
            start, size = self._columns.starts[node], self._columns.sizes[node]
            own = held[start : start + size]
            if own[choice] > own.min():
                row[start : start + size] = own >= own[choice]
                nodes += 1
        return row, nodes - 1.0
