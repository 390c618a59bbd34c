"""Search for the number of microbatches of a pipelined step among the divisors of the batch.

In: functions that make a `StageSearch` and an estimate for a number of microbatches.
Out: the numbers tried, the best first. More microbatches shrink the bubble and the memory of each; fewer make kernels
more efficient. So the step time is assumed to fall and then to rise with their number. The first number that fits is
searched on all shapes of submeshes. With its costs, steps with more and with fewer microbatches are estimated on the
shapes of its stages until they get slower. The number where this ends is searched in turn, until a search finds nothing
faster. All layers as one stage are searched again only where they may be faster: a microbatch takes at least as long as
a smaller one, and two take at least as long as one of twice the size. The result for a number is as exact as
`StageSearch`; that no other number is better is an assumption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import MicrobatchError
from autopar.pipeline.partition.cluster import SubmeshShape
from autopar.pipeline.search.stage_search import Outcome, StagedStep, StageSearch

#: Makes the search for a number of microbatches, on the given shapes or on all.
SearchOf = Callable[[int, Sequence[SubmeshShape] | None], StageSearch]
#: Makes a search for the first number with the costs of the second; None if it cannot.
EstimateOf = Callable[[int, int, Sequence[SubmeshShape]], StageSearch | None]
#: One stage whose estimate is this many times slower than several stages is not searched.
_SLOWER = 1.04


@dataclass(frozen=True, slots=True)
class Tried:
    """A number of microbatches and its result."""

    num_microbatches: int
    outcome: Outcome

    @property
    def step_time_s(self) -> float:
        """The step time; `inf` if nothing fits."""
        return math.inf if self.outcome.step is None else self.outcome.step.step_time_s


def checked_count(count: Any) -> int:
    """A number of microbatches.

    Raises:
        MicrobatchError: it is none.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise MicrobatchError(f'`num_microbatches` is {count!r}: give 1 or more, or "auto"')
    return count


def divisors(batch: int, least: int = 1) -> tuple[int, ...]:
    """The numbers of equal parts of a batch."""
    return tuple(n for n in range(least, batch + 1) if batch % n == 0)


def over_microbatches(
    search_of: SearchOf,
    numbers: Sequence[int],
    start: int,
    find: Callable[[StageSearch], Outcome] = lambda search: search.outcome(),
    estimate_of: EstimateOf = lambda number, known, shapes: None,
) -> tuple[Tried, ...]:
    """Search over numbers of microbatches. Return the results, best first.

    Args:
        numbers: numbers of microbatches in ascending order.
        start: the first number to try, one of them.
        find: a function that runs a search.
        estimate_of: a function that makes an estimating search; where it returns None, the number is searched.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return _Climb(search_of, numbers, find, estimate_of).run(numbers.index(start))


class _Climb:
    """Hill climbing over the positions of numbers of microbatches."""

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
        while self._time(at) == math.inf and at + 1 < len(self.numbers) and not self.tried[at].outcome.is_slow:
            at += 1  # smaller microbatches hold less
        while (likely := self._likely(at)) != at and self._time(likely) < self._time(at):
            at = likely
        return tuple(sorted(self.tried.values(), key=lambda one: one.step_time_s))

    def _likely(self, at: int) -> int:
        """The position with the best estimate from this one's costs."""
        above = self._further(at, 1)
        return self._further(at, -1) if above == at else above

    def _further(self, at: int, by: int) -> int:
        """The position where going in one direction stops to improve."""
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
        assert self.best.kind is not None, "stages of branches are not estimated"
        self.estimated[at] = outcome = search.outcome((self.best.kind,))
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
        tried = self.tried[at]  # the bound of steps that are too slow says where others are less so
        return tried.outcome.bound_s if tried.outcome.step is None else tried.step_time_s

    def _shapes(self, at: int) -> list[SubmeshShape] | None:
        """The shapes to search for a number of microbatches; None for all."""
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
