"""Read the nodes of a graph while it is merged with changes, apart from the searches' reader.

In: a graph and its blocks. Out: nodes, block by block, or the vectors of all slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.graph_on_disk.block_search import BlockSearch
from autopar.vector_search.graph_on_disk.node_blocks import Nodes
from autopar.vector_search.on_disk.readers import ReadCounts
from autopar.vector_search.updates.contents import Members, StoreReader
from autopar.vector_search.updates.graph.graph_map import GraphMap
from autopar.vector_search.updates.page_store import PageStore

#: Blocks that are read at a time.
_BLOCKS = 64
#: Nodes that are read at a time.
_AT_ONCE = 512


class GraphNodes:
    """The nodes of a graph."""

    def __init__(self, store: PageStore, stored: GraphMap) -> None:
        self._stored = stored
        reader = StoreReader(store, ReadCounts())
        self.search = BlockSearch(store.path, store.file_id, stored.graph, reader, stored.first_pages)

    def read(self, blocks: NDArray[np.integer]) -> Nodes:
        """The nodes of some blocks.

        Raises:
            IndexFileError: a page is damaged or cannot be read.
        """
        return self.search.nodes(blocks.astype(np.int64))

    def at(self, which: NDArray[np.int32]) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Vectors `[m, d]` and edges int32 `[m, degree]` of some nodes."""
        blocks = self._stored.graph.blocks
        vectors, edges = (
            np.empty((len(which), blocks.dim), blocks.dtype),
            np.empty((len(which), blocks.degree), np.int32),
        )
        order = np.argsort(which, kind="stable")
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            every, row = np.unique(which[some] // blocks.per_block, return_inverse=True)
            nodes, place = self.read(every), which[some] % blocks.per_block
            vectors[some], edges[some] = nodes.vectors[row, place], nodes.edges[row, place]
        return vectors, edges

    def scan(self) -> Iterator[tuple[int, Nodes]]:
        """All nodes, some blocks at a time, with the number of the first of these blocks."""
        for start in range(0, self._stored.num_blocks, _BLOCKS):
            yield start, self.read(np.arange(start, min(start + _BLOCKS, self._stored.num_blocks)))

    def members(self) -> Iterator[Members]:
        """The vectors of all slots."""
        graph = self._stored.graph
        per_block = graph.blocks.per_block
        for start, nodes in self.scan():
            slots, vectors = nodes.positions.reshape(-1), nodes.vectors.reshape(-1, graph.blocks.dim)
            first, last = np.searchsorted(graph.repeated_of, (start * per_block, start * per_block + len(slots)))
            of = graph.repeated_of[first:last] - start * per_block
            is_node = np.flatnonzero(slots != NO_ID)
            which = np.concatenate([is_node, of])
            yield Members(np.concatenate([slots[is_node], graph.repeated[first:last]]), vectors[which])
