"""Compare nodes of a graph that is being changed: by their codes where their vectors are not at hand.

In: codes of old nodes, vectors of new ones. Out: estimates of squared distances. All metrics become l2: vectors are of
unit length for cosine, and a further element makes all lengths equal for inner products (`graph.build.with_equal_norms`).

A code stands for the mean of its vectors, so the squared distance to the vector is on average that to the code plus the
mean squared error of codes. Without it, nodes of equal codes would prune each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import Metric
from autopar.vector_search.graph_on_disk.stored_graph import StoredGraph
from autopar.vector_search.on_disk.probing import prepared


@dataclass(frozen=True, slots=True)
class Space:
    """Where nearness is measured.

    Args:
        metric: of the index.
        centre: f32 `[d]`, subtracted; None: not centred.
        limit: for inner products, the largest squared length.
    """

    metric: Metric
    centre: NDArray[np.float32] | None
    limit: float

    @property
    def num_more(self) -> int:
        """Elements that a vector has in addition."""
        return int(self.metric == "inner_product")

    def of(self, vectors: NDArray[Any]) -> NDArray[np.float32]:
        """f32 `[m, d + num_more]`, of vectors of the index, `[m, d]`."""
        return self.of_prepared(prepared(vectors, self.metric, self.centre))

    def of_prepared(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """f32 `[m, d + num_more]`, of vectors that are `prepared`, or of codes."""
        if not self.num_more:
            return vectors
        return np.concatenate([vectors, self.more((vectors**2).sum(axis=-1))[..., None]], axis=-1)

    def more(self, squares: NDArray[np.floating]) -> NDArray[np.float32]:
        """The further element, of squared lengths."""
        return np.sqrt(np.maximum(self.limit - squares, 0)).astype(np.float32)


class Points:
    """Old nodes by their number, and new ones by a number of their own.

    Args:
        graph: the old nodes.
        new: f32 `[m, d + num_more]`, the new ones.
        error: mean squared error of the codes.
    """

    def __init__(self, graph: StoredGraph, space: Space, new: NDArray[np.float32], error: float) -> None:
        self._graph, self._space, self._new, self._error = graph, space, new, np.float32(error)
        self._row_of = np.full(len(graph.codes), -1, np.int32)

    def number(self, numbers: NDArray[np.int32], num_places: int) -> None:
        """Say which places the new nodes take, int32 `[m]`, of so many."""
        rows = np.full(max(num_places, len(self._graph.codes)), -1, np.int32)
        rows[numbers] = np.arange(len(numbers), dtype=np.int32)
        self._row_of = rows

    def of(self, nodes: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """f32 `[m, d + num_more]` and the squared errors f32 `[m]` of nodes."""
        rows = self._row_of[nodes]
        return self._mixed(nodes, rows)

    def of_rows(self, old: NDArray[Any], rows: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """As `of`, of new nodes that have no place yet: `rows`, where that is not negative, else the old nodes."""
        return self._mixed(old, rows)

    def _mixed(self, nodes: NDArray[Any], rows: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        is_new = rows >= 0
        found = np.empty((len(nodes), self._graph.blocks.dim + self._space.num_more), np.float32)
        found[~is_new] = self._space.of_prepared(self._graph.decoded(nodes[~is_new]))
        found[is_new] = self._new[rows[is_new]]
        return found, np.where(is_new, np.float32(0), self._error)


def largest_square(graph: StoredGraph) -> float:
    """The largest squared length of a code of the graph."""
    squares = (graph.codebooks**2).sum(axis=2)
    parts, largest = np.arange(len(squares)), 0.0
    for start in range(0, len(graph.codes), 2**16):
        largest = max(largest, float(squares[parts, graph.codes[start : start + 2**16]].sum(axis=1).max()))
    return largest


class Nearness:
    """New vectors as the queries of a beam search, as `graph_on_disk.compared.Compared`.

    Args:
        vectors: f32 `[num_queries, d + num_more]`.
        error: mean squared error of the codes.
    """

    def __init__(
        self, vectors: NDArray[np.float32], space: Space, codebooks: NDArray[np.float32], error: float
    ) -> None:
        self._vectors, self._space, self._error = vectors, space, error
        num_parts, num_codes, width = codebooks.shape
        own = vectors[:, : num_parts * width].reshape(len(vectors), num_parts, width)
        self._squares = (codebooks**2).sum(axis=2).reshape(-1)
        tables = -2 * np.einsum("qpw,pcw->qpc", own, codebooks)
        self._tables = np.ascontiguousarray(tables, np.float32).reshape(len(vectors), -1)
        self._own = (vectors**2).sum(axis=1)
        self._offsets = np.arange(num_parts) * num_codes

    def with_codes(self, which: NDArray[np.int64], codes: NDArray[np.uint8]) -> NDArray[np.float64]:
        """See `Compared.with_codes`."""
        places = codes + self._offsets
        squares = self._squares[places].sum(axis=1, dtype=np.float64)
        products = self._tables.reshape(-1)[places + (which * self._tables.shape[1])[:, None]].sum(
            axis=1, dtype=np.float64
        )
        found = squares + products + self._own[which] + self._error
        if self._space.num_more:
            more = self._space.more(squares)
            found += more * (more - 2 * self._vectors[which, -1])
        return found

    def with_vectors(self, which: NDArray[np.int64], vectors: NDArray[Any]) -> NDArray[np.float64]:
        """See `Compared.with_vectors`."""
        flat = self._space.of(vectors.reshape(-1, vectors.shape[-1]))
        difference = flat.reshape(*vectors.shape[:2], -1) - self._vectors[which][:, None]
        return np.einsum("mpd,mpd->mp", difference, difference).astype(np.float64)
