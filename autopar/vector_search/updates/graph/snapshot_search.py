"""Search one snapshot of an index whose vectors are in a graph: by its beam, and the delta, which is compared with every query.

In: a snapshot, queries. Out: distances and slots. A search follows the edges of nodes that died since the last
checkpoint, and does not return them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.recall_tuning import for_filter
from autopar.vector_search.graph_on_disk.searcher import Searcher
from autopar.vector_search.on_disk.list_scores import ListScores
from autopar.vector_search.updates.graph.graph_map import GraphMap
from autopar.vector_search.updates.search_reader import SearchReader
from autopar.vector_search.updates.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class LiveSlots:
    """The slots that may be returned, indexed like bool `[num_slots]`.

    Args:
        allowed: bool `[num_slots]`, what a filter allows; None: all that live.
    """

    snapshot: Snapshot
    allowed: NDArray[np.bool_] | None

    def __getitem__(self, slots: NDArray[np.int32], /) -> NDArray[np.bool_]:
        is_live = self.snapshot.is_live(slots)
        return is_live if self.allowed is None else is_live & self.allowed[slots]


@dataclass(frozen=True, slots=True)
class GraphSearch:
    """A search of one snapshot.

    Args:
        stored: its graph.
        allowed: bool `[num_slots]`, the slots that may be returned; None: all.
        num_allowed: vectors that live and may be returned.
        effort: nodes of a beam; None: as measured.
    """

    snapshot: Snapshot
    stored: GraphMap
    reader: SearchReader
    allowed: NDArray[np.bool_] | None
    num_allowed: int
    effort: int | None

    def run(self, queries: NDArray[Any], k: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and slots, `[num_queries, k]`, `NO_ID` for no result. Queries that find too few read the whole graph.

        Args:
            queries: checked, `[num_queries, d]`.
        """
        graph, store, live = self.stored.graph, self.reader.store, LiveSlots(self.snapshot, self.allowed)
        delta = self.snapshot.delta
        slots = delta.slots[: delta.count]
        num_stored = self.snapshot.num_live - int(self.snapshot.is_live(slots).sum())
        some = np.flatnonzero(live[slots])
        scored = ListScores(queries, k, graph.metric, graph.centre, 1)
        if some.size:
            scored.add(delta.vectors[some], slots[some], np.ones((len(queries), len(some)), np.bool_))
        found = scored.best()
        if not num_stored or some.size == self.num_allowed:
            return found
        reader, entries = self.reader.reader, self.stored.entry_points
        pages = self.stored.first_pages
        searcher = Searcher(store.path, store.file_id, graph, reader, self.stored.width, pages, entries)
        effort = self._effort(num_stored)
        if effort >= len(graph.codes):
            return self._merged(found, searcher.exact(queries, k, live))
        distances, which = self._merged(found, searcher.best(queries, k, effort, live))
        short = np.flatnonzero(which[:, min(k, self.num_allowed) - 1] == NO_ID)
        if short.size:
            distances, which = distances.copy(), which.copy()
            exact = searcher.exact(queries[short], k, live)
            distances[short], which[short] = self._merged((found[0][short], found[1][short]), exact)
        self.reader.used_bytes += searcher.blocks.followed * graph.blocks.node_bytes
        return distances, which

    def _effort(self, num_stored: int) -> int:
        """Nodes of a beam: more by the share of the nodes that died since, and doubled until it makes up for a filter.

        Args:
            num_stored: vectors of the graph that live.
        """
        snapshot = self.snapshot
        effort = self.effort or -(-snapshot.measured.effort * max(num_stored, self.stored.num_stored) // num_stored)
        return for_filter(effort, max(1, self.num_allowed) / max(1, snapshot.num_live))

    def _merged(
        self, some: tuple[NDArray[Any], NDArray[np.int32]], others: tuple[NDArray[Any], NDArray[np.int32]]
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """The best of two results, `[num_queries, k]`."""
        k = some[0].shape[1]
        distances, slots = (np.concatenate(pair, axis=1) for pair in zip(some, others, strict=True))
        costs = distances.astype(np.float64) * (1 if self.stored.graph.metric == "l2" else -1)
        order = np.argsort(np.where(slots == NO_ID, np.inf, costs), axis=1, kind="stable")[:, :k]
        return np.take_along_axis(distances, order, axis=1), np.take_along_axis(slots, order, axis=1)
