"""Into how many microbatches a staged step is cut: those that divide the batch are tried, from a likely one on.

In: how a number's `StageSearch` is made. Out: what was tried, the best first. More microbatches leave less idle and hold
less, fewer are worked on more efficiently; so step time is taken to fall and then to rise with their number, and the
search ends where both neighbours are worse. The first number that leaves anything that fits is searched on all shapes of
submeshes, the others only on those of the best found so far; all layers as one stage are looked at again where that may
be quicker: a microbatch takes no less time than a smaller one, and two no less than one of twice the size. What is found for a number is exact in so far as
`StageSearch` is; that no other number is better is an assumption.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.pipeline.cluster import SubmeshShape
from autopar.pipeline.search import SCHEDULES, Outcome, StagedStep, StageSearch

#: What makes the search for a number of microbatches; on some shapes only, where given.
SearchOf = Callable[[int, Sequence[SubmeshShape] | None], StageSearch]


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
) -> tuple[Tried, ...]:
    """What was tried, the best first.

    Args:
        numbers: of microbatches, in order. start: the first to be tried, one of them.
        find: what is looked for.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return _Climb(search_of, numbers, find).run(numbers.index(start))


class _Climb:
    """One search over numbers of microbatches."""

    def __init__(self, search_of: SearchOf, numbers: Sequence[int], find: Callable[[StageSearch], Outcome]) -> None:
        self.search_of, self.numbers, self.find = search_of, numbers, find
        self.tried: dict[int, Tried] = {}
        self.best: StagedStep | None = None
        self.one_stage_on: tuple[SubmeshShape, ...] = ()

    def run(self, start: int) -> tuple[Tried, ...]:
        at = start
        while self._time(at) == math.inf and at + 1 < len(self.numbers):
            at += 1  # smaller microbatches hold less
        above = self._further(at, 1)
        if above == at and at == start:
            self._further(at, -1)
        return tuple(sorted(self.tried.values(), key=lambda one: one.step_time_s))

    def _further(self, at: int, by: int) -> int:
        """Go on as long as it gets better; where it ends."""
        while 0 <= at + by < len(self.numbers) and self._time(at + by) < self._time(at):
            at += by
        return at

    def _time(self, at: int) -> float:
        if at not in self.tried:
            number = self.numbers[at]
            search = self.search_of(number, self._shapes(number))
            outcome = self.find(search)
            self.tried[at] = Tried(number, outcome)
            whole = search.cluster.num_devices
            self.one_stage_on = self.one_stage_on or tuple(s for s in search.shapes if s.num_devices == whole)
            if outcome.step is not None and (self.best is None or outcome.step.step_time_s < self.best.step_time_s):
                self.best = outcome.step
        return self.tried[at].step_time_s

    def _shapes(self, number: int) -> list[SubmeshShape] | None:
        """Those that a number of microbatches is searched on; None: all."""
        if self.best is None:
            return None
        shapes = [stage.submesh.shape for stage in self.best.stages]
        looked_at = [one for one in self.tried.values() if one.outcome.one_stage_s < math.inf]
        least = (one.outcome.one_stage_s * min(1.0, number / one.num_microbatches) for one in looked_at)
        return shapes + (list(self.one_stage_on) if max(least, default=0.0) < self.best.step_time_s else [])
