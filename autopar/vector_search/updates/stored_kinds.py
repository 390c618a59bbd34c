"""What can be on disk: lists or a graph. A table of how each is loaded, searched, read and written at a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.list_reads import Entries, ListReads, working_bytes
from autopar.vector_search.updates.checkpoint import Frozen, Written, checkpoint
from autopar.vector_search.updates.contents import Contents, Members
from autopar.vector_search.updates.graph.checkpoint import KIND as GRAPH_KIND
from autopar.vector_search.updates.graph.checkpoint import checkpoint as graph_checkpoint
from autopar.vector_search.updates.graph.graph_map import GraphMap
from autopar.vector_search.updates.graph.nodes import GraphNodes
from autopar.vector_search.updates.graph.snapshot_search import GraphSearch
from autopar.vector_search.updates.list_map import ListMap
from autopar.vector_search.updates.page_store import PageStore
from autopar.vector_search.updates.search import SnapshotSearch
from autopar.vector_search.updates.search_reader import SearchReader
from autopar.vector_search.updates.settings import Settings
from autopar.vector_search.updates.snapshot import Snapshot, Stored


class Search(Protocol):
    """A search of one snapshot."""

    def run(self, queries: NDArray[Any], k: int, /) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and slots, `[num_queries, k]`, best first; `NO_ID` for no result."""
        ...


@dataclass(frozen=True, slots=True)
class StoredKind:
    """One kind of what is on disk.

    Args:
        name: in the file.
        counts: what its checkpoints count.
        loaded: from arrays, settings, further settings of the file, and the number of slots. Raises `LookupError`,
            `TypeError` or `ValueError`.
        search: of a snapshot, by a reader, of the slots that are allowed and so many that live, with an effort.
        members: its vectors, dead ones too, some perhaps several times.
        checkpoint: see `checkpoint.checkpoint`.
        details: for `stats`.
        working_bytes: what a search of so many queries works with.
    """

    name: str
    counts: tuple[str, ...]
    loaded: Callable[[Mapping[str, NDArray[Any]], Settings, Mapping[str, Any], int], Stored]
    search: Callable[[Snapshot, SearchReader, NDArray[np.bool_] | None, int, int | None], Search]
    members: Callable[[PageStore, Any, int], Iterator[Members]]
    checkpoint: Callable[[PageStore, Frozen, Settings, NDArray[Any] | None], Written]
    details: Callable[[Snapshot], dict[str, Any]]
    working_bytes: Callable[[Any, int], int]


def kind_of(stored: Stored) -> StoredKind:
    """The kind of what is stored."""
    return LISTS if isinstance(stored, ListMap) else GRAPH


def kind_named(name: str) -> StoredKind:
    """The kind of this name.

    Raises:
        LookupError: there is none.
    """
    return {each.name: each for each in (LISTS, GRAPH)}[name]


# -- lists ------------------------------------------------------------------------------------


def _loaded_lists(
    arrays: Mapping[str, NDArray[Any]], settings: Settings, saved: Mapping[str, Any], num_slots: int
) -> ListMap:
    layout = settings.layout
    if "centroids" not in arrays:
        return ListMap.empty(layout.dim, layout.dtype, settings.metric)
    return ListMap.loaded(arrays, layout.dim, layout.dtype, settings.metric, num_slots, saved.get("rule"))


def _search_of_lists(
    snapshot: Snapshot, reader: SearchReader, allowed: NDArray[np.bool_] | None, num_allowed: int, effort: int | None
) -> Search:
    lists = snapshot.stored
    assert isinstance(lists, ListMap)

    def used(entries: Entries) -> None:
        reader.used_bytes += int(entries.counts.sum()) * lists.extents.entry_bytes

    reads = ListReads(reader.store.path, reader.store.file_id, lists.extents, reader.reader)
    return SnapshotSearch(snapshot, lists, reads, allowed, num_allowed, effort, used)


def _members_of_lists(store: PageStore, lists: ListMap, num_slots: int) -> Iterator[Members]:
    every = np.full(num_slots, np.iinfo(np.int64).max)
    return (Members(each.positions, each.vectors) for each in Contents(store, lists, every, 0).scan())


def _details_of_lists(snapshot: Snapshot) -> dict[str, Any]:
    lists = snapshot.stored
    assert isinstance(lists, ListMap)
    details: dict[str, Any] = {"pruning": snapshot.pruning, "num_lists": lists.num_lists}
    return details | {"longest_list": int(lists.lengths.max(initial=0)), "entries": int(lists.lengths.sum())}


# -- a graph ----------------------------------------------------------------------------------


def _loaded_graph(
    arrays: Mapping[str, NDArray[Any]], settings: Settings, saved: Mapping[str, Any], num_slots: int
) -> GraphMap:
    found = GraphMap.loaded(arrays, saved["graph"])
    graph, layout = found.graph, settings.layout
    if (graph.metric, graph.num_vectors) != (settings.metric, num_slots):
        raise ValueError("a graph of another metric, or of other slots")
    if (graph.blocks.dim, graph.blocks.dtype) != (layout.dim, layout.dtype):
        raise ValueError("a graph of other vectors")
    return found


def _search_of_graph(
    snapshot: Snapshot, reader: SearchReader, allowed: NDArray[np.bool_] | None, num_allowed: int, effort: int | None
) -> Search:
    assert isinstance(snapshot.stored, GraphMap)
    return GraphSearch(snapshot, snapshot.stored, reader, allowed, num_allowed, effort)


def _members_of_graph(store: PageStore, graph: GraphMap, num_slots: int) -> Iterator[Members]:
    return GraphNodes(store, graph).members()


def _details_of_graph(snapshot: Snapshot) -> dict[str, Any]:
    stored = snapshot.stored
    assert isinstance(stored, GraphMap)
    graph = stored.graph
    details: dict[str, Any] = {"degree": graph.blocks.degree, "width": stored.width, "num_blocks": stored.num_blocks}
    details |= {"code_bytes": graph.codes.shape[1], "nodes_per_block": graph.blocks.per_block}
    return details | {"num_places": len(graph.codes), "num_entries": len(graph.entries)}


#: Vectors of a node, its block, and what is known of it, while it is compared: about so many times its bytes.
_NODE_COPIES = 4


def _working_bytes_of_graph(graph: GraphMap, num_queries: int) -> int:
    blocks, width = graph.graph.blocks, graph.width
    return num_queries * width * _NODE_COPIES * blocks.per_block * (blocks.node_bytes + 4 * blocks.dim)


LISTS = StoredKind(
    "lists",
    ("splits", "merges", "moved", "censuses"),
    _loaded_lists,
    _search_of_lists,
    _members_of_lists,
    checkpoint,
    _details_of_lists,
    lambda lists, num_queries: working_bytes(lists.extents, num_queries),
)
GRAPH = StoredKind(
    GRAPH_KIND,
    (
        "inserted_nodes",
        "deleted_nodes",
        "patched_nodes",
        "pruned_nodes",
        "unreached_nodes",
        "written_blocks",
        "trainings",
        "censuses",
    ),
    _loaded_graph,
    _search_of_graph,
    _members_of_graph,
    graph_checkpoint,
    _details_of_graph,
    _working_bytes_of_graph,
)
