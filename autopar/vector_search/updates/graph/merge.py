"""Merge deletions and insertions into a graph on disk, in two passes over its blocks (FreshDiskANN, arXiv 2105.09613, 5).

In: the old graph, which slots live, new vectors. Out: the new graph, in pages that nothing refers to yet.

    delete   a pass finds the dead nodes. A node with an edge to one gets edges to its nearest live neighbours instead
    insert   new vectors are searched for in the old graph and compared with each other; their edges are pruned
    patch    a pass adds the reverse of these edges, and prunes nodes that then have more than the degree

Old nodes keep their numbers. New ones take places of dead ones, in a block of their neighbours where it has any. Blocks
that do not change keep their pages. Memory holds the codes twice, 30 bytes per node, 96 per dead node, and the new
vectors with their edges.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, is_integer
from autopar.vector_search.graph.nearest_points import point_graph
from autopar.vector_search.graph_on_disk.build import NUM_CODES, PER_ENTRY
from autopar.vector_search.graph_on_disk.node_blocks import Nodes
from autopar.vector_search.graph_on_disk.stored_graph import StoredGraph
from autopar.vector_search.ivf.product_quantization import Codebooks, encoded, train_codebooks
from autopar.vector_search.on_disk.probing import prepared
from autopar.vector_search.updates.contents import Members
from autopar.vector_search.updates.graph.edges import chosen
from autopar.vector_search.updates.graph.graph_map import GraphMap
from autopar.vector_search.updates.graph.newcomers import Newcomers, newcomers
from autopar.vector_search.updates.graph.nodes import GraphNodes
from autopar.vector_search.updates.graph.places import placed
from autopar.vector_search.updates.graph.points import Points, Space, largest_square
from autopar.vector_search.updates.graph.survivors import Survivors, survivors
from autopar.vector_search.updates.page_store import PageStore, PageWriter

#: Share of the vectors that may change before codebooks are trained again.
_TRAIN_SHARE = 0.5
#: Blocks that are patched at a time.
_BLOCKS = 64


class Merged(NamedTuple):
    """A graph after a merge.

    Args:
        new_nodes: int32 `[m]`, the numbers of new nodes.
        is_node: bool `[num_places]`, places that have a node.
        counts: what was done, by name.
    """

    stored: GraphMap
    new_nodes: NDArray[np.int32]
    is_node: NDArray[np.bool_]
    counts: Counter[str]


def merged(
    store: PageStore, writer: PageWriter, old: GraphMap, added: Members, is_live: NDArray[np.bool_], seed: int
) -> Merged:
    """Write the new graph.

    Args:
        added: new vectors, all of which live.
        is_live: bool `[num_slots]`.

    Raises:
        OSError: it cannot be written.
        IndexFileError: a page is damaged or cannot be read.
    """
    num_live, nodes = int(is_live.sum()), GraphNodes(store, old)
    left = survivors(nodes, old.graph, is_live, seed)
    num_kept = num_live - len(added.slots)
    changed = old.num_changed + len(added.slots) + old.num_stored - num_kept
    old, books, centre = _coding(old, left, added, changed >= _TRAIN_SHARE * max(1, num_live))
    graph = old.graph
    limit = 0.0
    if graph.metric == "inner_product":
        wide = added.vectors.astype(np.float32)
        limit = max(largest_square(graph), float((wide**2).sum(axis=1).max(initial=0)))
    space = Space(graph.metric, graph.centre, limit)
    new = newcomers(added, old, nodes, left, space, is_live)
    numbers = placed(~left.is_live, graph.blocks.per_block, new.old_edges, new.new_edges)
    patch = _Patch.of(old, nodes, left, new, numbers, space, books, centre)
    first_pages = patch.write(writer)
    counts = Counter(
        inserted_nodes=len(numbers),
        deleted_nodes=int(left.is_dead.sum()),
        trainings=int(books is not None),
    )
    repeated = np.concatenate([left.repeated, new.same_slots, new.equal_slots])
    repeated_of = np.concatenate([left.repeated_of, numbers[new.same_as], new.equal_to])
    order = np.argsort(repeated_of, kind="stable")
    result = replace(
        graph,
        codes=patch.codes,
        codebooks=graph.codebooks if books is None else np.asarray(books.centroids),
        centre=graph.centre if books is None else centre,
        repeated=repeated[order].astype(np.int32),
        repeated_of=repeated_of[order].astype(np.int32),
        num_vectors=len(is_live),
        entries=np.zeros(0, np.int32),
    )
    changed = 0 if books is not None else changed
    stored = GraphMap(result, first_pages, old.width, num_live, changed)
    entries = _entries(graph.entries, patch, left, numbers, seed)
    return Merged(_with_entries(store, stored, entries), numbers, patch.slot_of != NO_ID, patch.counts + counts)


def _coding(
    old: GraphMap, left: Survivors, added: Members, is_due: bool
) -> tuple[GraphMap, Codebooks | None, NDArray[np.float32] | None]:
    """The graph by whose codes nodes are compared; codebooks for the new graph, None if they stay; its centre."""
    graph = old.graph
    if not is_due or not (len(left.sample) or len(added.slots)):
        return old, None, graph.centre
    draw = np.random.default_rng(0)
    num = len(left.sample) + len(added.slots)
    some = draw.permutation(num)[: 1 << (num.bit_length() - 1)]  # few sizes: few programs
    sample = np.concatenate([left.sample, added.vectors])[some]
    centre = None
    if graph.metric == "l2" and not is_integer(graph.blocks.dtype):
        centre = sample.astype(np.float32).mean(axis=0, dtype=np.float64).astype(np.float32)
    compared = prepared(sample, graph.metric, centre)
    books = train_codebooks(jnp.asarray(compared), len(graph.codebooks), num_codes=min(NUM_CODES, len(compared)))
    if not left.is_live.any():  # nothing is compared by the old codes
        old = replace(old, graph=replace(graph, codebooks=np.asarray(books.centroids), centre=centre))
        old = replace(old, graph=replace(old.graph, codes=np.zeros_like(graph.codes)))
    return old, books, centre


@dataclass(slots=True)
class _Patch:
    """The second pass.

    Args:
        slot_of: int32 `[num_places]`, of the new graph.
        row_of: int32 `[num_places]`, the row of a new node; `NO_ID` for an old one.
        targets, sources: `[num_edges]`, the new edges, by target.
        codes: uint8 `[num_places, num_parts]`, of the new graph.
        num_in: int64 `[num_places]`, edges that lead to each node.
    """

    old: GraphMap
    nodes: GraphNodes
    left: Survivors
    new: Newcomers
    edges: NDArray[np.int32]
    points: Points
    space: Space
    books: Codebooks | None
    centre: NDArray[np.float32] | None
    slot_of: NDArray[np.int32]
    row_of: NDArray[np.int32]
    targets: NDArray[np.int32]
    sources: NDArray[np.int32]
    codes: NDArray[np.uint8]
    num_in: NDArray[np.int64]
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(
        cls,
        old: GraphMap,
        nodes: GraphNodes,
        left: Survivors,
        new: Newcomers,
        numbers: NDArray[np.int32],
        space: Space,
        books: Codebooks | None,
        centre: NDArray[np.float32] | None,
    ) -> _Patch:
        """A pass that is to begin.

        Args:
            numbers: int32 `[m]`, of the new nodes.
            books: codebooks that replace those of the old graph.
            centre: that belongs to them.
        """
        graph = old.graph
        per_block = graph.blocks.per_block
        last = max(int(numbers.max(initial=-1)), int(np.flatnonzero(left.is_live).max(initial=-1)))
        num_places = -(-(last + 1) // per_block) * per_block
        slot_of, row_of = np.full(num_places, NO_ID, np.int32), np.full(num_places, NO_ID, np.int32)
        common = min(num_places, len(left.slot_of))
        slot_of[:common] = left.slot_of[:common]
        slot_of[numbers], row_of[numbers] = new.slots, np.arange(len(numbers), dtype=np.int32)
        among = np.append(numbers, NO_ID).astype(np.int32)[new.new_edges]
        edges = np.where(new.old_edges == NO_ID, among, new.old_edges)
        rows, columns = np.nonzero(edges != NO_ID)
        targets = edges[rows, columns]
        order = np.argsort(targets, kind="stable")
        points = Points(graph, space, new.points, left.error)
        points.number(numbers, num_places)
        codes = np.zeros((num_places, graph.codes.shape[1]), np.uint8)
        if books is None:
            codes[:common] = graph.codes[:common]
            known = Codebooks(jnp.asarray(graph.codebooks))
            codes[numbers] = encoded(known, prepared(new.vectors, graph.metric, graph.centre))
        return cls(
            old,
            nodes,
            left,
            new,
            edges,
            points,
            space,
            books,
            centre,
            slot_of,
            row_of,
            targets[order],
            numbers[rows[order]],
            codes,
            np.zeros(num_places, np.int64),
        )

    def write(self, writer: PageWriter) -> NDArray[np.int64]:
        """Write the blocks that change; the first page of each block."""
        blocks = self.old.graph.blocks
        per_block = blocks.per_block
        num_blocks = len(self.slot_of) // per_block
        first_pages = np.full(num_blocks, NO_ID, np.int64)
        common = min(num_blocks, self.old.num_blocks)
        first_pages[:common] = self.old.first_pages[:common]
        for start in range(0, num_blocks, _BLOCKS):
            end = min(start + _BLOCKS, num_blocks)
            nodes, is_changed = self._patched(start, end)
            places = slice(start * per_block, end * per_block)
            found = nodes.edges[nodes.edges != NO_ID]
            self.num_in += np.bincount(found, minlength=len(self.slot_of))
            if self.books is not None:
                flat = nodes.vectors.reshape(-1, blocks.dim)
                self.codes[places] = encoded(self.books, prepared(flat, self.old.graph.metric, self.centre))
            which = np.flatnonzero(is_changed)
            if not which.size:
                continue
            stream = blocks.stream(Nodes(*(part[which] for part in nodes)))
            first_pages[start + which] = writer.write_groups(stream, [blocks.pages_per_block] * len(which))
            self.counts["written_blocks"] += len(which)
        return first_pages

    # -- private ------------------------------------------------------------------------------

    def _patched(self, start: int, end: int) -> tuple[Nodes, NDArray[np.bool_]]:
        """The nodes of some blocks, and which of the blocks change."""
        blocks = self.old.graph.blocks
        per_block, degree = blocks.per_block, blocks.degree
        num, begin = (end - start) * per_block, start * per_block
        slots = np.full(num, NO_ID, np.int32)
        vectors = np.zeros((num, blocks.dim), blocks.dtype)
        edges = np.full((num, degree), NO_ID, np.int32)
        known = max(0, min(end, self.old.num_blocks) - start)
        if known:
            read = self.nodes.read(np.arange(start, start + known))
            slots[: known * per_block] = read.positions.reshape(-1)
            vectors[: known * per_block] = read.vectors.reshape(-1, blocks.dim)
            edges[: known * per_block] = read.edges.reshape(-1, degree)
        before = slots, edges.copy()
        slots, rows = self.slot_of[begin : begin + num], self.row_of[begin : begin + num]
        is_new = rows != NO_ID
        vectors[is_new], edges[is_new] = self.new.vectors[rows[is_new]], self.edges[rows[is_new]]
        edges[slots == NO_ID] = NO_ID
        vectors[slots == NO_ID] = 0
        self._change_edges(begin, vectors, edges, is_new)
        is_changed = (slots != before[0]) | (edges != before[1]).any(axis=1) | is_new
        is_changed[known * per_block :] = True
        shape = (end - start, per_block)
        nodes = Nodes(slots.reshape(shape), vectors.reshape(*shape, -1), edges.reshape(*shape, -1))
        return nodes, is_changed.reshape(shape).any(axis=1)

    def _change_edges(
        self, begin: int, vectors: NDArray[Any], edges: NDArray[np.int32], is_new: NDArray[np.bool_]
    ) -> None:
        """Replace the edges to dead nodes, and add the reverse of new edges.

        Args:
            begin: number of the first node.
            vectors, edges: of the nodes, `[m, ..]`; the edges are changed.
        """
        left, num = self.left, len(edges)
        gone = np.zeros(edges.shape, np.bool_)
        if left.is_dead.any():
            gone = (edges != NO_ID) & ~is_new[:, None]
            gone[gone] = left.is_dead[edges[gone]]
        first, last = np.searchsorted(self.targets, (begin, begin + num))
        into, sources = self.targets[first:last] - begin, self.sources[first:last]
        is_touched = gone.any(axis=1)
        is_touched[into] = True
        which = np.flatnonzero(is_touched)
        if not which.size:
            return
        of = np.full(num, NO_ID, np.int64)
        of[which] = np.arange(len(which))
        row, column = np.nonzero((edges != NO_ID) & ~gone & is_touched[:, None])
        lost, there = np.nonzero(gone)
        instead = left.instead[left.row_of[edges[lost, there]]]
        lost, there = np.nonzero(instead != NO_ID)[0], instead[instead != NO_ID]
        rows = np.concatenate([row, np.nonzero(gone)[0][lost], into])
        candidates = np.concatenate([edges[row, column], there, sources])
        is_other = candidates != rows + begin
        own = self.space.of(vectors[which])
        found = chosen(own, of[rows[is_other]], candidates[is_other], self.points.of, len(self.slot_of), edges.shape[1])
        edges[which] = found.edges
        self.counts["patched_nodes"] += len(which)
        self.counts["pruned_nodes"] += found.num_pruned


def _entries(
    old: NDArray[np.int32], patch: _Patch, left: Survivors, numbers: NDArray[np.int32], seed: int
) -> NDArray[np.int32]:
    """Entry points: the old ones that live, new nodes in their share, and nodes that no edge leads to."""
    is_node = patch.slot_of != NO_ID
    wanted = -(-int(is_node.sum()) // PER_ENTRY)
    draw = np.random.default_rng(seed)
    kept = old[left.is_live[old]]
    fresh = draw.permutation(numbers)[: max(0, wanted - len(kept))]
    rest = np.setdiff1d(np.flatnonzero(is_node), np.concatenate([kept, fresh]))
    more = draw.permutation(rest)[: max(0, wanted - len(kept) - len(fresh))]
    alone = np.flatnonzero(is_node & (patch.num_in == 0))
    patch.counts["unreached_nodes"] += len(alone)
    return np.unique(np.concatenate([kept, fresh, more, alone])).astype(np.int32)


def _with_entries(store: PageStore, stored: GraphMap, entries: NDArray[np.int32]) -> GraphMap:
    """The graph with entry points."""
    graph: StoredGraph = stored.graph
    vectors, links = GraphNodes(store, stored).at(entries)
    points = prepared(vectors, graph.metric, graph.centre)
    between = point_graph(points, graph.metric)
    graph = replace(
        graph,
        entries=entries,
        entry_vectors=points,
        entry_links=links.astype(np.int32),
        entry_edges=None if between is None else between.edges,
        entry_points=None if between is None else between.entries,
    )
    return replace(stored, graph=graph)
