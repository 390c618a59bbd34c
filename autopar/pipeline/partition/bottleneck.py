"""Minimize a sum plus a maximum by branch and bound, and query costs as late as possible.

In: variants of a problem; each finds the least sum under a limit on the maximum.
Out: the optimum, or the best solution so far and a lower bound. For an interval (a, b] of maxima, the least sum under
limit b, plus a, is a lower bound. Intervals are processed in the order of their bounds and shrunk: below the maximum of
the solution found, and below what cannot improve on the best solution. Sums use optimistic costs. A partition counts
only once all its costs have been queried; otherwise they are queried and the interval is solved again. The best
solution is optimal when the least bound of the open intervals reaches its cost.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.pipeline.partition.price_tables import Prices
from autopar.pipeline.partition.problem import Stage
from autopar.solve.problem import Status

Progress = Callable[[float, float], None]
Stages = tuple[Stage, ...]
#: Relative gap between cost and bound that counts as optimal.
PROVEN = 1e-9
_ROUNDING = 1e-12  # relative
_MOST_OTHERS = 16
_NARROW = 0.01  # relative
_MOST_UNSETTLED = 32  # intervals of a variant


class Variant(Protocol):
    """A subproblem: one number of stages, or one row of submeshes."""

    def cheapest(self, limit: float) -> tuple[float, Stages | None] | None:
        """The least sum with no stage above the limit, by the known costs, and its stages. None if it is infeasible.
        If the search is incomplete: a lower bound of the sum, and the stages of a larger sum, or None in their
        place."""
        ...

    def least_limit(self) -> float:
        """A limit below which nothing is feasible, by the known costs."""
        ...

    def query(self, stages: Stages) -> bool:
        """Query the costs of these stages. Return whether any was unknown before."""
        ...

    def figures(self, stages: Stages) -> tuple[float, float]:
        """The sum and the maximum of these stages."""
        ...


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop: a deadline in `time.monotonic` seconds, a relative gap between cost and bound, or a bound from which on
    solutions are of no use."""

    deadline: float
    relative_gap: float
    limit: float = math.inf


class Search:
    """One search.

    Attributes:
        best: the stages of the best solution; empty before the first.
        cost: the cost of the best solution; `inf` before the first.
        bound: a lower bound of the cost.
        status: how the search ended.
        met: the cost of each solution found.
    """

    def __init__(self, variants: Sequence[Variant], budget: Budget, progress: Progress | None = None) -> None:
        self.best: Stages = ()
        self.cost, self.bound = math.inf, 0.0
        self.status = Status.NOT_FOUND
        self.met: dict[Stages, float] = {}
        self._variants, self._budget, self._progress = variants, budget, progress
        self._open: list[tuple[float, int, float, float]] = []  # bound, variant, interval
        self._left = math.inf  # the least bound of the abandoned intervals
        self._num_unsettled = [0] * len(variants)

    def run(self, start: Search | None = None, prepare: Callable[[], None] | None = None) -> None:
        """Search until the best solution is proven optimal, time is up, or Ctrl-C.

        Args:
            start: a search whose best solution is the initial one.
            prepare: a callback before the search.

        Raises:
            KeyboardInterrupt: Ctrl-C before any solution was found.
        """
        try:
            if start is not None and start.best:
                self._meet(start.best, start.cost)
            if prepare is not None:
                prepare()
            for number in range(len(self._variants)):
                heapq.heappush(self._open, (0.0, number, 0.0, math.inf))
            self.status = self._work()
        except KeyboardInterrupt:
            if not self.best:
                raise
            self.status = Status.INTERRUPTED

    def others(self) -> tuple[Stages, ...]:
        """The other solutions found, best first."""
        ranked = sorted((cost, number) for number, cost in enumerate(self.met.values()))
        stages = list(self.met)
        return tuple(stages[number] for _, number in ranked[: _MOST_OTHERS + 1] if stages[number] != self.best)

    def _work(self) -> Status:
        while self._open:
            bound, number, low, high = self._open[0]
            self._bounded(bound)
            if self._is_closed(bound):
                break
            if time.monotonic() >= self._budget.deadline:
                return Status.FEASIBLE if self.best else Status.NOT_FOUND
            cut = self._settle(number, low, high, bound)
            heapq.heappop(self._open)  # only now: an interrupted interval stays open
            for item in cut:
                heapq.heappush(self._open, item)
        self._bounded(self._open[0][0] if self._open else math.inf)
        if not self.best:
            return Status.INFEASIBLE if math.isinf(self._left) and not self._open else Status.NOT_FOUND
        if self.bound >= self.cost * (1 - PROVEN):
            return Status.OPTIMAL
        return Status.CLOSE if self.bound >= self._enough() else Status.STEPPED

    def _settle(self, number: int, low: float, high: float, bound: float) -> list[tuple[float, int, float, float]]:
        """Solve an interval. Return the smaller intervals that stay open, with their bounds; or the interval itself
        if its new bound exceeds that of another interval, which then comes first."""
        variant = self._variants[number]
        next_bound = min((item[0] for item in self._open[1:3]), default=math.inf)
        while True:
            floor = max(low, variant.least_limit() * (1 - _ROUNDING)) if low == 0.0 else low
            found = variant.cheapest(high) if floor < high else None
            if found is None:
                return []
            total, stages = found
            if self._is_closed(total + floor):
                self._left = min(self._left, total + floor)
                return []
            if stages is None:
                return self._unsettled(number, total, floor, high)
            if total + floor > max(bound, next_bound) * (1 + PROVEN):
                return [(total + floor, number, floor, high)]
            if not variant.query(stages):
                break
            if time.monotonic() >= self._budget.deadline:
                return [(total + floor, number, floor, high)]
        bound, (total, largest) = total, variant.figures(stages)
        self._meet(stages, total + largest)
        if total * (1 - PROVEN) > bound or largest * (1 - PROVEN) > high:  # the variant did not find the least sum
            return self._unsettled(number, bound, floor, high)
        # No other solution up to `largest` has a smaller sum, and an improvement needs a maximum below `cost - total`.
        high = min(largest * (1 - _ROUNDING), self.cost - total, high * (1 - _ROUNDING))
        if high <= floor:
            return []
        middle = (floor + high) / 2
        return [(total + floor, number, floor, middle), (total + middle, number, middle, high)]

    def _unsettled(self, number: int, total: float, low: float, high: float) -> list[tuple[float, int, float, float]]:
        """Split an interval whose least sum is only bounded; abandon it if it is narrow, or after many others."""
        self._num_unsettled[number] += 1
        high = min(high, self.cost - total)
        if math.isinf(high) or high - low <= _NARROW * high or self._num_unsettled[number] > _MOST_UNSETTLED:
            self._left = min(self._left, total + low)
            return []
        middle = (low + high) / 2
        return [(total + low, number, low, middle), (total + middle, number, middle, high)]

    def _meet(self, stages: Stages, cost: float) -> None:
        self.met.setdefault(stages, cost)
        if cost < self.cost:
            self.best, self.cost = stages, cost
            self._report()

    def _bounded(self, bound: float) -> None:
        bound = min(bound, self._left, self.cost)
        if bound > self.bound:
            self.bound = bound
            self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self.cost, self.bound)

    def _enough(self) -> float:
        if math.isinf(self.cost):
            return self._budget.limit
        return min(self.cost - self._budget.relative_gap * abs(self.cost), self._budget.limit)

    def _is_closed(self, bound: float) -> bool:
        return bound >= self._enough()


def searched(variants: Sequence[Variant], prices: Prices, budget: Budget, progress: Progress | None) -> Search:
    """Run a search. If a cost contradicts `growth`, search again with a weaker assumption; queried costs stay known."""
    search = Search(variants, budget, progress)
    search.run()
    while prices.overstated:
        if search.status is Status.INTERRUPTED:
            search.bound = 0.0  # it relied on wrong lower bounds
            break
        before, search = search, Search(variants, budget, progress)
        search.run(before, prices.loosen)
    return search
