"""Measure recall on a sample, and find the least search effort that reaches a recall target.

In: search results and true neighbours of a sample; a recall target. Out: an effort, and the recall of each effort
tried.

The recall of a sample scatters around the recall of all queries, and the search for the least effort favours efforts
whose sample happens to be good. The target therefore counts as reached only if the lower confidence bound of the mean
recall reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, Metric

#: k of the measured recall@k.
MEASURED_AT = 10

Distances = NDArray[Any]
Positions = NDArray[Any]


#: One-sided 95 % confidence bound of a mean, in standard errors.
_STANDARD_ERRORS = 1.645
#: Minimum and maximum sample size; a target near 1 needs more queries: this many per query that may miss.
_MIN_QUERIES, _MAX_QUERIES, _QUERIES_PER_MISS = 512, 8192, 8


class Recall(NamedTuple):
    """The recall of a sample.

    Args:
        found: mean recall of the sample's queries.
        at_least: lower confidence bound of the mean recall of all such queries; 19 of 20 samples give a valid bound.
    """

    found: float
    at_least: float

    @classmethod
    def of(cls, shares: NDArray[Any], most: int | None = None) -> Recall:
        """The recall of a sample whose queries have these recalls, `[num_queries]`; 1 for an empty sample.

        The bound adds one query with recall 0. Small samples, and samples with a perfect recall, thus stay uncertain: n
        perfect queries give about 1 - 2.6 / n.

        Args:
            most: a larger sample has the bound of one of this size. A user measures with some hundred queries; their mean
                would fall below a bound that is as tight as thousands allow three times in ten.

        >>> Recall.of(np.ones(512)).at_least > 0.99, Recall.of(np.ones(20)).at_least > 0.9, Recall.of(np.ones(1)).at_least
        (True, False, 0.0)
        """
        if not len(shares):
            return cls(1.0, 1.0)
        one_more = np.append(shares, 0.0)
        error = one_more.std(ddof=1) / math.sqrt(min(len(one_more), most or len(one_more)))
        return cls(float(shares.mean()), max(0.0, float(one_more.mean() - _STANDARD_ERRORS * error)))


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of the tuning.

    Args:
        effort: default effort of a search.
        recall: mean recall of the sample at that effort; None if recall could not be measured.
        tried: mean recall by effort.
        target: recall target.
        at_least: lower confidence bound, as in `Recall`.
    """

    effort: int
    recall: float | None
    tried: Mapping[int, float]
    target: float | None = None
    at_least: float | None = None

    @property
    def reached(self) -> bool | None:
        """Whether the bound reached the target; None without a measurement or a target."""
        return None if self.at_least is None or self.target is None else self.at_least >= self.target

    @property
    def details(self) -> dict[str, Any]:
        """Entries for `stats`."""
        recall = {"recall": self.recall, "recall_at_least": self.at_least}
        return {"effort": self.effort, **recall, "recall_by_effort": dict(sorted(self.tried.items()))}

    def saved(self) -> dict[str, Any]:
        """JSON types for the index file."""
        return {
            "effort": self.effort,
            "recall": self.recall,
            "tried": [[e, r] for e, r in self.tried.items()],
            "target": self.target,
            "at_least": self.at_least,
        }

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> Measured:
        """Parse what `saved` returned.

        Raises:
            TypeError, ValueError, KeyError: invalid content.
        """
        tried = {int(e): float(r) for e, r in saved["tried"]}
        shares = (saved["recall"], saved.get("target"), saved.get("at_least"))
        recall, target, at_least = (None if share is None else float(share) for share in shares)
        return cls(saved["effort"], recall, tried, target, at_least)


def for_filter(effort: int, share: float) -> int:
    """The effort for a filter that allows this share of the vectors: doubled until it makes up for the selectivity. So
    few programs serve all filters.

    >>> for_filter(10, 1), for_filter(10, 0.9), for_filter(10, 0.2)
    (10, 20, 80)
    """
    while share < 1:
        effort, share = 2 * effort, 2 * share
    return effort


def least_effort(efforts: Sequence[int], target: float, recall_at: Callable[[int], Recall]) -> Measured:
    """Find the first effort whose recall bound reaches the target; otherwise the least effort of the highest recall.

    Recall can stay flat and rise again, as in lists that contain the same vector many times. If an effort gains
    nothing, the largest effort shows whether the target is reachable, and a bisection finds the least effort that
    reaches it.

    Args:
        efforts: increasing efforts.
        recall_at: measures the recall of an effort.

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
            return _measured_at(efforts[low], tried, target)
        if low and tried[efforts[low]].found <= tried[efforts[low - 1]].found:
            break
    if not reaches(high):
        return _measured_at(min(tried, key=lambda effort: (-tried[effort].found, effort)), tried, target)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return _measured_at(efforts[high], tried, target)


def _measured_at(effort: int, tried: Mapping[int, Recall], target: float) -> Measured:
    found = {each: recall.found for each, recall in tried.items()}
    return Measured(effort, found[effort], found, target, tried[effort].at_least)


def sample_size(target: float) -> int:
    """The number of sample queries needed to decide whether a recall target is reached.

    >>> sample_size(0.95), sample_size(0.995), sample_size(1)
    (512, 1600, 8192)
    """
    misses = max(1 - target, _QUERIES_PER_MISS / _MAX_QUERIES)
    return max(_MIN_QUERIES, round(_QUERIES_PER_MISS / misses))


def lowest_recall(hits: NDArray[Any], wanted: NDArray[Any], samples: Sequence[slice], target: float) -> Recall:
    """The recall of the sample with the lowest bound.

    Args:
        hits, wanted: `[num_queries]`, neighbours found, and neighbours; queries without any do not count.
        samples: queries of each sample.
        target: recall target; a larger sample than it needs has no tighter bound.
    """
    shares, most = hits / np.maximum(wanted, 1), sample_size(target)
    return min((Recall.of(shares[some][wanted[some] > 0], most) for some in samples), key=lambda one: one.at_least)


def can_reach(num_queries: int, target: float) -> bool:
    """Whether the recall bound of a perfect sample of this size reaches the target.

    >>> can_reach(20, 0.95), can_reach(60, 0.95)
    (False, True)
    """
    return Recall.of(np.ones(num_queries)).at_least >= target


def recall_per_query(
    found: tuple[Distances, Positions], truth: tuple[Distances, Positions], metric: Metric
) -> NDArray[Any]:
    """The recall of each query. A result as near as the last true neighbour counts as found: equal vectors are
    interchangeable.

    Args:
        found, truth: distances and positions, `[num_queries, k]`, best first. Equal vectors need identical distances in
            both (`distances_between`). `NO_ID` in the truth, for fewer than k neighbours, is ignored.

    Returns:
        The recall of each query that has neighbours.
    """
    (distances, positions), (best, nearest) = found, truth
    is_true = (positions[:, :, None] == nearest[:, None, :]).any(axis=-1)
    last = np.take_along_axis(best, np.maximum((nearest != NO_ID).sum(axis=1, keepdims=True) - 1, 0), axis=1)
    is_as_near = distances <= last if metric == "l2" else distances >= last
    hits = ((is_true | is_as_near) & (positions != NO_ID)).sum(axis=1)
    wanted = (nearest != NO_ID).sum(axis=1)
    return (np.minimum(hits, wanted) / np.maximum(wanted, 1))[wanted > 0]


def in_steps(first: int, last: int) -> tuple[int, ...]:
    """Increasing integers from `first` to `last`, two per doubling.

    >>> in_steps(4, 20)
    (4, 6, 8, 12, 16, 20)
    """
    steps = [first]
    while steps[-1] < last:
        at = steps[-1]
        more = at * 3 // 2 if at & (at - 1) == 0 else at // 3 * 4
        steps.append(min(last, max(at + 1, more)))
    return tuple(steps)
