"""Record the requests that a router gets, as a trace, and report drifts of their rates.

In: requests with their tokens. Out: `Observed`: a trace of the last while; means; the models whose rates differ from earlier ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from autopar.placement import Trace

#: Requests that are remembered.
_MOST = 200_000
#: The weight of a request in the mean of generated tokens, and that mean before the first request.
_WEIGHT, _FIRST_MEAN = 0.05, 128.0
#: A rate has drifted if it differs by this factor, and by so many standard deviations of the count.
_FACTOR, _DEVIATIONS = 1.5, 4.0


class Seen(NamedTuple):
    """A request: when it came, in seconds of a clock, and its tokens."""

    arrival_s: float
    model: str
    prompt_tokens: int
    output_tokens: int


class Observed:
    """The requests of the last while."""

    def __init__(self) -> None:
        self._seen: deque[Seen] = deque(maxlen=_MOST)
        self.mean_new: dict[str, float] = {}

    def add(self, seen: Seen) -> None:
        """Record a request."""
        self._seen.append(seen)
        before = self.mean_new.get(seen.model, _FIRST_MEAN)
        self.mean_new[seen.model] = before + _WEIGHT * (seen.output_tokens - before)

    def mean_of(self, model: str) -> float:
        """The mean number of generated tokens of a model's requests."""
        return self.mean_new.get(model, _FIRST_MEAN)

    def trace(self, start_s: float, end_s: float) -> Trace | None:
        """The requests that arrived in a time; None if there are none."""
        own = sorted(each for each in self._seen if start_s <= each.arrival_s < end_s)
        if not own:
            return None
        names = tuple(sorted({each.model for each in own}))
        columns = np.array([(names.index(n), p, new) for _, n, p, new in own], np.int32).T
        arrival = np.array([each.arrival_s for each in own]) - start_s
        return Trace(names, arrival, columns[0], columns[1], columns[2], end_s - start_s)


def drifted(before: Trace | None, after: Trace | None) -> list[str]:
    """The models whose rates differ between two traces, by more than their bursts explain.

    The variance of the number of requests of a renewal process is the number times the squared coefficient of variation of its
    intervals.
    """
    counts = [_counts(each) for each in (before, after)]
    some = before or after
    seconds = [(each or some).duration_s if some else 1.0 for each in (before, after)]
    found: list[str] = []
    for name in sorted({*counts[0], *counts[1]}):
        (num, cv2), (new, new_cv2) = (each.get(name, (0, 1.0)) for each in counts)
        scale = seconds[1] / seconds[0]
        expected = num * scale
        deviation = math.sqrt(max(1.0, num * cv2 * scale**2 + new * new_cv2))
        ratio = max(expected, new) / max(1e-9, min(expected, new))
        if ratio >= _FACTOR and abs(new - expected) > _DEVIATIONS * deviation:
            found.append(name)
    return found


def _counts(trace: Trace | None) -> Mapping[str, tuple[int, float]]:
    """For each model the number of requests, and the squared coefficient of variation of its intervals, at least 1."""
    if trace is None:
        return {}
    found: dict[str, tuple[int, float]] = {}
    for number, name in enumerate(trace.models):
        arrivals = trace.arrival_s[trace.model == number]
        intervals = np.diff(arrivals)
        mean = float(intervals.mean()) if intervals.size else 0.0
        found[name] = int(arrivals.size), max(1.0, float(intervals.var()) / mean**2 if mean else 1.0)
    return found
