"""Into how many microbatches a staged step is cut: those that divide the batch are tried, from a likely one on.

In: how a number's `StageSearch` is made. Out: what was tried, the best first. More microbatches leave less idle and hold
less, fewer are worked on more efficiently; so step time is taken to fall and then to rise with their number, and the
search ends where both neighbours are worse. The first number that leaves anything that fits is searched on all shapes of
submeshes, the others only on those of the best found so far. What is found for a number is exact in so far as
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
            shapes = None if self.best is None else [stage.submesh.shape for stage in self.best.stages]
            number = self.numbers[at]
            outcome = self.find(self.search_of(number, shapes))
            self.tried[at] = Tried(number, outcome)
            if outcome.step is not None and (self.best is None or outcome.step.step_time_s < self.best.step_time_s):
                self.best = outcome.step
        return self.tried[at].step_time_s
