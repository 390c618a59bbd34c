"""Copy a graph on disk into a file of pages that can be changed.

A graph of few vectors has at most one edge less than these. Its nodes get room for the usual number, as it may grow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.graph_on_disk.build import GraphOptions
from autopar.vector_search.graph_on_disk.index import GraphDiskIndex
from autopar.vector_search.graph_on_disk.node_blocks import NodeBlocks, Nodes
from autopar.vector_search.updates.graph.checkpoint import KIND
from autopar.vector_search.updates.graph.graph_map import GraphMap
from autopar.vector_search.updates.page_store import PageWriter

#: Blocks that are copied at a time.
_BLOCKS = 256


def copied_graph(index: GraphDiskIndex, writer: PageWriter) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Write the blocks; the settings and arrays of the graph.

    Raises:
        OSError: they cannot be written.
        IndexFileError: the index is damaged.
    """
    graph = replace(index.graph, ids=None)
    old, usual = graph.blocks, GraphOptions().degree
    blocks = old
    if old.degree >= graph.num_vectors - 1 and old.degree < usual:
        blocks = NodeBlocks(old.dim, old.dtype, usual)
    first_pages = [np.zeros(0, np.int64)]
    if blocks is old:
        for start in range(0, graph.num_blocks, _BLOCKS):
            nodes = index.nodes(np.arange(start, min(start + _BLOCKS, graph.num_blocks)))
            sizes = [blocks.pages_per_block] * len(nodes.positions)
            first_pages.append(writer.write_groups(blocks.stream(nodes), sizes))
    else:
        nodes = index.nodes(np.arange(graph.num_blocks))
        more = usual - old.degree
        num_blocks = -(-len(graph.codes) // blocks.per_block)
        room = num_blocks * blocks.per_block - len(graph.codes)
        parts = (
            np.pad(nodes.positions.reshape(-1), (0, room), constant_values=NO_ID),
            np.concatenate([nodes.vectors.reshape(-1, old.dim), np.zeros((room, old.dim), old.dtype)]),
            np.pad(nodes.edges.reshape(-1, old.degree), ((0, room), (0, more)), constant_values=NO_ID),
        )
        wide = Nodes(*(part.reshape(num_blocks, blocks.per_block, *part.shape[1:]) for part in parts))
        first_pages.append(writer.write_groups(blocks.stream(wide), [blocks.pages_per_block] * num_blocks))
        graph = replace(
            graph,
            blocks=blocks,
            codes=np.pad(graph.codes, ((0, room), (0, 0))),
            entry_links=np.pad(graph.entry_links, ((0, 0), (0, more)), constant_values=NO_ID),
        )
    settings, arrays = GraphMap(graph, np.concatenate(first_pages), index.width, graph.num_vectors, 0).saved()
    return {**settings, "kind": KIND}, arrays
