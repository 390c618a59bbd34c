"""Operators to layers: runs of operators of about equal FLOPs, with few bytes between them.

In: operators in the order of the program, their FLOPs, and the bytes that pass each place between two of them. Out: a
`Clustering`. As Alpa's (Zheng et al. 2022, section 5.2), a dynamic programme:

    minimise    sum over cuts of cut_bytes; among equals, the sum of the squares of the layers' FLOPs
    subject to  (1 - delta) mean <= FLOPs of a layer <= (1 + delta) mean

An operator that alone exceeds the mean cannot be cut: it counts as one mean, and the rest is balanced among the other
layers. Where nothing keeps to delta, it is widened by half until something does. Modules that repeat are recognised by
their operators, so as many layers as there are modules, or a part of them, can be asked for by leaving the number out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

_ALIKE = 1e-9  # relative
_MOST_LAYERS = 48
_DELTA = 0.1
_WIDEN = 1.5


@dataclass(frozen=True, slots=True)
class Clustering:
    """Layers of operators.

    Args:
        starts: the first operator of each layer; the first is 0.
        keys: layers of equal operators have equal numbers, and the others different ones.
        cut_bytes: that pass from layer to layer, all cuts together.
        delta: that holds, relative: how far from the mean a layer may be.
    """

    starts: tuple[int, ...]
    keys: tuple[int, ...]
    cut_bytes: float
    delta: float

    def layers(self, num_operators: int) -> tuple[range, ...]:
        """The operators of each layer."""
        ends = [*self.starts[1:], num_operators]
        return tuple(range(start, end) for start, end in zip(self.starts, ends, strict=True))


def cluster_layers(
    flops: Sequence[float],
    cut_bytes: Sequence[float],
    *,
    num_layers: int | None = None,
    keys: Sequence[Hashable] | None = None,
    delta: float = _DELTA,
    most_layers: int = _MOST_LAYERS,
) -> Clustering:
    """The layers.

    Args:
        flops: of each operator.
        cut_bytes: that pass from the operators before to those from each one on; the first is not used.
        num_layers: how many; at most one for each operator. By default as many as modules repeat, or an equal share of
            them where that is more than `most_layers`; where nothing repeats, as many as keep to `delta`, and no more
            than `most_layers`.
        keys: operators with equal keys are equal; by default those with equal FLOPs and bytes.
        delta: see above, 0 < delta.

    >>> block = [4.0, 1.0, 8.0, 1.0]
    >>> cluster_layers(block * 3, [2.0, 6.0, 2.0, 6.0] * 3).starts
    (0, 4, 8)
    """
    assert len(flops) == len(cut_bytes) > 0, "operators need FLOPs and a cut each"
    assert delta > 0, delta
    numbers: dict[Hashable, int] = {}
    given: Sequence[Hashable] = keys if keys is not None else list(zip(flops, cut_bytes, strict=True))
    names = np.array([numbers.setdefault(key, len(numbers)) for key in given])
    work, cuts = np.asarray(flops, float), np.asarray(cut_bytes, float)
    if num_layers is None:
        num_layers = _repeats(names, work, most_layers) or _as_many_as_fit(work, cuts, delta, most_layers)
    assert 1 <= num_layers <= len(work), f"{num_layers} layers of {len(work)} operators"
    found = None
    while found is None:
        found = _cut(_clipped(work, num_layers), cuts, num_layers, delta)
        delta = delta if found is not None else _WIDEN * delta
    ends = [*found[1:], len(work)]
    layers = [tuple(names[start:end].tolist()) for start, end in zip(found, ends, strict=True)]
    alike: dict[tuple[int, ...], int] = {}
    return Clustering(
        starts=found,
        keys=tuple(alike.setdefault(layer, len(alike)) for layer in layers),
        cut_bytes=float(cuts[list(found[1:])].sum()),
        delta=delta,
    )


def _clipped(flops: np.ndarray, num_layers: int) -> np.ndarray:
    """FLOPs in units of the mean layer; operators that exceed it as 1, and the mean is that of the others."""
    work, large = np.maximum(flops, 0.0), np.zeros(len(flops), bool)
    while True:
        mean = work[~large].sum() / (num_layers - large.sum())
        more = ~large & (work > mean * (1 + _ALIKE))
        if num_layers - large.sum() == 1 or mean == 0.0 or not more.any():
            break
        large |= more
    if mean == 0.0:  # of the others, their number is left to balance
        mean, work = 1.0, np.full(len(work), (num_layers - large.sum()) / max(1, (~large).sum()))
    return np.where(large, 1.0, work / mean)


def _cut(work: np.ndarray, cuts: np.ndarray, num_layers: int, delta: float) -> tuple[int, ...] | None:
    """Where layers start, at the least cost; None where nothing keeps to delta. `work` is in units of the mean."""
    n = len(work)
    done = np.concatenate([[0.0], np.cumsum(work)])
    least, most = 1 - delta - _ALIKE, 1 + delta + _ALIKE
    passed = np.full((num_layers + 1, n + 1), np.inf)  # bytes, by layers and operators so far
    squares = np.full((num_layers + 1, n + 1), np.inf)
    came = np.zeros((num_layers + 1, n + 1), int)
    passed[0, 0] = squares[0, 0] = 0.0
    for end in range(1, n + 1):
        first = int(np.searchsorted(done, done[end] - most))
        last = min(int(np.searchsorted(done, done[end] - least, side="right")), end)  # starts: first to last - 1
        if first >= last:
            continue
        starts = np.arange(first, last)
        sizes = done[end] - done[first:last]
        bytes_so_far = passed[:-1, first:last] + np.where(starts > 0, cuts[first:last], 0.0)
        squares_so_far = squares[:-1, first:last] + sizes**2
        fewest = bytes_so_far.min(axis=1, keepdims=True)
        alike = bytes_so_far <= fewest * (1 + _ALIKE)
        pick = np.where(alike, squares_so_far, np.inf).argmin(axis=1)
        rows = np.arange(num_layers)
        passed[1:, end], squares[1:, end] = bytes_so_far[rows, pick], squares_so_far[rows, pick]
        came[1:, end] = starts[pick]
    if not np.isfinite(passed[num_layers, n]):
        return None
    found: list[int] = []
    end = n
    for layer in range(num_layers, 0, -1):
        end = int(came[layer, end])
        found.append(end)
    return tuple(reversed(found))


def _repeats(names: np.ndarray, flops: np.ndarray, most_layers: int) -> int | None:
    """How many modules follow one another that are alike, where they do most of the work: one layer for each, or for
    equally many, and what comes before and after in layers of that size. None where nothing repeats."""
    n = len(names)
    done = np.concatenate([[0.0], np.cumsum(flops)])
    best, found = 0.5 * float(done[-1]), None
    for period in range(1, n // 2 + 1):
        alike = np.concatenate([[False], names[:-period] == names[period:], [False]])
        begins, ends = np.flatnonzero(~alike[:-1] & alike[1:]), np.flatnonzero(alike[:-1] & ~alike[1:])
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            times = (end - begin) // period + 1
            work = float(done[begin + times * period] - done[begin])
            # A longer module is only one of several shorter ones, unless it covers more.
            if times > 1 and work > best * (1 + _ALIKE):
                best, found = work, (begin, begin + times * period, times)
    if found is None:
        return None
    begin, end, times = found
    for size in range(min(times, most_layers), 0, -1):
        outside = [_share(flops[part], best / size) for part in (slice(0, begin), slice(end, n))]
        if times % size == 0 and size + sum(outside) <= most_layers:
            return size + sum(outside)
    return 1


def _share(flops: np.ndarray, layer: float) -> int:
    """How many layers of a size some operators make up, where one operator is one layer at most."""
    return round(float(np.minimum(flops, layer).sum()) / layer)


def _as_many_as_fit(flops: np.ndarray, cuts: np.ndarray, delta: float, most_layers: int) -> int:
    """The largest number of layers that keep to delta."""
    for num_layers in range(min(most_layers, len(flops)), 1, -1):
        if _cut(_clipped(flops, num_layers), cuts, num_layers, delta) is not None:
            return num_layers
    return 1
