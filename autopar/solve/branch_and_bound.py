"""Solve a problem by branch and bound with HiGHS, adding memory rows as they are violated (row generation).

In: a `Problem`, preferably reduced. Out: `Branched`: the best assignment found, a bound, and how the solve ended.
A round solves the programme with the memory rows so far. If its solution exceeds the limit at some instants, their
rows are added. Every round's bound is valid for the whole problem, because missing rows only relax it.

HiGHS's tolerances must neither forbid an assignment that fits nor raise a bound. Memory rows therefore have integer
coefficients, rounded down, and cover rows that count nodes forbid the violations that this lets through
(`_MemoryRows._cover`). Costs too large for any good assignment are lowered (`_Scaled`), and the tolerance of costs is
subtracted from every bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.live_instants import Instants, instants_of
from autopar.solve.mip import End, bound_error
from autopar.solve.mip_encoding import Columns
from autopar.solve.problem import ROUNDING, Problem

Report = Callable[[float, float], None]
_OBJECTIVE = 1e5  # size of the scaled objective: far above HiGHS's tolerances, far below 1/eps
_COST_CAP = 1e4  # costs are capped at this many times the optimum's size
_FINER = 0.25  # a unit below this share of the current one is worth another run
_ROWS_A_ROUND = 4
_FEW_ROWS = 24  # up to this number, all memory rows are present from the start
_DIGITS = 20  # binary digits of a memory row's limit


@dataclass(frozen=True, slots=True)
class Branched:
    """The result of `branch`: `choices` is empty if none was found; `bound` is `inf` if no assignment fits."""

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
        problem: problem with finite node costs, as `reduce` returns it.
        deadline: end of the solve, by `time.monotonic`.
        incumbent: an assignment that fits, to start from and to fall back on.
        relative_gap: gap between cost and bound that counts as optimal. HiGHS's tolerance is subtracted from the
            bound, so the gap of an `OPTIMAL` result may be larger.
        report: callback for the cost of the best assignment known to fit and the bound, in seconds.
    """
    from autopar.solve.highs import solve_mip  # noqa: PLC0415 - running a saved plan must not need OR-Tools

    columns = Columns(problem)
    rows = _MemoryRows(problem, columns)
    best, least = incumbent, problem.evaluate(incumbent) if incumbent else np.inf
    scaled = _Scaled(columns, least)
    bound = -np.inf

    def report_progress(cost: float, low: float) -> None:
        if report is not None:  # while memory rows are missing, HiGHS's solution may not fit
            known = least if problem.memory_limit is not None else min(least, scaled.cost(cost))
            report(known, max(bound, scaled.bound(low)))

    while True:
        outcome = solve_mip(
            columns.programme(costs=scaled.costs, memory=rows.rows),
            time_limit_s=max(0.01, deadline - time.monotonic()),
            hint=columns.encode(best) if best else None,
            relative_gap=relative_gap,
            report=report_progress,
        )
        if outcome.end is End.INFEASIBLE:  # wrong if an assignment is known: nothing is proven then
            return Branched(best, least, bound, End.STOPPED) if best else Branched((), np.inf, np.inf, outcome.end)
        bound = max(bound, scaled.bound(outcome.bound))
        fits = False
        if outcome.values is not None:
            choices = columns.decode(outcome.values)
            cost = problem.evaluate(choices)
            fits = not rows.add_violated(choices)
            if fits and cost < least:
                best, least = choices, cost
        if best and least - bound <= relative_gap * abs(least):
            return Branched(best, least, min(bound, least), End.OPTIMAL)
        if outcome.end is not End.OPTIMAL:
            return Branched(best, least, min(bound, least), outcome.end)
        if fits:
            finer = _Scaled(columns, least)
            if finer.unit > _FINER * scaled.unit and not scaled.lowers(best):
                return Branched(best, least, min(bound, least), End.OPTIMAL)
            scaled = finer
        if time.monotonic() > deadline:
            return Branched(best, least, min(bound, least), End.STOPPED)


class _Scaled:
    """The column costs scaled for HiGHS.

    Costs above those of any good assignment are capped, because HiGHS loses small costs next to large ones. Lower costs
    keep bounds valid.

    Args:
        least: cost of a known assignment, in seconds; `inf` if none is known.

    Attributes:
        unit: estimated size of the optimum, in seconds.
        costs: cost of each column, in units of `unit / _OBJECTIVE`.
    """

    def __init__(self, columns: Columns, least: float) -> None:
        costs, (floors, floor) = columns.costs(), columns.floors()
        if least < np.inf:
            self.unit = max(abs(least), least - floor) or 1.0
            cap = 2.0 * (least - floor)
        else:
            self.unit = _typical(columns.problem)
            cap = _COST_CAP * self.unit
        self._columns, self._most = columns, np.minimum(costs, floors + cap)
        self.costs = self._most * (_OBJECTIVE / self.unit)
        self._whole = bool((np.floor(costs) == costs).all())

    def cost(self, objective: float) -> float:
        """The cost of a scaled objective, in seconds."""
        return objective * self.unit / _OBJECTIVE

    def bound(self, objective: float) -> float:
        """HiGHS's bound less its tolerance, in seconds; rounded up if all costs are integers."""
        bound = self.cost(objective - bound_error(self._columns.terms, _OBJECTIVE))
        return float(math.ceil(bound)) if self._whole and math.isfinite(bound) else bound

    def lowers(self, choices: tuple[int, ...]) -> bool:
        """Whether the cap lowers a cost of an assignment."""
        chosen = self._columns.encode(choices) > 0.0
        return bool((self._most < self._columns.costs())[chosen].any())


def _typical(problem: Problem) -> float:
    """An estimate of the size of the optimum's variable part, in seconds."""
    finite = [c[np.isfinite(c)] for c in problem.node_costs] + [e.costs[np.isfinite(e.costs)] for e in problem.edges]
    total = sum(float(np.median(np.abs(c))) for c in finite if c.size)
    return total or max((float(np.abs(c).max()) for c in finite if c.size), default=0.0) or 1.0


class _MemoryRows:
    """The memory rows of a programme, generated as they are violated."""

    def __init__(self, problem: Problem, columns: Columns) -> None:
        self.rows: list[tuple[np.ndarray, float]] = []
        self._columns = columns
        self._limit = None if problem.memory_limit is None else problem.memory_limit * (1 + ROUNDING)
        self._instants: Instants | None = instants_of(problem) if problem.memory_limit is not None else None
        self._present: set[int] = set()
        if self._instants is not None and 0 < len(self._instants.times) <= _FEW_ROWS:
            for position in range(len(self._instants.times)):
                self._add(position)
        elif self._instants is not None and len(self._instants.times):
            # Without a row the first solution would far exceed the limit: start with the instant of the highest mean.
            typical = self._instants.loads_of([float(np.mean(u.amounts)) for u in self._instants.usages])
            self._add(int(typical.argmax()))

    def add_violated(self, choices: Sequence[int]) -> bool:
        """Add rows that forbid an assignment; False if it fits."""
        if self._instants is None or self._limit is None:
            return False
        excess = self._instants.loads(choices) - self._limit
        worst = np.argsort(-excess, kind="stable")[:_ROWS_A_ROUND]
        violated = [int(i) for i in worst if excess[i] > 0]
        for position in violated:
            if position in self._present:
                self.rows.append(self._cover(position, choices, float(excess[position])))
            else:
                self._add(position)
        return bool(violated)

    def _add(self, position: int) -> None:
        """Add an integer row that every assignment that fits satisfies.

        It counts memory above each node's minimum, in units of about a millionth of the remaining room, rounded down.
        """
        assert self._instants is not None and self._limit is not None
        more, least = self._beyond_least(position)
        room = self._limit - least
        size = room if room > 0.0 else float(more.max(initial=0.0))
        unit = math.ldexp(1.0, max(-1000, math.frexp(size)[1] - _DIGITS))  # a power of two: division is exact
        most = 2.0 ** (_DIGITS + 1)  # above the room
        self.rows.append((np.floor(np.minimum(more / unit, most)), math.floor(max(room / unit, -1.0)) + 0.5))
        self._present.add(position)

    def _beyond_least(self, position: int) -> tuple[np.ndarray, float]:
        """The memory of each column above its node's minimum, and the sum of the minima, in bytes."""
        assert self._instants is not None
        held = self._columns.memory_row(self._instants.live_at(position))
        starts, sizes = self._columns.starts, self._columns.sizes
        leasts = np.minimum.reduceat(held[: starts[-1]], starts[:-1])
        held[: starts[-1]] -= np.repeat(leasts, sizes)
        return held, math.fsum(leasts)

    def _cover(self, position: int, choices: Sequence[int], excess: float) -> tuple[np.ndarray, float]:
        """A cover inequality against a violation too small for the memory rows' tolerance.

        Not all live nodes may take a strategy with at least the chosen one's memory. The threshold of a node is lowered
        as long as the thresholds together still exceed the limit.
        """
        more, _ = self._beyond_least(position)
        parts = [more[a:b] for a, b in zip(self._columns.starts[:-1], self._columns.starts[1:], strict=True)]
        row, nodes = np.zeros(len(more)), 0
        for node in sorted(range(len(parts)), key=lambda n: parts[n][choices[n]]):
            own = parts[node]
            enough = float(own[own > own[choices[node]] - excess].min())
            excess -= own[choices[node]] - enough
            if enough > 0.0:
                start = self._columns.starts[node]
                row[start : start + len(own)] = own >= enough
                nodes += 1
        return row, nodes - 1.0
