"""Compare queries with codes in memory and with vectors from the disk; smaller is nearer.

In: queries. Out: costs. A cost is the squared distance for l2, and minus the similarity for the others. Codes have
costs by tables: for each query and subvector, the cost of each of the 256 codes; a code's cost is a sum of entries, and
what such a cost lacks on average (`StoredGraph.code_error`). Without that, a node that was not read would seem nearer than it is, and
a search would read nearly everything.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import Metric, is_integer
from autopar.vector_search.graph_on_disk.stored_graph import StoredGraph


class Comparing(Protocol):
    """Queries that can be compared with codes and with vectors."""

    def with_codes(self, which: NDArray[np.int64], codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        """See `Compared.with_codes`."""
        ...

    def with_vectors(self, which: NDArray[np.int64], vectors: NDArray[Any]) -> NDArray[np.float64]:
        """See `Compared.with_vectors`."""
        ...


class Compared:
    """Queries, ready to be compared.

    Args:
        queries: `[num_queries, d]`, checked, in the dtype of the vectors.
        prepared: f32 `[num_queries, d]`, as `probing.prepared`.
        graph: the graph whose nodes are compared.
    """

    def __init__(self, queries: NDArray[Any], prepared: NDArray[np.float32], graph: StoredGraph) -> None:
        codebooks, metric = graph.codebooks, graph.metric
        self._metric: Metric = metric
        self._error = graph.code_error
        self._queries = _wide(queries)
        parts = prepared.reshape(len(prepared), *codebooks.shape[::2])  # [num_queries, num_parts, width]
        tables = -np.einsum("qpw,pcw->qpc", parts, codebooks)
        if metric == "l2":
            tables = 2 * tables + (codebooks**2).sum(axis=2) + (parts**2).sum(axis=2)[..., None]
        self._num_codes = tables.shape[2]
        self._tables = np.ascontiguousarray(tables, np.float32).reshape(len(prepared), -1)
        self._offsets = np.arange(codebooks.shape[0]) * self._num_codes
        self._lengths = None if metric != "cosine" else np.maximum(np.linalg.norm(self._queries, axis=1), 1e-30)

    def with_codes(self, which: NDArray[np.int64], codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Costs `[m]` of codes, `[m, num_parts]`, each for the query `which`, `[m]`."""
        places = codes + (self._offsets + (which * self._tables.shape[1])[:, None])
        return self._tables.reshape(-1)[places].sum(axis=1, dtype=np.float64) + self._error

    def with_vectors(self, which: NDArray[np.int64], vectors: NDArray[Any]) -> NDArray[np.float64]:
        """Costs `[m, p]` of vectors, `[m, p, d]`, for the queries `which`, `[m]`; exact for integers, except cosine."""
        wide, queries = _wide(vectors), self._queries[which]
        if self._metric == "l2":
            difference = wide - queries[:, None]
            return np.einsum("mpd,mpd->mp", difference, difference).astype(np.float64)
        products = np.einsum("mpd,md->mp", wide, queries).astype(np.float64)
        if self._lengths is None:
            return -products
        lengths = np.maximum(np.sqrt(np.einsum("mpd,mpd->mp", wide, wide)), 1e-30) * self._lengths[which][:, None]
        return -products / lengths


def _wide(vectors: NDArray[Any]) -> NDArray[Any]:
    """int32 for integers, whose sums of products are then exact; f32 otherwise."""
    return vectors.astype(np.int32 if is_integer(vectors.dtype) else np.float32)
