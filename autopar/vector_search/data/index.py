"""What every index can do, and what it answers.

`Index` is the interface; its kinds stand in `build.py`'s table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.vector_search.data.metrics import NO_ID, Metric, worst_distance


class Found(NamedTuple):
    """What a search found, best first; of each query one row.

    Args:
        ids: the user's own, int64, `[num_queries, k]`; -1 where there is no k-th vector to return.
        distances: of l2 squared, smaller is better; else the similarity, larger is better. f32, or int32 of int8 vectors
            (not of cosine). Where the id is -1, the worst there is: infinite, or the last integer.
    """

    ids: NDArray[np.int64]
    distances: NDArray[Any]

    def of_one(self) -> Found:
        """Of the first query alone, `[k]`."""
        return Found(self.ids[0], self.distances[0])


def found_at(positions: NDArray[Any], distances: NDArray[Any], ids: NDArray[np.int64], k: int, metric: Metric) -> Found:
    """As the user sees it: the user's ids, padded to k.

    Args:
        positions, distances: `[num_queries, m]`, best first, `NO_ID` where there is none; m is at most k.
        ids: of the vectors, by position.
    """
    there = positions != NO_ID
    found = np.full(positions.shape, NO_ID, np.int64)
    found[there] = ids[positions[there]]
    if k == found.shape[1]:
        return Found(found, distances)
    missing = ((0, 0), (0, k - found.shape[1]))
    worst = worst_distance(distances.dtype, metric)
    return Found(np.pad(found, missing, constant_values=NO_ID), np.pad(distances, missing, constant_values=worst))


@dataclass(frozen=True, slots=True)
class IndexStats:
    """What an index holds, and how.

    Args:
        kind: its name in `build`.
        dtype: of the vectors, by name.
        device_bytes: that the fullest device holds of it.
        layouts: how its vectors are split in each way that they are held in, in words.
        searches: each program made for it so far, by number of queries and k: seconds that the plan predicts.
        reached: whether the recall target was, by what the sample that was measured when the index was built promises of other
            queries (`recall_at_least` of `details`); True of exact search; None where nothing could be measured.
        details: of this kind alone.
    """

    kind: str
    metric: Metric
    dtype: str
    num_vectors: int
    dim: int
    num_devices: int
    device_bytes: int
    layouts: tuple[str, ...]
    searches: dict[tuple[int, int], float]
    details: dict[str, Any] = field(default_factory=dict)
    reached: bool | None = None


class Index(Protocol):
    """Vectors that can be searched. Made by `build` or `load`."""

    def search(
        self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None, effort: int | None = None
    ) -> Found:
        """The k nearest of each query, or as many of them as the effort finds.

        Args:
            queries: `[num_queries, d]`, or one, `[d]`, whose results then are `[k]`.
            k: any number; beyond what there is, results are padded with id -1.
            filter: of each vector, in the order given to `build`, whether it may be returned: bool, `[n]`.
            effort: lists that are looked into, or nodes of a graph that are kept in hand; by default what reached the
                recall target when the index was built. An exact index takes none.

        Raises:
            SearchError: naming what of these cannot be.
        """
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to one file, whole or not at all; `load` reads it, onto any number of devices.

        Raises:
            IndexFileError: it cannot be written.
        """
        ...

    def stats(self) -> IndexStats:
        """What it holds, and how."""
        ...
