"""Search a graph on disk from its entry points, and turn nodes into vectors of the corpus.

In: queries. Out: distances and positions of the best vectors, each node with the vectors that equal it; and an exact
search that reads the whole file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, score_dtype, worst_distance
from autopar.vector_search.graph.nearest_points import NearestPoints
from autopar.vector_search.graph_on_disk.block_search import BestNodes, BlockSearch
from autopar.vector_search.graph_on_disk.compared import Compared
from autopar.vector_search.graph_on_disk.stored_graph import Allowed, StoredGraph, expanded
from autopar.vector_search.on_disk.list_scores import ListScores
from autopar.vector_search.on_disk.probing import prepared
from autopar.vector_search.on_disk.readers import Reader

#: Maximum queries that are searched together.
AT_ONCE = 256
#: Blocks of one read of the exact search.
_BLOCKS = 256


def entry_points(graph: StoredGraph) -> NearestPoints:
    """The entry points of a graph, of which a search starts at the nearest."""
    return NearestPoints(graph.entry_vectors, graph.metric, graph.entry_graph)


class Searcher:
    """Searches of one file.

    Args:
        width: maximum blocks that a query reads per round.
        first_pages: as in `BlockSearch`.
        entries: `entry_points(graph)`, if it is known.
    """

    def __init__(
        self,
        path: Path,
        file_id: bytes,
        graph: StoredGraph,
        reader: Reader,
        width: int,
        first_pages: NDArray[np.int64] | None = None,
        entries: NearestPoints | None = None,
    ) -> None:
        self.graph, self._width = graph, width
        self.blocks = BlockSearch(path, file_id, graph, reader, first_pages)
        self._entries = entries or entry_points(graph)

    def best(
        self,
        queries: NDArray[Any],
        k: int,
        effort: int,
        allowed: Allowed | None,
        left_out: NDArray[np.int32] | None = None,
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and positions, `[num_queries, k]`, best first; `NO_ID` where the beam found fewer.

        Args:
            queries: `[num_queries, d]`, checked.
            effort: nodes of a beam; at least k are used.
            left_out: as in `BlockSearch.search`.
        """
        some = [slice(start, start + AT_ONCE) for start in range(0, max(1, len(queries)), AT_ONCE)]
        own = [None if left_out is None else left_out[part] for part in some]
        parts = [
            self._best(queries[part], k, max(effort, k), allowed, out) for part, out in zip(some, own, strict=True)
        ]
        distances, positions = (np.concatenate(each) for each in zip(*parts, strict=True))
        return distances, positions

    def exact(self, queries: NDArray[Any], k: int, allowed: Allowed | None) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and positions of the nearest of all allowed vectors, `[num_queries, k]`. Reads the whole file."""
        graph = self.graph
        per_block, dim = graph.blocks.per_block, graph.blocks.dim
        scored = ListScores(queries, k, graph.metric, graph.centre, 1)
        for start in range(0, graph.num_blocks, _BLOCKS):
            end = min(start + _BLOCKS, graph.num_blocks)
            nodes = self.blocks.nodes(np.arange(start, end))
            vectors, positions = nodes.vectors.reshape(-1, dim), nodes.positions.reshape(-1)
            first, last = np.searchsorted(graph.repeated_of, (start * per_block, end * per_block))
            vectors = np.concatenate([vectors, vectors[graph.repeated_of[first:last] - start * per_block]])
            positions = np.concatenate([positions, graph.repeated[first:last]])
            may = positions != NO_ID
            if allowed is not None:
                may &= allowed[np.maximum(positions, 0)]
            scored.add(vectors, positions, np.broadcast_to(may, (len(queries), len(may))))
        return scored.best()

    # -- private ------------------------------------------------------------------------------

    def _best(
        self,
        queries: NDArray[Any],
        k: int,
        effort: int,
        allowed: Allowed | None,
        left_out: NDArray[np.int32] | None,
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        graph = self.graph
        if not len(queries):
            return self._distances(np.full((0, k), np.inf)), np.full((0, k), NO_ID, np.int32)
        near = prepared(queries, graph.metric, graph.centre)
        start = self._entries.nearest(near, min(effort, len(graph.entries)))[0]
        compared = Compared(queries, near, graph)
        found = self.blocks.search(compared, start, k, effort, self._width, allowed, left_out)
        if graph.repeated.size:
            found = self._expanded(found, k, allowed)
        return self._distances(found.costs), found.positions

    def _expanded(self, found: BestNodes, k: int, allowed: Allowed | None) -> BestNodes:
        costs, positions = np.full(found.costs.shape, np.inf), np.full(found.positions.shape, NO_ID, np.int32)
        for row in range(len(costs)):
            there = found.nodes[row] != NO_ID
            one = (found.costs[row, there], found.nodes[row, there], found.positions[row, there])
            best, which = expanded(self.graph, *one, allowed, k)
            costs[row, : len(best)], positions[row, : len(which)] = best, which
        return BestNodes(costs, found.nodes, positions)

    def _distances(self, costs: NDArray[np.float64]) -> NDArray[Any]:
        """The user-facing distances of costs; the worst distance for infinity."""
        metric, dtype = self.graph.metric, score_dtype(self.graph.blocks.dtype, self.graph.metric)
        worst, is_none = worst_distance(dtype, metric), np.isinf(costs)
        values = np.where(is_none, 0, costs if metric == "l2" else -costs)
        return np.where(is_none, np.array(worst, dtype), values.astype(dtype))
