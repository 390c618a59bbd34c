"""Cluster operators into layers with few bytes between them, by their FLOPs or their time.

In: the operators in program order, their FLOPs or seconds, and the bytes that cross each boundary between two of them.
Out: a `Clustering`. Where modules repeat, layers have about equal FLOPs, by the dynamic program of Alpa (Zheng et al. 2022,
section 5.2):

    minimise    sum over cuts of cut_bytes; among equals, the sum of the squares of the layers' FLOPs
    subject to  (1 - delta) mean <= FLOPs of a layer <= (1 + delta) mean

An operator with more FLOPs than the mean layer cannot be cut: its FLOPs count as one mean, which is taken over the
other layers. If the constraint is infeasible, delta grows by half until it is feasible. Repeated modules are recognized
by their operators. Each of them is one layer, or if they are many, each k of them are one.

Other operators are cut at the cheapest boundaries, as often as a search can use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

_TIE = 1e-9  # relative
_MOST_LAYERS = 48
_DELTA = 0.1
_WIDEN = 1.5
#: The least number of other places for a cut on either side of it.
_LEAST_PLACES = 2


@dataclass(frozen=True, slots=True)
class Clustering:
    """Operators clustered into layers.

    Args:
        starts: the first operator of each layer; the first is 0.
        keys: a number per layer; equal for layers of equal operators.
        cut_bytes: the bytes that pass between layers, summed over all cuts.
        delta: the largest relative deviation of a layer from the mean that was allowed.
    """

    starts: tuple[int, ...]
    keys: tuple[int, ...]
    cut_bytes: float
    delta: float

    @classmethod
    def of_unlike(cls, starts: Sequence[int], cut_bytes: Sequence[float]) -> Clustering:
        """Layers of which no two are equal, of any size.

        Args:
            cut_bytes: the bytes that cross the boundary before each operator.
        """
        passing = float(sum(cut_bytes[start] for start in starts[1:]))
        return cls(starts=tuple(starts), keys=tuple(range(len(starts))), cut_bytes=passing, delta=np.inf)

    def layers(self, num_operators: int) -> tuple[range, ...]:
        """The operators of each layer."""
        ends = [*self.starts[1:], num_operators]
        return tuple(range(start, end) for start, end in zip(self.starts, ends, strict=True))

    def repeats(self, sizes_of: Sequence[int]) -> bool:
        """Whether single layers and pairs of neighbors, each kind once, are smaller together than all layers.

        Args:
            sizes_of: the number of equations of each operator; an iteration of a loop is one operator.
        """
        sizes = [sum(sizes_of[layer.start : layer.stop]) for layer in self.layers(len(sizes_of))]
        singles = dict(zip(self.keys, sizes, strict=True))
        pairs = Counter(pairwise(self.keys))
        return sum(singles.values()) + sum(singles[a] + singles[b] for a, b in pairs) < sum(sizes)


def repeated_layers(
    flops: Sequence[float],
    cut_bytes: Sequence[float],
    *,
    keys: Sequence[Hashable] | None = None,
    most_layers: int = _MOST_LAYERS,
) -> Clustering | None:
    """One layer per repeated module, or one per equal number of modules if there are more than `most_layers`; None if no
    modules repeat that do most of the work.

    Args:
        flops, cut_bytes, keys: as in `cluster_layers`.

    >>> block = [4.0, 1.0, 8.0, 1.0]
    >>> repeated_layers(block * 3, [2.0, 6.0, 2.0, 6.0] * 3).starts
    (0, 4, 8)
    """
    num_layers = _repeats(_names(flops, cut_bytes, keys), np.asarray(flops, float), most_layers)
    return None if num_layers is None else cluster_layers(flops, cut_bytes, num_layers=num_layers, keys=keys)


def cluster_layers(
    flops: Sequence[float],
    cut_bytes: Sequence[float],
    *,
    num_layers: int,
    keys: Sequence[Hashable] | None = None,
    delta: float = _DELTA,
) -> Clustering:
    """Cluster operators into layers of about equal FLOPs.

    Args:
        flops: the FLOPs of each operator.
        cut_bytes: the bytes that cross the boundary before each operator; the first is unused.
        num_layers: the number of layers, at most one per operator.
        keys: operators with equal keys are equal; by default those with equal FLOPs and bytes.
        delta: the allowed relative deviation from the mean, above 0.
    """
    assert len(flops) == len(cut_bytes) > 0, "operators need FLOPs and a cut each"
    assert delta > 0, delta
    names = _names(flops, cut_bytes, keys)
    work, cuts = np.asarray(flops, float), np.asarray(cut_bytes, float)
    assert 1 <= num_layers <= len(work), f"{num_layers} layers of {len(work)} operators"
    found = None
    while found is None:
        found = _cut(_clipped(work, num_layers), cuts, num_layers, delta)
        delta = delta if found is not None else _WIDEN * delta
    ends = [*found[1:], len(work)]
    layers = [tuple(names[start:end].tolist()) for start, end in zip(found, ends, strict=True)]
    numbers_of: dict[tuple[int, ...], int] = {}
    return Clustering(
        starts=found,
        keys=tuple(numbers_of.setdefault(layer, len(numbers_of)) for layer in layers),
        cut_bytes=float(cuts[list(found[1:])].sum()),
        delta=delta,
    )


def cheapest_cuts(
    seconds: Sequence[float], cut_bytes: Sequence[float], num_layers: int, at_least: int = 1
) -> Clustering:
    """Cut operators that do not repeat into layers of about equal time: in each of `num_layers` equal parts of the time, at
    the boundary that the fewest bytes cross. An operator that takes longer than a part is a layer of its own, so there may
    be fewer layers.

    Args:
        seconds: the time of each operator.
        cut_bytes: the bytes that cross the boundary before each operator; the first is unused.
        at_least: the least number of layers, at most one per operator; further cuts are those that the fewest bytes cross.

    >>> cheapest_cuts([1.0, 1.0, 1.0, 1.0], [0.0, 8.0, 2.0, 4.0], 2).starts
    (0, 2)
    """
    assert len(seconds) == len(cut_bytes) > 0, "operators need a time and a cut each"
    until = np.cumsum(np.maximum(np.asarray(seconds, float), 0.0))
    total = until[-1] or 1.0
    chosen: dict[int, int] = {}
    for start in range(1, len(seconds)):
        at = num_layers * until[start - 1] / total + 0.5  # boundaries 1, 2, ... in the middle of their parts
        part = int(at)
        if not 1 <= part < num_layers:
            continue
        known = chosen.get(part)
        if known is None or cut_bytes[start] < cut_bytes[known]:
            chosen[part] = start
    firsts = {0, *chosen.values()}
    others = sorted(set(range(1, len(seconds))) - firsts, key=lambda start: cut_bytes[start])
    return Clustering.of_unlike(sorted(firsts | set(others[: max(0, at_least - len(firsts))])), cut_bytes)


def cuts_near(
    chosen: Sequence[int], seconds: Sequence[float], cut_bytes: Sequence[float], window_s: float, least_s: float
) -> Clustering:
    """Layers between cuts that may replace chosen ones: those within `window_s` of each, and the next ones on either side. Of
    cuts that less than `least_s` lies between, the one that the fewest bytes cross.

    Args:
        chosen: the operators at which stages begin, without 0.
        seconds, cut_bytes: as in `cheapest_cuts`.
    """
    until = np.concatenate([[0.0], np.cumsum(seconds)])
    found = {0, *chosen}
    for start in chosen:
        for way in (range(start, 0, -1), range(start, len(seconds))):
            best: dict[int, int] = {}
            for cut in way:
                away = abs(float(until[cut] - until[start]))
                place = int(away // least_s)
                if away > window_s and len(best) > _LEAST_PLACES and place not in best:
                    break
                if place not in best or cut_bytes[cut] < cut_bytes[best[place]]:
                    best[place] = cut
            found.update(best.values())
    return Clustering.of_unlike(sorted(found), cut_bytes)


def _names(flops: Sequence[float], cut_bytes: Sequence[float], keys: Sequence[Hashable] | None) -> np.ndarray:
    """A number for each operator; equal for equal ones."""
    numbers: dict[Hashable, int] = {}
    given: Sequence[Hashable] = keys if keys is not None else list(zip(flops, cut_bytes, strict=True))
    return np.array([numbers.setdefault(key, len(numbers)) for key in given])


def _clipped(flops: np.ndarray, num_layers: int) -> np.ndarray:
    """FLOPs in units of the mean layer. Operators above the mean count as 1; the mean is that of the others."""
    work, large = np.maximum(flops, 0.0), np.zeros(len(flops), bool)
    while True:
        mean = work[~large].sum() / (num_layers - large.sum())
        more = ~large & (work > mean * (1 + _TIE))
        if num_layers - large.sum() == 1 or mean == 0.0 or not more.any():
            break
        large |= more
    if mean == 0.0:  # the others have no FLOPs: balance their number
        mean, work = 1.0, np.full(len(work), (num_layers - large.sum()) / max(1, (~large).sum()))
    return np.where(large, 1.0, work / mean)


def _cut(work: np.ndarray, cuts: np.ndarray, num_layers: int, delta: float) -> tuple[int, ...] | None:
    """The starts of layers at the least cost; None if delta is infeasible. `work` is in units of the mean."""
    n = len(work)
    done = np.concatenate([[0.0], np.cumsum(work)])
    least, most = 1 - delta - _TIE, 1 + delta + _TIE
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
        ties = bytes_so_far <= fewest * (1 + _TIE)
        pick = np.where(ties, squares_so_far, np.inf).argmin(axis=1)
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
    """The number of layers if equal modules repeat and do most of the work: one per module, or per equal number of
    them, and layers of that size before and after. None without repetition."""
    n = len(names)
    done = np.concatenate([[0.0], np.cumsum(flops)])
    best, found = 0.5 * float(done[-1]), None
    for period in range(1, n // 2 + 1):
        equal = np.concatenate([[False], names[:-period] == names[period:], [False]])
        begins, ends = np.flatnonzero(~equal[:-1] & equal[1:]), np.flatnonzero(equal[:-1] & ~equal[1:])
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            times = (end - begin) // period + 1
            work = float(done[begin + times * period] - done[begin])
            # A longer period is a multiple of a shorter one, unless it covers more work.
            if times > 1 and work > best * (1 + _TIE):
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
    """The number of layers of a given size in some operators; an operator is at most one layer."""
    return round(float(np.minimum(flops, layer).sum()) / layer)
