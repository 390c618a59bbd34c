"""Hold what a search keeps in memory of lists on disk: centroids, and where each list lies.

In: a page file. Out: `StoredLists`. A list of c vectors is c int32 positions, then c vectors, as bytes of the stream of
page payloads that starts at page 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.inputs import DTYPES, MAX_VECTORS, checked_metric
from autopar.vector_search.data.metrics import Metric
from autopar.vector_search.graph.nearest_points import NearestPoints, PointGraph, why_invalid_graph
from autopar.vector_search.on_disk.hit_rule import HitRule, loaded_rule
from autopar.vector_search.on_disk.page_file import PageFile, damaged
from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES

#: Bytes of a position.
POSITION_BYTES = 4
#: The first page of data.
FIRST_PAGE = 1
#: Mean pages of a list, and minimum mean vectors. Longer lists waste less of their last page, and are less precise.
_LIST_PAGES, _LIST_VECTORS = 1.75, 40


@dataclass(frozen=True, slots=True)
class StoredLists:
    """The part of lists on disk that is in memory.

    Args:
        centroids: f32 `[num_lists, d]`.
        starts: int64 `[num_lists]`, offset of each list in the stream.
        counts: int64 `[num_lists]`, vectors of each list.
        centre: f32 `[d]`, subtracted before scoring; None if scores need no centre.
        ids: int64 `[n]`; None if ids are positions.
        dtype: dtype of the vectors.
        num_vectors: n; a vector may be in several lists.
        copies: maximum number of lists per vector.
        rule: how the lists of a query are chosen; None: by effort and pruning.
        graph: over the centroids, where they are many.
    """

    centroids: NDArray[np.float32]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    centre: NDArray[np.float32] | None
    ids: NDArray[np.int64] | None
    dtype: np.dtype[Any]
    metric: Metric
    num_vectors: int
    copies: int
    rule: HitRule | None = None
    graph: PointGraph | None = None

    @property
    def num_lists(self) -> int:
        return len(self.centroids)

    @property
    def dim(self) -> int:
        return self.centroids.shape[1]

    @property
    def entry_bytes(self) -> int:
        """Bytes of a vector and its position."""
        return entry_bytes(self.dim, self.dtype)

    @property
    def first_pages(self) -> NDArray[np.int64]:
        """The page in which each list starts."""
        return FIRST_PAGE + self.starts // PAYLOAD_BYTES

    @property
    def last_pages(self) -> NDArray[np.int64]:
        """The page in which each list ends; before its first page if the list is empty."""
        ends = self.starts + self.counts * self.entry_bytes
        return np.where(self.counts > 0, FIRST_PAGE + (ends - 1) // PAYLOAD_BYTES, self.first_pages - 1)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.centroids, self.starts, self.counts, self.centre, self.ids)
        rule = () if self.rule is None else self.rule.arrays.values()
        return sum(array.nbytes for array in (*arrays, *rule, *(self.graph or ())) if array is not None)

    @property
    def points(self) -> NearestPoints | None:
        """Finds the centroids near a query; None if all are compared."""
        if self.graph is None or self.metric == "inner_product":  # the edges are those of near centroids
            return None
        return NearestPoints(self.centroids, self.metric, self.graph)

    @property
    def num_pages(self) -> NDArray[np.int64]:
        """Pages of each list."""
        return self.last_pages + 1 - self.first_pages

    def ids_of(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """The ids of positions that are not `NO_ID`."""
        return positions.astype(np.int64) if self.ids is None else self.ids[positions]

    def saved(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Settings and arrays for the page file."""
        settings = {"metric": self.metric, "dtype": self.dtype.name}
        settings |= {"num_vectors": self.num_vectors, "copies": self.copies}
        settings |= {"rule": None if self.rule is None else self.rule.saved()}
        arrays: dict[str, NDArray[Any]] = {"centroids": self.centroids, "starts": self.starts, "counts": self.counts}
        arrays |= {} if self.rule is None else self.rule.arrays
        edges, entries = self.graph or (None, None)
        optional = {"centre": self.centre, "ids": self.ids, "centroid_edges": edges, "centroid_entries": entries}
        return settings, arrays | {name: array for name, array in optional.items() if array is not None}


def entry_bytes(dim: int, dtype: np.dtype[Any]) -> int:
    """Bytes of a vector and its position in a list."""
    return POSITION_BYTES + dim * dtype.itemsize


def mean_entries(dim: int, dtype: np.dtype[Any]) -> float:
    """Mean vectors of a list, where the user gives no number of lists."""
    return max(_LIST_VECTORS, _LIST_PAGES * PAYLOAD_BYTES / entry_bytes(dim, dtype))


def loaded(pages: PageFile) -> StoredLists:
    """The lists of a page file.

    Raises:
        IndexFileError: arrays and settings contradict each other.
        LookupError, TypeError, ValueError: a missing or invalid setting.
    """
    settings, arrays = pages.settings, pages.arrays
    lists = StoredLists(
        arrays["centroids"],
        arrays["starts"],
        arrays["counts"],
        arrays.get("centre"),
        arrays.get("ids"),
        DTYPES[settings["dtype"]],
        checked_metric(settings["metric"]),
        int(settings["num_vectors"]),
        int(settings["copies"]),
        loaded_rule(settings.get("rule"), arrays),
        PointGraph(arrays["centroid_edges"], arrays["centroid_entries"]) if "centroid_edges" in arrays else None,
    )
    why = _inconsistent(lists, pages.num_data_pages)
    if why:
        raise damaged(Path(pages.path), why)
    return lists


def _inconsistent(lists: StoredLists, num_data_pages: int) -> str | None:
    """The first contradiction, as text. A matching checksum proves that the file is unchanged, not that its author is
    trusted."""
    if lists.centroids.ndim != 2 or lists.centroids.dtype != np.float32 or min(lists.centroids.shape) < 1:
        return f"`centroids` is {lists.centroids.dtype} of shape {list(lists.centroids.shape)}"
    num, one = lists.num_vectors, (lists.num_lists,)
    shapes = (("starts", lists.starts, one), ("counts", lists.counts, one), ("ids", lists.ids, (num,)))
    for name, array, shape in shapes:
        if array is not None and (array.dtype != np.int64 or array.shape != shape):
            return f"`{name}` is {array.dtype} of shape {list(array.shape)}, expected int64 of shape {list(shape)}"
    if lists.centre is not None and (lists.centre.dtype != np.float32 or lists.centre.shape != (lists.dim,)):
        return f"`centre` is {lists.centre.dtype} of shape {list(lists.centre.shape)}"
    if not 1 <= num <= MAX_VECTORS or not 1 <= lists.copies <= lists.num_lists:
        return f"it says {num:,} vectors in up to {lists.copies:,} lists each"
    most = num_data_pages * PAYLOAD_BYTES
    if min(lists.starts.min(), lists.counts.min()) < 0 or max(lists.starts.max(), lists.counts.max()) > most:
        return "a list lies outside the file"
    if (lists.starts + lists.counts * lists.entry_bytes > most).any():
        return "a list lies outside the file"
    if lists.rule is not None and (why := lists.rule.why_invalid(lists.num_lists)):
        return why
    if lists.graph is not None and (why := why_invalid_graph(lists.graph, lists.num_lists)):
        return why
    if not np.isfinite(lists.centroids).all():
        return "`centroids` has elements that are not finite"
    return None
