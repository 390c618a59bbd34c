"""Deal the microbatches of a batch to members of different speed.

In: the number of microbatches, and the seconds that each member needs for one. Out: how many each member computes, so that the slowest
ends as early as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: The part of the time of a step that another deal has to save: a change of the deal starts new processes.
_LEAST_GAIN = 0.1


@dataclass(frozen=True, slots=True)
class Deal:
    """The microbatches of one member.

    Args:
        counts: the number of microbatches of each member, by rank.
        rank: of this member.
    """

    counts: tuple[int, ...]
    rank: int

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of the batch."""
        return sum(self.counts)

    @property
    def own(self) -> range:
        """The numbers of this member's microbatches."""
        start = sum(self.counts[: self.rank])
        return range(start, start + self.counts[self.rank])


def dealt(num_microbatches: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """The number of microbatches of each member, at least one.

    Each further microbatch goes where it ends first. That is exact: times do not fall with more microbatches.

    Args:
        seconds: that each member needs for one microbatch.

    >>> dealt(12, [1.0, 1.0, 2.0]), dealt(4, [1.0] * 3)
    ((5, 5, 2), (2, 1, 1))
    """
    counts = [1] * len(seconds)
    for _ in range(num_microbatches - len(seconds)):
        counts[min(range(len(seconds)), key=lambda n: (counts[n] + 1) * seconds[n])] += 1
    return tuple(counts)


def better(counts: Sequence[int], seconds: Sequence[float]) -> tuple[int, ...] | None:
    """Another deal that is worth a change; None if this one is nearly as fast as the best.

    Args:
        counts: the microbatches of each member.
        seconds: that each needs for one; 0 where it was not measured.
    """
    if not all(seconds):
        return None
    best = dealt(sum(counts), seconds)
    now_s, best_s = (max(n * s for n, s in zip(one, seconds, strict=True)) for one in (counts, best))
    return best if best_s < (1 - _LEAST_GAIN) * now_s else None
