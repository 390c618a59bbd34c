"""Search one snapshot: the lists that a query probes, and the delta, which is compared with every query.

In: a snapshot, queries. Out: distances and slots. Entries of vectors that are dead in this snapshot are not compared. A
vector that is in several lists is compared once, with the queries that probe any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.recall_tuning import for_filter
from autopar.vector_search.on_disk.list_reads import Entries, ListReads
from autopar.vector_search.on_disk.list_scores import ListScores
from autopar.vector_search.on_disk.probing import Probing, of_lists, prepared, probed
from autopar.vector_search.updates.census import nearest_lists
from autopar.vector_search.updates.list_map import ListMap
from autopar.vector_search.updates.snapshot import Snapshot

#: Minimum vectors in the probed lists, per neighbour.
_PER_NEIGHBOUR = 4


@dataclass(frozen=True, slots=True)
class SnapshotSearch:
    """A search of one snapshot.

    Args:
        lists: its lists.
        allowed: bool `[num_slots]`, the slots that may be returned; None: all.
        num_allowed: vectors that live and may be returned.
        effort: lists per query, without pruning; None: as measured.
        used: called with the entries of each wave.
    """

    snapshot: Snapshot
    lists: ListMap
    reads: ListReads
    allowed: NDArray[np.bool_] | None
    num_allowed: int
    effort: int | None
    used: Callable[[Entries], None]

    def run(self, queries: NDArray[Any], k: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and slots, `[num_queries, k]`, `NO_ID` for no result. Queries that find too few probe twice as many
        lists, until all.

        Args:
            queries: checked, `[num_queries, d]`.
        """
        num_lists = self.lists.num_lists
        probing = self._probing(k)
        distances, slots = self._once(queries, k, probing)
        while (probing.is_usual or probing.effort < num_lists) and self.num_allowed:
            short = np.flatnonzero(slots[:, min(k, self.num_allowed) - 1] == NO_ID)
            if not short.size:
                break
            probing = Probing(min(2 * max(1, probing.effort), num_lists))
            distances, slots = distances.copy(), slots.copy()
            distances[short], slots[short] = self._once(queries[short], k, probing)
        return distances, slots

    def _probing(self, k: int) -> Probing:
        """The lists to probe: enough for k vectors, and more for a filter, doubled until they make up for it."""
        snapshot, lists = self.snapshot, self.lists
        if not lists.num_lists or not self.num_allowed:
            return Probing(0)
        mean = max(1.0, float(lists.counts.sum()) / lists.num_lists)
        enough = min(lists.num_lists, -int(-_PER_NEIGHBOUR * min(k, self.num_allowed) // mean))
        wanted = max(self.effort or snapshot.measured.effort, enough)
        share = max(1, self.num_allowed) / max(1, snapshot.num_live)
        is_usual = self.effort is None and share >= 1
        pruning = snapshot.pruning if is_usual else None
        return Probing(min(for_filter(wanted, share), lists.num_lists), pruning, max(1, enough), is_usual)

    def _once(self, queries: NDArray[Any], k: int, probing: Probing) -> tuple[NDArray[Any], NDArray[np.int32]]:
        snapshot, lists = self.snapshot, self.lists
        scored = ListScores(queries, k, lists.metric, lists.centre, 1)
        delta = snapshot.delta
        if delta.count:
            slots = delta.slots[: delta.count]
            some = np.flatnonzero(self._is_wanted(slots))
            mask = np.ones((len(queries), len(some)), np.bool_)
            scored.add(delta.vectors[some], slots[some], mask)
        if probing.effort:
            compared = prepared(queries, lists.metric, lists.centre)
            is_probed = self._probed(compared, probing)[:, lists.owners]
            for entries in self.reads.entries(np.flatnonzero(is_probed.any(axis=0))):
                self.used(entries)
                self._add(scored, entries, np.repeat(is_probed[:, entries.lists], entries.counts, axis=1))
        return scored.best()

    def _probed(self, compared: NDArray[np.float32], probing: Probing) -> NDArray[np.bool_]:
        """bool `[num_queries, num_lists]`: which query probes which list."""
        lists = self.lists
        rule = lists.rule if probing.is_usual and lists.rule and probing.least <= lists.rule.width else None
        if rule is None:
            return probed(nearest_lists(lists, compared, probing.effort), probing, lists.num_lists)
        near = nearest_lists(lists, compared, rule.width)
        is_near = rule.is_probed(near, lists.centroids, lists.lengths, lists.extents.entry_bytes)
        is_near[:, : probing.least] = True
        return of_lists(near, is_near, lists.num_lists)

    def _add(self, scored: ListScores, entries: Entries, is_probed: NDArray[np.bool_]) -> None:
        which = np.flatnonzero(self._is_wanted(entries.positions))
        if not which.size:
            return
        order = which[np.argsort(entries.positions[which], kind="stable")]
        slots = entries.positions[order]
        firsts = np.flatnonzero(np.concatenate([[True], slots[1:] != slots[:-1]]))
        mask = np.logical_or.reduceat(is_probed[:, order], firsts, axis=1)
        scored.add(entries.vectors[order[firsts]], slots[firsts], mask)

    def _is_wanted(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        is_live = self.snapshot.is_live(slots)
        return is_live if self.allowed is None else is_live & self.allowed[slots]
