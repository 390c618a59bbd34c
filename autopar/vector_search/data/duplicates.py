"""Find equal vectors, and compute distances that are identical for equal vectors, for measuring recall.

In: vectors on the host. Out: groups of equal vectors; the nearest neighbours with their duplicates; float64 distances
of a few pairs, from differences, on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, Metric

#: Elements per chunk.
_AT_ONCE = 2**22


class Duplicates(NamedTuple):
    """Groups of equal vectors.

    Args:
        groups: int32 `[n]`, the group of each vector.
        order: positions, group by group.
        starts: `[num_groups + 1]`, offsets of the groups in `order`.
    """

    groups: NDArray[np.int32]
    order: NDArray[np.int64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, vectors: NDArray[Any], metric: Metric) -> Duplicates:
        """Group the rows of `vectors`, `[n, d]`. For cosine, parallel vectors are equal if their quotients are exact."""
        num, dim = vectors.shape
        parts = [slice(start, start + max(1, _AT_ONCE // dim)) for start in range(0, num, max(1, _AT_ONCE // dim))]
        hashes = np.empty(num, np.uint64)
        for part in parts:
            hashes[part] = row_hashes(vectors[part], metric)
        _, firsts, groups = np.unique(hashes, return_index=True, return_inverse=True)
        groups = groups.reshape(-1)
        for part in parts:  # a hash collision: the vector becomes a group of its own
            own, first = (_canonical(vectors[which], metric) for which in (part, firsts[groups[part]]))
            others = np.flatnonzero((own != first).any(axis=1)) + part.start
            groups[others] = num + others
        _, groups, counts = np.unique(groups, return_inverse=True, return_counts=True)
        starts = np.concatenate([[0], np.cumsum(counts)])
        return cls(groups.reshape(-1).astype(np.int32), np.argsort(groups.reshape(-1), kind="stable"), starts)

    @property
    def num_groups(self) -> int:
        return len(self.starts) - 1

    @property
    def firsts(self) -> NDArray[np.int64]:
        """The position of one vector of each group."""
        return self.order[self.starts[:-1]]

    def others(self, nearest: NDArray[Any], own: NDArray[np.int32], k: int) -> NDArray[np.int32]:
        """int32 `[num_queries, k]`: the nearest vectors outside a query's own group, each with its duplicates.

        Args:
            nearest: `[num_queries, m]`, the nearest of `firsts`, best first; m is at least k + 1, or all.
            own: the group of each query.
        """
        found = np.full((len(nearest), k), NO_ID, np.int32)
        for row, mine, out in zip(nearest, own, found, strict=True):
            which = [group for group in self.groups[row[row != NO_ID]] if group != mine]
            parts = [self.order[self.starts[group] : self.starts[group + 1]][:k] for group in which]
            every = np.concatenate([*parts, np.zeros(0, np.int64)])[:k]
            out[: len(every)] = every
        return found


def row_hashes(vectors: NDArray[Any], metric: Metric) -> NDArray[np.uint64]:
    """A hash of each row of `vectors`, `[m, d]`; equal for vectors that are equal in the sense of `Duplicates.of`."""
    bits = _canonical(vectors, metric).view(np.uint32).astype(np.uint64)
    return (bits * _factors(vectors.shape[1])).sum(axis=1, dtype=np.uint64)


def _factors(dim: int) -> NDArray[np.uint64]:
    """Random odd hash factors: a change of a single element always changes the hash."""
    return np.random.default_rng(0).integers(0, 2**63, dim, np.uint64) * np.uint64(2) + np.uint64(1)


def _canonical(vectors: NDArray[Any], metric: Metric) -> NDArray[np.float32]:
    """f32 `[m, d]`: a canonical form, identical for equal vectors."""
    wide = vectors.astype(np.float64)
    if metric == "cosine":
        largest = np.abs(wide).max(axis=1, keepdims=True)
        wide = wide / np.where(largest > 0, largest, 1)
    return wide.astype(np.float32) + np.float32(0)  # -0 is 0


def distances_between(
    queries: NDArray[Any], vectors: NDArray[Any], positions: NDArray[Any], metric: Metric
) -> NDArray[np.float32]:
    """User-facing distances to `vectors[positions]`, `[num_queries, k]`; the worst distance for `NO_ID`."""
    wide = queries.astype(np.float64)
    found = np.empty(positions.shape, np.float64)
    for column, which in enumerate(positions.T):
        others = vectors[np.maximum(which, 0)].astype(np.float64)
        if metric == "l2":
            found[:, column] = ((wide - others) ** 2).sum(axis=1)
            continue
        found[:, column] = (wide * others).sum(axis=1)
        if metric == "cosine":
            length = np.sqrt((wide**2).sum(axis=1) * (others**2).sum(axis=1))
            found[:, column] /= np.where(length > 0, length, 1)
    found[positions == NO_ID] = np.inf if metric == "l2" else -np.inf
    return found.astype(np.float32)
