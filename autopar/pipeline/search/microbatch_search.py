"""Into how many microbatches a staged step is cut: those that divide the batch are tried, from a likely one on.

In: how a number's `StageSearch` is made, and how one that estimates. Out: what was tried, the best first. More microbatches
leave less idle and hold less, fewer are worked on more efficiently; so step time is taken to fall and then to rise with
their number. The first number that leaves anything that fits is searched on all shapes of submeshes. From the prices found
for it, steps with more and fewer microbatches are estimated, on the shapes of its stages, until they get slower; the one
where that ends is searched in its turn, and so on until a search finds nothing quicker. All layers as one stage are looked
at again where that may be quicker: a microbatch takes no less time than a smaller one, and two no less than one of twice
the size. What is found for a number is exact in so far as `StageSearch` is; that no other number is better is an
assumption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.pipeline.partition.cluster import SubmeshShape
from autopar.pipeline.search.stage_search import SCHEDULES, Outcome, StagedStep, StageSearch

#: What makes the search for a number of microbatches; on some shapes only, where given.
SearchOf = Callable[[int, Sequence[SubmeshShape] | None], StageSearch]
#: What makes one for the first number by prices for the second; None where it cannot.
EstimateOf = Callable[[int, int, Sequence[SubmeshShape]], StageSearch | None]
#: One stage that is estimated to be so much slower than several is not searched.
_SLOWER = 1.04


@dataclass(frozen=True, slots=True)
class Tried:
    """A number of microbatches, and what was found for it."""

    num_microbatches: int
    outcome: Outcome

    @property
    def step_time_s(self) -> float:
        """`inf` where nothing fits."""
        return math.inf if self.outcome.step is None else self.outcome.step.step_time_s


def divisors(batch: int, least: int = 1) -> tuple[int, ...]:
    """Numbers of equal parts of a batch."""
    return tuple(n for n in range(least, batch + 1) if batch % n == 0)


def over_microbatches(
    search_of: SearchOf,
    numbers: Sequence[int],
    start: int,
    find: Callable[[StageSearch], Outcome] = lambda search: search.outcome(SCHEDULES),
    estimate_of: EstimateOf = lambda number, known, shapes: None,
) -> tuple[Tried, ...]:
    """What was tried, the best first.

    Args:
        numbers: of microbatches, in order. start: the first to be tried, one of them.
        find: what is looked for.
        estimate_of: where it makes no search, numbers are searched instead of estimated.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return _Climb(search_of, numbers, find, estimate_of).run(numbers.index(start))


class _Climb:
    """One search over numbers of microbatches, by their positions."""

    def __init__(
        self,
        search_of: SearchOf,
        numbers: Sequence[int],
        find: Callable[[StageSearch], Outcome],
        estimate_of: EstimateOf,
    ) -> None:
        self.search_of, self.numbers, self.find, self.estimate_of = search_of, numbers, find, estimate_of
        self.tried: dict[int, Tried] = {}
        self.best: StagedStep | None = None
        self.one_stage_on: tuple[SubmeshShape, ...] = ()
        self.estimated: dict[int, Outcome] = {}

    def run(self, start: int) -> tuple[Tried, ...]:
        at = start
        while self._time(at) == math.inf and at + 1 < len(self.numbers):
            at += 1  # smaller microbatches hold less
        while (likely := self._likely(at)) != at and self._time(likely) < self._time(at):
            at = likely
        return tuple(sorted(self.tried.values(), key=lambda one: one.step_time_s))

    def _likely(self, at: int) -> int:
        """The best number by estimates from this one's prices."""
        above = self._further(at, 1)
        return self._further(at, -1) if above == at else above

    def _further(self, at: int, by: int) -> int:
        """Go on as long as it gets better; where it ends."""
        end, time_s = at, self._time(at)
        while 0 <= end + by < len(self.numbers) and (further_s := self._estimate(end + by, at)) < time_s:
            end, time_s = end + by, further_s
        return end

    def _estimate(self, at: int, known: int) -> float:
        if at in self.tried or self.best is None:
            return self._time(at)
        number = self.numbers[at]
        search = self.estimate_of(number, self.numbers[known], self._shapes(at) or ())
        if search is None:
            return self._time(at)
        self.estimated[at] = outcome = search.outcome((self.best.schedule.name,))
        return math.inf if outcome.step is None else outcome.step.step_time_s

    def _time(self, at: int) -> float:
        if at not in self.tried:
            number = self.numbers[at]
            search = self.search_of(number, self._shapes(at))
            outcome = self.find(search)
            self.tried[at] = Tried(number, outcome)
            whole = search.cluster.num_devices
            self.one_stage_on = self.one_stage_on or tuple(s for s in search.shapes if s.num_devices == whole)
            if outcome.step is not None and (self.best is None or outcome.step.step_time_s < self.best.step_time_s):
                self.best = outcome.step
        return self.tried[at].step_time_s

    def _shapes(self, at: int) -> list[SubmeshShape] | None:
        """Those that a number of microbatches is searched on; None: all."""
        if self.best is None:
            return None
        shapes = [stage.submesh.shape for stage in self.best.stages]
        return shapes + (list(self.one_stage_on) if self._may_be_one_stage(at, self.best) else [])

    def _may_be_one_stage(self, at: int, best: StagedStep) -> bool:
        if at in self.estimated:
            estimated = self.estimated[at]
            if estimated.step is not None and estimated.one_stage_s > _SLOWER * estimated.step.step_time_s:
                return False
        looked_at = [one for one in self.tried.values() if one.outcome.one_stage_s < math.inf]
        least = (one.outcome.one_stage_s * min(1.0, self.numbers[at] / one.num_microbatches) for one in looked_at)
        return max(least, default=0.0) < best.step_time_s
