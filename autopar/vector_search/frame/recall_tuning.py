"""How much of the true neighbours a search finds, and the least effort with which it finds enough.

In: what was found of a sample and what is true; a recall to reach. Out: an effort, and what was measured on the way.

A sample finds sometimes more and sometimes less than all queries like it, and of many efforts the one that is kept is where
it happened to find much. So a target is reached where it is not above the least recall that such a sample speaks for:
a lower confidence bound of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, Metric

#: Neighbours of which recall is the share that is found.
MEASURED_AT = 10

Distances = NDArray[Any]
Positions = NDArray[Any]


#: Standard errors of a mean below which the true one is in one sample of 20.
_ERRORS = 1.645
#: Queries of a sample: at least and at most. Of a recall near 1 more tell whether it is reached: so many for each query that
#: may find nothing.
_LEAST_QUERIES, _MOST_QUERIES, _FOR_EACH_MISS = 512, 8192, 8


class Recall(NamedTuple):
    """found: the share of the true neighbours that the queries of a sample find, on average. at_least: what all queries like
    these find at least, as 19 samples of 20 tell it rightly."""

    found: float
    at_least: float

    @classmethod
    def of(cls, shares: NDArray[Any]) -> Recall:
        """Of what each query of a sample finds, `[num_queries]`; 1 where there is nothing to find.

        The bound is as if one query more had found nothing. So few queries, or some that find all, do not pass for
        certain: of n that find all it is about 1 - 2.6 / n.

        >>> Recall.of(np.ones(512)).at_least > 0.99, Recall.of(np.ones(20)).at_least > 0.9, Recall.of(np.ones(1)).at_least
        (True, False, 0.0)
        """
        if not len(shares):
            return cls(1.0, 1.0)
        one_more = np.append(shares, 0.0)
        error = one_more.std(ddof=1) / math.sqrt(len(one_more))
        return cls(float(shares.mean()), max(0.0, float(one_more.mean() - _ERRORS * error)))


@dataclass(frozen=True, slots=True)
class Measured:
    """effort: kept for searches that name none. recall: with it; None where nothing could be measured. tried: recall by
    effort. target: the recall that was asked for. at_least: as of `Recall`."""

    effort: int
    recall: float | None
    tried: Mapping[int, float]
    target: float | None = None
    at_least: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the target was; None where nothing could be measured, or no target is known."""
        return None if self.at_least is None or self.target is None else self.at_least >= self.target

    @property
    def details(self) -> dict[str, Any]:
        """For `stats`."""
        recall = {"recall": self.recall, "recall_at_least": self.at_least}
        return {"effort": self.effort, **recall, "recall_by_effort": dict(sorted(self.tried.items()))}

    def saved(self) -> dict[str, Any]:
        """For a file, as JSON takes it."""
        return {
            "effort": self.effort,
            "recall": self.recall,
            "tried": [[e, r] for e, r in self.tried.items()],
            "target": self.target,
            "at_least": self.at_least,
        }

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> Measured:
        """Of what `saved` gave.

        Raises:
            TypeError, ValueError, KeyError: if it gave something else.
        """
        tried = {int(e): float(r) for e, r in saved["tried"]}
        shares = (saved["recall"], saved.get("target"), saved.get("at_least"))
        recall, target, at_least = (None if share is None else float(share) for share in shares)
        return cls(saved["effort"], recall, tried, target, at_least)


def least_effort(efforts: Sequence[int], target: float, recall_at: Callable[[int], Recall]) -> Measured:
    """The first of rising efforts that surely reaches a recall. Where none does, the least of those that find most.

    Recall may stand still and rise again, as where lists hold the same vector many times: where one effort finds no more
    than the last, the greatest says whether the target can be reached at all, and the least that reaches it is looked for
    by halves.

    Args:
        efforts: rising. recall_at: measures one.

    >>> least_effort((1, 2, 4, 8), 0.9, lambda effort: Recall(1 - 0.3 / effort, 0.99 - 0.3 / effort))
    Measured(effort=4, recall=0.925, tried={1: 0.7, 2: 0.85, 4: 0.925}, target=0.9, at_least=0.915)
    >>> least_effort((1, 2, 4, 8), 0.9, lambda effort: Recall(min(effort, 2) / 4, 0.2)).effort
    2
    >>> least_effort((1, 2, 4, 8, 16), 0.9, lambda effort: Recall.of(np.ones(512) * (effort >= 8))).effort
    8
    """
    tried: dict[int, Recall] = {}
    low, high = 0, len(efforts) - 1

    def reaches(place: int) -> bool:
        effort = efforts[place]
        if effort not in tried:
            tried[effort] = recall_at(effort)
        return tried[effort].at_least >= target

    for low in range(len(efforts)):
        if reaches(low):
            return _kept(efforts[low], tried, target)
        if low and tried[efforts[low]].found <= tried[efforts[low - 1]].found:
            break
    if not reaches(high):
        return _kept(min(tried, key=lambda effort: (-tried[effort].found, effort)), tried, target)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return _kept(efforts[high], tried, target)


def _kept(effort: int, tried: Mapping[int, Recall], target: float) -> Measured:
    found = {each: recall.found for each, recall in tried.items()}
    return Measured(effort, found[effort], found, target, tried[effort].at_least)


def queries_for(target: float) -> int:
    """Of how many queries a sample is to tell whether a recall is reached.

    >>> queries_for(0.95), queries_for(0.995), queries_for(1)
    (512, 1600, 8192)
    """
    misses = max(1 - target, _FOR_EACH_MISS / _MOST_QUERIES)
    return max(_LEAST_QUERIES, round(_FOR_EACH_MISS / misses))


def can_tell(num_queries: int, target: float) -> bool:
    """Whether so many can speak for a recall at all, if they find all.

    >>> can_tell(20, 0.95), can_tell(60, 0.95)
    (False, True)
    """
    return Recall.of(np.ones(num_queries)).at_least >= target


def shares_of(found: tuple[Distances, Positions], truth: tuple[Distances, Positions], metric: Metric) -> NDArray[Any]:
    """The share of its true neighbours that each query finds. One as near as the last of them counts: of equal vectors
    any may be found.

    Args:
        found, truth: distances and positions, `[num_queries, k]`, best first; distances computed alike, so that those of
            equal vectors are equal. `NO_ID` in the truth, where there are fewer neighbours, counts for nothing.

    Returns:
        of each query that has neighbours.
    """
    (distances, positions), (best, nearest) = found, truth
    is_true = (positions[:, :, None] == nearest[:, None, :]).any(axis=-1)
    last = np.take_along_axis(best, np.maximum((nearest != NO_ID).sum(axis=1, keepdims=True) - 1, 0), axis=1)
    is_as_near = distances <= last if metric == "l2" else distances >= last
    hits = ((is_true | is_as_near) & (positions != NO_ID)).sum(axis=1)
    wanted = (nearest != NO_ID).sum(axis=1)
    return (np.minimum(hits, wanted) / np.maximum(wanted, 1))[wanted > 0]


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
