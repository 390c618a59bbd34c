"""Choose slices of tokens, and microbatches with them: the dynamic programme of TeraPipe (Li et al., 2021, section 3.3).

In: the seconds of every slice on one stage, for each size of microbatch, and the number of stages.
Out: `TokenSlices`: the microbatches, each with its slices.

Parts of t_1, t_2, ... seconds flow through K equal stages in

    T = t_1 + t_2 + ... + (K - 1) max t_i        seconds.

For a limit of the maximum, the least sum is a dynamic programme over the tokens at which a slice ends, and over the
examples at which a microbatch ends. The paper tries every limit. Here the next limit lies just below the maximum of the
last solution, which visits only the pairs (sum, maximum) that no other pair dominates, and so is exact, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Seconds of the slice from token unit i to j at [i, j]; infinite where there is no such slice.
SliceSeconds = np.ndarray
#: The units at which slices end, without 0.
Ends = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenSlices:
    """Microbatches and their slices.

    Args:
        microbatches: for each microbatch, its examples and the units at which its slices end.
        seconds: T.
    """

    microbatches: tuple[tuple[int, Ends], ...]
    seconds: float


def step_s(parts: Sequence[float], num_stages: int) -> float:
    """The seconds T of parts that flow through equal stages.

    >>> step_s([1.0, 2.0], 3)
    7.0
    """
    return math.fsum(parts) + (num_stages - 1) * max(parts)


def best_slices(seconds: Mapping[int, SliceSeconds], num_examples: int, num_stages: int) -> TokenSlices | None:
    """The microbatches and slices with the least T; None if no sizes add up to the examples.

    Args:
        seconds: the seconds of slices for each number of examples of a microbatch.
        num_examples: the examples of a step.
        num_stages: K.
    """
    best: TokenSlices | None = None
    limit = math.inf
    while True:
        found = _within(seconds, num_examples, limit)
        if found is None:
            return best
        parts = [
            float(seconds[size][start, stop])
            for size, ends in found
            for start, stop in zip((0, *ends), ends, strict=False)
        ]
        total = step_s(parts, num_stages)
        if best is None or total < best.seconds:
            best = TokenSlices(found, total)
        limit = max(parts)


def _within(
    seconds: Mapping[int, SliceSeconds], num_examples: int, limit: float
) -> tuple[tuple[int, Ends], ...] | None:
    """The microbatches whose slices each take less than a limit, with the least sum."""
    slices = {size: _slices_within(table, limit) for size, table in seconds.items()}
    least, last = [0.0, *[math.inf] * num_examples], [0] * (num_examples + 1)
    for examples in range(1, num_examples + 1):
        for size, (total, _) in slices.items():
            if size <= examples and least[examples - size] + total < least[examples]:
                least[examples], last[examples] = least[examples - size] + total, size
    if math.isinf(least[-1]):
        return None
    found: list[tuple[int, Ends]] = []
    rest = num_examples
    while rest:
        found.append((last[rest], slices[last[rest]][1]))
        rest -= last[rest]
    return tuple(found[::-1])


def _slices_within(table: SliceSeconds, limit: float) -> tuple[float, Ends]:
    """The slices of one microbatch, and their sum; an infinite sum if there are none."""
    num_units = table.shape[1] - 1
    allowed = np.where(table < limit, table, math.inf)
    least, start = np.full(num_units + 1, math.inf), np.zeros(num_units + 1, int)
    least[0] = 0.0
    for stop in range(1, num_units + 1):
        sums = least[:stop] + allowed[:stop, stop]
        start[stop] = np.argmin(sums)
        least[stop] = sums[start[stop]]
    if math.isinf(least[-1]):
        return math.inf, ()
    ends: list[int] = []
    stop = num_units
    while stop:
        ends.append(stop)
        stop = int(start[stop])
    return float(least[-1]), tuple(ends[::-1])
