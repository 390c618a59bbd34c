"""Add up tables over several axes and minimise the sum over some of the axes, without storing the whole sum.

In: tables aligned to common axes, with size 1 along the axes that they lack. Out: the minimum of their sum, with size 1
along the axes minimised over.

Axes are minimised over group by group, the cheapest first; a group is the axes that occur in the same tables, and only
these tables are added up for it. The sum is computed in blocks that stay in the cache. Its kept axes are merged where
they occur in the same tables, and the longest is the innermost: NumPy is slow where the innermost axis is short.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

_BLOCK = 1 << 16  # entries that are added up at once: they stay in the cache
_TINY = 1 << 13  # entries up to which the whole sum is stored: blocks would take longer
_SHARE = 8  # tables stored on the way are smaller than the whole sum by this factor


def least_sum(tables: Sequence[np.ndarray], kept: Collection[int]) -> np.ndarray:
    """The minimum of the sum of aligned tables over all axes but `kept`."""
    shape = _joint(tables)
    gone = tuple(axis for axis in range(len(shape)) if axis not in kept)
    size = math.prod(shape)
    if size <= _TINY:
        return _sum(tables).min(axis=gone, keepdims=True)
    of_shape: dict[tuple[int, ...], np.ndarray] = {}
    for table in tables:
        of_shape[table.shape] = of_shape[table.shape] + table if table.shape in of_shape else table
    tables, most = list(of_shape.values()), size // _SHARE
    while left := _groups(tables, gone):
        joint, left_by, users, axes = min(_step(tables, users, axes) for users, axes in left.items())
        if left_by > most:  # too large to store: minimise over all axes at once
            users, axes = tuple(i for i, t in enumerate(tables) if any(t.shape[a] > 1 for a in gone)), gone
        others = [table for i, table in enumerate(tables) if i not in users]
        added = _fewer([tables[i] for i in users], max(_TINY, joint // _SHARE))
        least = _in_blocks(added, axes) if len(added) > 1 else added[0].min(axis=tuple(axes), keepdims=True)
        tables = [*others, least]
    return _sum(sorted(tables, key=np.size))


def _joint(tables: Sequence[np.ndarray]) -> tuple[int, ...]:
    return tuple(map(max, zip(*[t.shape for t in tables], strict=True)))


def _sum(tables: Sequence[np.ndarray]) -> np.ndarray:
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    return total


def _groups(tables: Sequence[np.ndarray], axes: Collection[int]) -> dict[tuple[int, ...], list[int]]:
    """The axes that occur in the same tables, by the positions of these tables."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for axis in axes:
        if users := tuple([i for i, table in enumerate(tables) if table.shape[axis] > 1]):
            groups.setdefault(users, []).append(axis)
    return groups


def _step(
    tables: Sequence[np.ndarray], users: tuple[int, ...], axes: list[int]
) -> tuple[int, int, tuple[int, ...], Sequence[int]]:
    """The entries that minimising over `axes` adds up and leaves, and its arguments."""
    shape = _joint([tables[i] for i in users])
    size = math.prod(shape)
    return size, size // math.prod([shape[axis] for axis in axes]), users, axes


def _fewer(tables: list[np.ndarray], most: int) -> list[np.ndarray]:
    """The tables with small ones added up: each time the smallest that fits and the one that this enlarges least.

    Args:
        most: entries of the largest table that may result.
    """
    tables = sorted(tables, key=np.size)
    i = 0
    while i < len(tables):
        others = tables[:i] + tables[i + 1 :]
        sizes = [math.prod(_joint((tables[i], other))) for other in others]
        fits = [j for j, size in enumerate(sizes) if size <= most]
        if fits:
            best = min(fits, key=lambda j: sizes[j] - others[j].size)
            others[best] = tables[i] + others[best]
            tables, i = sorted(others, key=np.size), 0
        else:
            i += 1
    return tables


def _in_blocks(tables: Sequence[np.ndarray], gone: Collection[int]) -> np.ndarray:
    """The minimum of the sum of tables over the axes `gone`."""
    shape = _joint(tables)
    largest = max(tables, key=np.size)
    axes = sorted(range(len(shape)), key=lambda axis: -largest.strides[axis])  # as that table lies in memory

    def length(axes: Sequence[int]) -> int:
        return math.prod([shape[axis] for axis in axes])

    first = sorted(_groups(tables, [a for a in axes if a in gone]).values(), key=length, reverse=True)
    last = sorted(_groups(tables, [a for a in axes if a not in gone]).values(), key=length) or [[]]
    groups = [*first, *last]
    order = [axis for group in groups for axis in group]
    order += [axis for axis in axes if axis not in order]
    lengths = [*map(length, groups)]
    tables = [t.transpose(order).reshape([math.prod([t.shape[a] for a in group]) for group in groups]) for t in tables]
    num_first, kept = len(first), [axis for group in last for axis in group]
    least = np.full(lengths[num_first:], np.inf)
    inner = math.prod(lengths[1:num_first]) * math.prod(lengths[num_first + 1 :])
    parts = _slices(lengths[num_first], max(1, _BLOCK // inner))
    slabs = _slices(lengths[0], max(1, _BLOCK // (inner * parts[0].stop)))
    block = np.empty([slabs[0].stop, *lengths[1:num_first], parts[0].stop, *lengths[num_first + 1 :]])
    for part in parts:
        for slab in slabs:
            at = [slice(None)] * len(lengths)
            at[0], at[num_first] = slab, part
            some = [t[tuple([s if n > 1 else slice(None) for s, n in zip(at, t.shape, strict=True)])] for t in tables]
            at[0], at[num_first] = slice(slab.stop - slab.start), slice(part.stop - part.start)
            total = block[tuple(at)]
            np.add(some[0], some[1], out=total)
            for table in some[2:]:
                total += table
            np.minimum(least[part], total.min(axis=tuple(range(num_first))), out=least[part])
    least = least.reshape([shape[axis] for axis in kept]).transpose(np.argsort(kept))
    return least.reshape([1 if axis in gone else n for axis, n in enumerate(shape)])


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
