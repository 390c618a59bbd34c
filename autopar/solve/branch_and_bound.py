"""Branch and bound by HiGHS, with memory rows added as they are violated.

In: a `Problem`, best already reduced. Out: `Branched`: the best assignment found, a bound, and how it ended.
A round solves the programme with the memory rows so far; if its solution holds too much at some instants,
their rows are added. Every round's bound holds for the whole problem, for rows are only missing.

HiGHS has tolerances, and none of them may forbid what fits or raise a bound. So rows of memory are of whole numbers,
rounded down; what they let through is forbidden by rows that count nodes (`_MemoryRows._cover`). Costs so large that
no good assignment takes them are lowered (`_Scaled`), and the tolerance of costs is taken off every bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.live_instants import Instants, instants_of
from autopar.solve.mip import TOLERANCE, End
from autopar.solve.mip_encoding import Columns
from autopar.solve.problem import ROUNDING, Problem

Report = Callable[[float, float], None]
_OBJECTIVE = 1e4  # what the objective is scaled to: far above HiGHS's tolerances of 1e-7, far below 1/eps
_DEAREST = 1e4  # times the size of the optimum: dearer choices are priced so
_FINER = 0.25  # of the scale, for another run
_ROWS_A_ROUND = 4
_FEW_ROWS = 24  # so many are all there from the start
_DIGITS = 20  # binary digits of a memory row's limit


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
        relative_gap: distance of cost and bound that counts as optimal. With HiGHS's tolerance taken off, the bound
            may be further off than that where the end is `OPTIMAL`.
        report: called with the cost of the best that is known to fit and the bound, in seconds.
    """
    from autopar.solve.highs import solve_mip  # noqa: PLC0415 - with OR-Tools, which running a saved plan must not need

    columns = Columns(problem)
    rows = _MemoryRows(problem, columns)
    best, least = incumbent, problem.evaluate(incumbent) if incumbent else np.inf
    scaled = _Scaled(columns, least)
    bound = -np.inf

    def tell(cost: float, low: float) -> None:
        if report is not None:  # with rows missing, what HiGHS has found may not fit
            known = least if problem.memory_limit is not None else min(least, scaled.cost(cost))
            report(known, max(bound, scaled.bound(low)))

    while True:
        outcome = solve_mip(
            columns.programme(costs=scaled.costs, memory=rows.rows),
            time_limit_s=max(0.01, deadline - time.monotonic()),
            hint=columns.encode(best) if best else None,
            relative_gap=relative_gap,
            report=tell,
        )
        if outcome.end is End.INFEASIBLE:  # with an assignment at hand it errs, and has proven nothing
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
    """The costs of a programme's columns as HiGHS gets them.

    A column dearer than any in a good assignment is priced lower, which bounds allow: HiGHS would lose small costs
    beside large ones.

    Args:
        least: the cost of an assignment, `inf` if none is known, in seconds.

    Attributes:
        unit: the size of the optimum, in seconds.
        costs: of each column, in units of `unit / _OBJECTIVE`.
    """

    def __init__(self, columns: Columns, least: float) -> None:
        costs, (floors, floor) = columns.costs(), columns.floors()
        if least < np.inf:
            self.unit = max(abs(least), least - floor) or 1.0
            dearest = 2.0 * (least - floor)
        else:
            self.unit = _typical(columns.problem)
            dearest = _DEAREST * self.unit
        self._columns, self._most = columns, np.minimum(costs, floors + dearest)
        self.costs = self._most * (_OBJECTIVE / self.unit)
        self._whole = bool((np.floor(costs) == costs).all())

    def cost(self, objective: float) -> float:
        """What an objective is in seconds."""
        return objective * self.unit / _OBJECTIVE

    def bound(self, objective: float) -> float:
        """A bound of HiGHS's in seconds, less its tolerance; assignments of whole costs have whole costs."""
        bound = self.cost(objective - TOLERANCE * self._columns.terms)
        return float(math.ceil(bound)) if self._whole and math.isfinite(bound) else bound

    def lowers(self, choices: tuple[int, ...]) -> bool:
        """Whether an assignment seems cheaper than it is."""
        chosen = self._columns.encode(choices) > 0.0
        return bool((self._most < self._columns.costs())[chosen].any())


def _typical(problem: Problem) -> float:
    """A cost, in seconds, of about the size of the optimum's variable part."""
    finite = [c[np.isfinite(c)] for c in problem.node_costs] + [e.costs[np.isfinite(e.costs)] for e in problem.edges]
    total = sum(float(np.median(np.abs(c))) for c in finite if c.size)
    return total or max((float(np.abs(c).max()) for c in finite if c.size), default=0.0) or 1.0


class _MemoryRows:
    """The memory rows of a programme, as they come to matter."""

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
            # Without any row the first solution holds far too much; where most is held on average, most will be.
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
        """A row of whole numbers that all assignments that fit keep to: of what is held beyond the least, in units
        of about a millionth of the room that is left for it, rounded down."""
        assert self._instants is not None and self._limit is not None
        more, least = self._beyond_least(position)
        room = self._limit - least
        size = room if room > 0.0 else float(more.max(initial=0.0))
        unit = math.ldexp(1.0, max(-1000, math.frexp(size)[1] - _DIGITS))  # a power of two: division is exact
        most = 2.0 ** (_DIGITS + 1)  # more than there is room for
        self.rows.append((np.floor(np.minimum(more / unit, most)), math.floor(max(room / unit, -1.0)) + 0.5))
        self._present.add(position)

    def _beyond_least(self, position: int) -> tuple[np.ndarray, float]:
        """What each column holds beyond the least of its node, and the sum of those leasts, in bytes."""
        assert self._instants is not None
        held = self._columns.memory_row(self._instants.live_at(position))
        starts, sizes = self._columns.starts, self._columns.sizes
        leasts = np.minimum.reduceat(held[: starts[-1]], starts[:-1])
        held[: starts[-1]] -= np.repeat(leasts, sizes)
        return held, math.fsum(leasts)

    def _cover(self, position: int, choices: Sequence[int], excess: float) -> tuple[np.ndarray, float]:
        """A row without tolerance, for a violation too slight for the others: of the nodes live then, not all may take
        a strategy that holds as much as the chosen one or more; less will do while together it is still too much."""
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
