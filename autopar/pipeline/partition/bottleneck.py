"""Minimise a sum plus a maximum, with prices that are asked as late as possible.

In: for each of several variants, what gives the least sum under a limit on the maximum. Out: the optimum, or the best
so far and a bound. Of an interval (a, b] of maxima the sum under b, plus a, is a bound. Intervals are taken in order of
their bounds and cut: below the maximum found, and below what leaves no room for the best so far. The sums are by
optimistic prices; a partition counts when all its prices were asked, else these are asked and the interval is looked at
again. Where the bound of what is left reaches the best, that is proven.
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
#: Distance of cost and bound, relative, that counts as proven.
PROVEN = 1e-9
_ROUNDING = 1e-12  # relative
_MOST_OTHERS = 16
_NARROW = 0.01  # relative


class Variant(Protocol):
    """One way to look at a problem: an order of the line, a number of stages."""

    def cheapest(self, limit: float) -> tuple[float, Stages | None] | None:
        """The least sum with no stage above the limit, by the prices known, and its stages; None where there is none.
        Where that could not be found out: a bound of the sum, and stages of a larger one or None for them."""
        ...

    def least_limit(self) -> float:
        """No limit below this one leaves anything, by the prices known."""
        ...

    def ask(self, stages: Stages) -> bool:
        """Ask what these cost; whether anything was new."""
        ...

    def figures(self, stages: Stages) -> tuple[float, float]:
        """Their sum and their maximum."""
        ...


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop: a time on the clock of `time.monotonic`, or a gap between cost and bound, relative."""

    deadline: float
    relative_gap: float


class Search:
    """One search.

    Attributes:
        best, cost: the best yet; empty and `inf` before the first.
        bound: nothing is cheaper.
        status: how it ended.
        met: sums and maxima of all that were met, with their stages.
    """

    def __init__(self, variants: Sequence[Variant], budget: Budget, progress: Progress | None = None) -> None:
        self.best: Stages = ()
        self.cost, self.bound = math.inf, 0.0
        self.status = Status.NOT_FOUND
        self.met: dict[Stages, float] = {}
        self._variants, self._budget, self._progress = variants, budget, progress
        self._open: list[tuple[float, int, float, float]] = []  # bound, variant, interval
        self._left = math.inf  # the least bound of what is not looked at further

    def run(self, start: Search | None = None, prepare: Callable[[], None] | None = None) -> None:
        """Search until the best is proven, time is up, or Ctrl-C.

        Args:
            start: a search whose best this one begins with.
            prepare: is called first.

        Raises:
            KeyboardInterrupt: on Ctrl-C before anything was found.
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
        """What else was met, best first."""
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
            heapq.heappop(self._open)  # now: an interrupted one still counts
            for item in cut:
                heapq.heappush(self._open, item)
        self._bounded(self._open[0][0] if self._open else math.inf)
        if not self.best:
            return Status.INFEASIBLE if math.isinf(self._left) else Status.NOT_FOUND
        if self.bound >= self.cost * (1 - PROVEN):
            return Status.OPTIMAL
        return Status.CLOSE if self.bound >= self._enough() else Status.STEPPED

    def _settle(self, number: int, low: float, high: float, bound: float) -> list[tuple[float, int, float, float]]:
        """What is left of an interval: smaller ones, with their bounds; or itself, where its bound turns out to be
        higher than another one's, which is then to be looked at first."""
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
            if not variant.ask(stages):
                break
            if time.monotonic() >= self._budget.deadline:
                return [(total + floor, number, floor, high)]
        bound, (total, largest) = total, variant.figures(stages)
        self._meet(stages, total + largest)
        if total * (1 - PROVEN) > bound:  # not the least sum, but as near as was found
            return self._unsettled(number, bound, floor, high)
        # Nothing else up to `largest` has a smaller sum; and what could still win is below the rest.
        high = min(largest * (1 - _ROUNDING), self.cost - total)
        if high <= floor:
            return []
        middle = (floor + high) / 2
        return [(total + floor, number, floor, middle), (total + middle, number, middle, high)]

    def _unsettled(self, number: int, total: float, low: float, high: float) -> list[tuple[float, int, float, float]]:
        """Halves of an interval of which no more than a bound of the sum is known; none if it is narrow."""
        high = min(high, self.cost - total)
        if math.isinf(high) or high - low <= _NARROW * high:
            self._left = min(self._left, total + low)
            return []
        middle = (low + high) / 2
        return [(total + low, number, low, middle), (total + middle, number, middle, high)]

    def _meet(self, stages: Stages, cost: float) -> None:
        self.met.setdefault(stages, cost)
        if cost < self.cost:
            self.best, self.cost = stages, cost
            self._tell()

    def _bounded(self, bound: float) -> None:
        bound = min(bound, self._left, self.cost)
        if bound > self.bound:
            self.bound = bound
            self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.cost, self.bound)

    def _enough(self) -> float:
        return self.cost - self._budget.relative_gap * abs(self.cost)

    def _is_closed(self, bound: float) -> bool:
        return bound >= self._enough()


def searched(variants: Sequence[Variant], prices: Prices, budget: Budget, progress: Progress | None) -> Search:
    """A search that is over. Where prices turn out lower than `growth` lets them be, it is begun anew with less trust
    in it; what was asked stays known."""
    search = Search(variants, budget, progress)
    search.run()
    while prices.overstated:
        if search.status is Status.INTERRUPTED:
            search.bound = 0.0  # it rests on prices that are not so
            break
        before, search = search, Search(variants, budget, progress)
        search.run(before, prices.loosen)
    return search
