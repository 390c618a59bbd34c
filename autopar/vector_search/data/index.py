"""Define the interface of an index, `Index`, and its results, `Found` and `IndexStats`.

The index kinds are in the table of `build.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data.metrics import NO_ID, Metric, worst_distance


class Found(NamedTuple):
    """The result of a search: one row for each query, best first.

    Args:
        ids: int64 `[num_queries, k]`, the user's ids; -1 where fewer than k vectors were found.
        distances: squared distances for l2, smaller is better; similarities otherwise, larger is better. f32; int32 for
            int8 and uint8 vectors, except cosine. Where the id is -1: the worst value, infinity or the extreme integer.
    """

    ids: NDArray[np.int64]
    distances: NDArray[Any]

    def of_one(self) -> Found:
        """The result of the first query only, `[k]`."""
        return Found(self.ids[0], self.distances[0])


def found_at(positions: NDArray[Any], distances: NDArray[Any], ids: NDArray[np.int64], k: int, metric: Metric) -> Found:
    """Map positions to the user's ids and pad the result to k columns.

    Args:
        positions, distances: `[num_queries, m]`, best first, `NO_ID` for no result; m is at most k.
        ids: the id of each position.
    """
    there = positions != NO_ID
    found = np.full(positions.shape, NO_ID, np.int64)
    found[there] = ids[positions[there]]
    return padded(Found(found, distances), k, metric)


#: Maximum results, of which some are missing.
_MOST_PADDED = 2**28


def padded(found: Found, k: int, metric: Metric) -> Found:
    """Pad a result, `[num_queries, m]`, to k columns; m is at most k.

    Raises:
        SearchError: so many results do not fit in memory, and most of them are missing.
    """
    num_queries, num_found = found.ids.shape
    missing = ((0, 0), (0, k - num_found))
    if not missing[1][1]:
        return found
    if num_queries * k > _MOST_PADDED:
        raise SearchError(
            f"`k` is {k:,}, for {num_queries:,} queries, and the index has {num_found:,} vectors to return: give at most"
            f" that many"
        )
    worst = worst_distance(found.distances.dtype, metric)
    return Found(
        np.pad(found.ids, missing, constant_values=NO_ID), np.pad(found.distances, missing, constant_values=worst)
    )


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The size, layout and measured recall of an index.

    Args:
        kind: its name in `build`.
        dtype: name of the vectors' dtype.
        device_bytes: bytes of the index on the device that holds the most.
        layouts: the partition spec of the vectors in each stored layout, as text.
        searches: predicted seconds of each compiled program, by number of queries and k.
        reached: whether the lower confidence bound of the recall (`recall_at_least` in `details`) reached the target
            when the index was built; True for exact search; None if recall could not be measured.
        details: entries of this kind only.
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
    """A searchable corpus, made by `build` or `load`."""

    def search(
        self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None, effort: int | None = None
    ) -> Found:
        """Find the k nearest vectors of each query, or as many of them as the effort finds.

        Args:
            queries: `[num_queries, d]`; or one query, `[d]`, whose results have shape `[k]`.
            k: number of neighbours; results beyond the corpus are padded with id -1.
            filter: bool `[n]`, the vectors that may be returned, in the order given to `build`.
            effort: number of probed lists, or beam width of a graph; by default the effort that reached the recall
                target at build time. An exact index takes none.

        Raises:
            SearchError: an invalid argument, by name.
        """
        ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to one file, atomically; `load` reads it onto any number of devices.

        Raises:
            IndexFileError: the file cannot be written.
        """
        ...

    def stats(self) -> IndexStats:
        """The size, layout and measured recall of the index."""
        ...
