"""How much of the true neighbours a search finds, and the least effort with which it finds enough.

In: what was found of a sample and what is true; a recall to reach. Out: an effort, and what was measured on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.metrics import NO_ID, Metric

#: Neighbours of which recall is the share that is found.
MEASURED_AT = 10

Distances = NDArray[Any]
Positions = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """effort: kept for searches that name none. recall: with it; None where nothing could be measured. tried: recall by
    effort. target: the recall that was asked for."""

    effort: int
    recall: float | None
    tried: Mapping[int, float]
    target: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the target was; None where nothing could be measured, or no target is known."""
        return None if self.recall is None or self.target is None else self.recall >= self.target

    @property
    def details(self) -> dict[str, Any]:
        """For `stats`."""
        return {"effort": self.effort, "recall": self.recall, "recall_by_effort": dict(sorted(self.tried.items()))}

    def saved(self) -> dict[str, Any]:
        """For a file, as JSON takes it."""
        return {
            "effort": self.effort,
            "recall": self.recall,
            "tried": [[e, r] for e, r in self.tried.items()],
            "target": self.target,
        }

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> Measured:
        """Of what `saved` gave.

        Raises:
            TypeError, ValueError, KeyError: if it gave something else.
        """
        tried = {int(e): float(r) for e, r in saved["tried"]}
        recall, target = (None if share is None else float(share) for share in (saved["recall"], saved.get("target")))
        return cls(saved["effort"], recall, tried, target)


def least_effort(efforts: Sequence[int], target: float, recall_at: Callable[[int], float]) -> Measured:
    """The first of rising efforts that reaches a recall. Where none does, the least of those that find most.

    Recall may stand still and rise again, as where lists hold the same vector many times: where one effort finds no more
    than the last, the greatest says whether the target can be reached at all, and the least that reaches it is looked for
    by halves.

    Args:
        efforts: rising. recall_at: measures one.

    >>> least_effort((1, 2, 4, 8), 0.9, lambda effort: 1 - 0.3 / effort)
    Measured(effort=4, recall=0.925, tried={1: 0.7, 2: 0.85, 4: 0.925}, target=0.9)
    >>> least_effort((1, 2, 4, 8), 0.9, lambda effort: min(effort, 2) / 4).effort
    2
    >>> least_effort((1, 2, 4, 8, 16), 0.9, lambda effort: 0.5 if effort < 8 else 1.0).effort
    8
    """
    tried: dict[int, float] = {}
    low, high = 0, len(efforts) - 1
    for place, effort in enumerate(efforts):
        low = place
        tried[effort] = recall_at(effort)
        if tried[effort] >= target:
            return Measured(effort, tried[effort], tried, target)
        if place and tried[effort] <= tried[efforts[place - 1]]:
            break
    if efforts[high] not in tried:
        tried[efforts[high]] = recall_at(efforts[high])
    if tried[efforts[high]] >= target:
        while high - low > 1:
            middle = (low + high) // 2
            tried[efforts[middle]] = recall_at(efforts[middle])
            low, high = (low, middle) if tried[efforts[middle]] >= target else (middle, high)
        return Measured(efforts[high], tried[efforts[high]], tried, target)
    best = min(tried, key=lambda effort: (-tried[effort], effort))
    return Measured(best, tried[best], tried, target)


def recall_of(found: tuple[Distances, Positions], truth: tuple[Distances, Positions], metric: Metric) -> float:
    """The share of the true neighbours that is found. One as near as the last of them counts: of equal vectors
    any may be found.

    Args:
        found, truth: distances and positions, `[num_queries, k]`, best first; distances computed alike, so that those of
            equal vectors are equal. `NO_ID` in the truth, where there are fewer neighbours, counts for nothing.

    Returns:
        1 where there is nothing to find.
    """
    (distances, positions), (best, nearest) = found, truth
    is_true = (positions[:, :, None] == nearest[:, None, :]).any(axis=-1)
    last = np.take_along_axis(best, np.maximum((nearest != NO_ID).sum(axis=1, keepdims=True) - 1, 0), axis=1)
    is_as_near = distances <= last if metric == "l2" else distances >= last
    hits = ((is_true | is_as_near) & (positions != NO_ID)).sum(axis=1)
    wanted = (nearest != NO_ID).sum(axis=1)
    return float(np.minimum(hits, wanted).sum() / wanted.sum()) if wanted.any() else 1.0


def in_steps(first: int, last: int) -> tuple[int, ...]:
    """Rising numbers, two to each doubling, with the last.

    >>> in_steps(4, 20)
    (4, 6, 8, 12, 16, 20)
    """
    steps = [first]
    while steps[-1] < last:
        at = steps[-1]
        more = at * 3 // 2 if at & (at - 1) == 0 else at // 3 * 4
        steps.append(min(last, max(at + 1, more)))
    return tuple(steps)
