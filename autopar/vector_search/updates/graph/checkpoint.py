"""Merge the delta into the graph on disk, and make the result the state that is on the device.

In: a frozen state. Out: a new graph, and a superblock that refers to it. Updates and searches go on meanwhile. After many
changes, the recall is measured again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.choice_tuning import Choice
from autopar.vector_search.on_disk.probe_tuning import Tuned
from autopar.vector_search.updates.checkpoint import CENSUS_SHARE, Frozen, Written, saved_tuning
from autopar.vector_search.updates.graph.graph_map import GraphMap
from autopar.vector_search.updates.graph.merge import merged
from autopar.vector_search.updates.graph.recall import measured
from autopar.vector_search.updates.page_store import PageStore
from autopar.vector_search.updates.settings import Settings
from autopar.vector_search.updates.slots import ALIVE

#: Name of a graph in the file.
KIND = "graph"


def checkpoint(store: PageStore, frozen: Frozen, settings: Settings, queries: NDArray[Any] | None) -> Written:
    """Write a state.

    Raises:
        OSError: it cannot be written; the state before is the state still.
        IndexFileError: a page is damaged or cannot be read.
    """
    old, is_live = frozen.stored, frozen.died == ALIVE
    assert isinstance(old, GraphMap)
    added = frozen.delta.some(is_live[frozen.delta.slots])
    writer = store.writer()
    stored, new_nodes, is_node, counts = merged(store, writer, old, added, is_live, frozen.sequence)
    tuned, num_live = frozen.tuned, int(is_live.sum())
    is_due = num_live > 0 and frozen.num_changes >= CENSUS_SHARE * num_live
    if is_due:
        target, effort = settings.recall_target, tuned.measured.effort
        found = measured(store, stored, is_node, new_nodes, target, queries, effort, frozen.sequence)
        tuned = Tuned(found, None)
    changes = 0 if is_due else frozen.num_changes
    saved, arrays = stored.saved()
    arrays |= {"ids": frozen.ids, "is_live": np.packbits(is_live)}
    if settings.layout.metadata.itemsize:
        arrays["metadata"] = frozen.metadata
    if queries is not None:
        arrays["queries"] = queries.view(np.uint8) if queries.dtype.name == "bfloat16" else queries
    about = settings.saved() | saved_tuning(Choice(tuned, None), changes) | saved | {"kind": KIND}
    state = writer.commit(frozen.sequence, about, arrays)
    return Written(
        state,
        stored,
        tuned,
        np.flatnonzero(~is_live),
        np.zeros(0, np.int64),
        {**counts, "censuses": int(is_due)},
        is_due,
    )
