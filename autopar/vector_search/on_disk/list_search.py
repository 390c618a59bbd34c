"""Search lists on disk: choose what each query probes, read it, and keep the best.

In: queries. Out: distances and positions. The lists of a query may also be chosen elsewhere, as by a router of servers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.recall_tuning import MEASURED_AT, for_filter
from autopar.vector_search.graph.nearest_points import NearestPoints
from autopar.vector_search.on_disk.list_reads import ListReads
from autopar.vector_search.on_disk.list_scores import ListScores
from autopar.vector_search.on_disk.probing import Probing, nearest_lists, of_lists, prepared, probed
from autopar.vector_search.on_disk.stored_lists import StoredLists

#: Minimum vectors in the probed lists, per neighbour.
_PER_NEIGHBOUR = 4


@dataclass(slots=True)
class ListSearch:
    """Searches of one index. Not thread-safe.

    Args:
        effort, pruning: as measured, as in `Probing`.
        whole_counts: int64 `[num_lists]`, vectors of each list; of a part of an index, those of the whole.
        used_bytes: bytes of the lists that were probed, each counted once per batch.
    """

    lists: StoredLists
    reads: ListReads
    effort: int
    pruning: float | None
    whole_counts: NDArray[np.int64]
    used_bytes: int = 0
    points: NearestPoints | None = field(init=False)

    def __post_init__(self) -> None:
        self.points = self.lists.points

    def search(
        self, queries: NDArray[Any], k: int, allowed: NDArray[np.bool_] | None, num_allowed: int, effort: int | None
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and positions, `[num_queries, k]`. Queries that find too few probe twice as many lists, until all.

        Args:
            queries: checked, `[num_queries, d]`.
            allowed: bool `[n]`, the vectors that may be returned; None: all.
            effort: lists per query, without pruning; None: as measured.
        """
        probing = self.probing(effort, k, num_allowed)
        distances, positions = self.of_lists(queries, k, self.probed(queries, probing), allowed)
        while (probing.is_usual or probing.effort < self.lists.num_lists) and num_allowed:
            short = np.flatnonzero(positions[:, min(k, num_allowed) - 1] == NO_ID)
            if not short.size:
                break
            probing = Probing(min(2 * probing.effort, self.lists.num_lists))
            distances, positions = distances.copy(), positions.copy()
            is_probed = self.probed(queries[short], probing)
            distances[short], positions[short] = self.of_lists(queries[short], k, is_probed, allowed)
        return distances, positions

    def probing(self, effort: int | None, k: int, num_allowed: int) -> Probing:
        """The lists to probe: enough for k vectors, and more for a filter, doubled until they make up for it."""
        num_lists = self.lists.num_lists
        mean = max(1.0, float(self.whole_counts.sum()) / num_lists)
        enough = min(num_lists, -int(-_PER_NEIGHBOUR * min(k, num_allowed) // mean))
        wanted, share = max(effort or self.effort, enough), max(1, num_allowed) / self.lists.num_vectors
        is_usual = effort is None and share == 1
        pruning = self.pruning if is_usual else None
        return Probing(min(for_filter(wanted, share), num_lists), pruning, max(1, enough), is_usual)

    def probed(self, queries: NDArray[Any], probing: Probing) -> NDArray[np.bool_]:
        """bool `[num_queries, num_lists]`: which query probes which list."""
        lists = self.lists
        compared = prepared(queries, lists.metric, lists.centre)
        rule = lists.rule if probing.is_usual and lists.rule and probing.least <= lists.rule.width else None
        effort = probing.effort if rule is None else rule.width
        nearest = nearest_lists(compared, lists.centroids, lists.metric, effort, self.points)
        if rule is None:
            return probed(nearest, probing, lists.num_lists)
        is_near = rule.is_probed(nearest, lists.centroids, self.whole_counts, lists.entry_bytes)
        is_near[:, : probing.least] = True
        return of_lists(nearest, is_near, lists.num_lists)

    def usually_probed(self, queries: NDArray[Any]) -> NDArray[np.bool_]:
        """As `probed`, for a search of a few neighbours without a filter or an effort."""
        num = self.lists.num_vectors
        return self.probed(queries, self.probing(None, min(MEASURED_AT, num), num))

    def of_lists(
        self, queries: NDArray[Any], k: int, is_probed: NDArray[np.bool_], allowed: NDArray[np.bool_] | None
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and positions, `[num_queries, k]`, of the vectors in the lists that each query probes.

        Raises:
            IndexFileError: a page is damaged or cannot be read.
        """
        lists = self.lists
        scored = ListScores(queries, k, lists.metric, lists.centre, lists.copies)
        for entries in self.reads.entries(np.flatnonzero(is_probed.any(axis=0))):
            self.used_bytes += int(entries.counts.sum()) * lists.entry_bytes
            is_compared = np.repeat(is_probed[:, entries.lists], entries.counts, axis=1)
            if allowed is not None:
                is_compared &= allowed[entries.positions]
            scored.add(entries.vectors, entries.positions, is_compared)
        return scored.best()

    def page_reads(self, queries: NDArray[Any], num_pages: int) -> NDArray[np.int64]:
        """int64 `[num_pages]`: how many of the queries want each page of the file."""
        lists, found = self.lists, np.zeros(num_pages, np.int64)
        times = self.usually_probed(queries).sum(axis=0)
        for which in np.flatnonzero(times):
            found[lists.first_pages[which] : lists.last_pages[which] + 1] += times[which]
        return found
