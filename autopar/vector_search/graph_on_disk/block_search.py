"""Search a graph on disk: beam search over blocks, for a batch of queries.

In: queries. Out: the best nodes of each. The beam of a query holds nodes by cost: of nodes that were not read, the cost
of their code; of the others, that of their vector. In each round, a query reads the blocks of the best `width` nodes
that were not read. A search starts at the nearest entry points, whose edges are in memory. All nodes of a block are compared by their vectors, and those that enter the beam are followed, as is
the best third of the block: the codes of their neighbours decide which of these enter the beam. A node that does not
enter the beam when its block is read never will, as the beam only improves; so no block is read twice for a query, and
none is kept.

Queries of a batch take their rounds together, and a block that several of them want in a round is read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.graph_on_disk.compared import Comparing
from autopar.vector_search.graph_on_disk.node_blocks import FIRST_PAGE, Nodes
from autopar.vector_search.graph_on_disk.stored_graph import Allowed, StoredGraph, has_allowed
from autopar.vector_search.on_disk.page_checks import check
from autopar.vector_search.on_disk.page_file import damaged
from autopar.vector_search.on_disk.pages import payloads
from autopar.vector_search.on_disk.readers import Reader, Run

#: One of so many nodes of a block is followed, even if it does not enter the beam: at equal pages, recall@10 on 20,000
#: vectors rises from 0.939 to 0.969.
_FOLLOWED = 3
#: Maximum entry points per query whose edges are followed before the first read.
_STARTS = 16


class BestNodes(NamedTuple):
    """The best nodes of each query, best first.

    Args:
        costs: f64 `[num_queries, k]`, infinity for no result.
        nodes: int32 `[num_queries, k]`, `NO_ID` for no result.
        positions: int32 `[num_queries, k]`, in the corpus.
    """

    costs: NDArray[np.float64]
    nodes: NDArray[np.int32]
    positions: NDArray[np.int32]


class _Beam(NamedTuple):
    """`[num_queries, effort]`, best first. is_open: whether the node's block has not been read."""

    costs: NDArray[np.float64]
    nodes: NDArray[np.int32]
    is_open: NDArray[np.bool_]


@dataclass(slots=True)
class BlockSearch:
    """Searches of one file. Not thread-safe.

    Args:
        path: the file, for errors.
        file_id: the random id that its checksums contain.
        first_pages: int64 `[num_blocks]`, the first page of each block; None: one after the other.
        followed: nodes whose edges searches have followed.
    """

    path: Path
    file_id: bytes
    graph: StoredGraph
    reader: Reader
    first_pages: NDArray[np.int64] | None = None
    followed: int = 0

    def search(
        self,
        compared: Comparing,
        start: NDArray[np.integer],
        k: int,
        effort: int,
        width: int,
        allowed: Allowed | None = None,
        left_out: NDArray[np.int32] | None = None,
    ) -> BestNodes:
        """The best k nodes of each query.

        Args:
            start: int `[num_queries, m]`, entry points to start from, by their index, nearest first.
            effort: nodes of a beam.
            width: maximum blocks that a query reads per round.
            allowed: bool `[n]`, vectors that may be returned.
            left_out: int32 `[num_queries]`, the node that each query ignores, such as itself; `NO_ID` for none.

        Raises:
            IndexFileError: a page cannot be read, or is damaged.
        """
        num, per_block, num_blocks = len(start), self.graph.blocks.per_block, self.graph.num_blocks
        best = BestNodes(*_nothing(num, k), np.full((num, k), NO_ID, np.int32))
        which, first = np.repeat(np.arange(num), start.shape[1]), self.graph.entries[start]
        left_out = np.full(num, NO_ID, np.int32) if left_out is None else left_out
        is_other = first != left_out[:, None]
        costs = compared.with_codes(which, self.graph.codes[first.reshape(-1)]).reshape(first.shape)
        costs = np.where(is_other, costs, np.inf)
        beam = _best_of(_Beam(*_nothing(num, effort), np.zeros((num, effort), bool)), costs, first, True)
        was_read = np.zeros(0, np.int64)  # sorted keys, query * num_blocks + block
        links = self.graph.entry_links[start[:, :_STARTS]]
        is_followed = is_other[:, :_STARTS]
        beam = self._followed(compared, beam, was_read, left_out, np.arange(num), links, is_followed)
        while True:
            wanted = _first_open(beam, width)
            query, place = np.nonzero(wanted)
            if not query.size:
                return best
            keys = distinct(query.astype(np.int64) * num_blocks + beam.nodes[query, place] // per_block)
            was_read = distinct(np.concatenate([was_read, keys]))
            query, block = keys // num_blocks, keys % num_blocks
            every, at = np.unique(block, return_inverse=True)
            nodes = self.nodes(every)
            some = Nodes(*(part[at] for part in nodes))
            numbers = (block[:, None] * per_block + np.arange(per_block)).astype(np.int32)
            is_node = (some.positions != NO_ID) & (numbers != left_out[query][:, None])
            costs = np.where(is_node, compared.with_vectors(query, some.vectors), np.inf)
            may = is_node if allowed is None else has_allowed(self.graph, numbers, some.positions, allowed)
            best = _merged(best, query, np.where(may, costs, np.inf), numbers, some.positions)
            beam = _without_blocks(beam, query, block, per_block, num_blocks)
            rows, columns = _as_rows(query, num, per_block)
            beam = _best_of(beam, *_spread(rows, columns, num, costs, numbers), False)
            rank = np.argsort(np.argsort(costs, axis=1, kind="stable"), axis=1, kind="stable")
            is_followed = (costs <= beam.costs[query, -1:]) | (rank < -(-per_block // _FOLLOWED))
            is_followed &= np.isfinite(costs)
            self.followed += int(is_followed.sum())
            beam = self._followed(compared, beam, was_read, left_out, query, some.edges, is_followed)

    def nodes(self, blocks: NDArray[np.int64]) -> Nodes:
        """Read blocks, int64 `[m]`, ascending.

        Raises:
            IndexFileError: a page cannot be read, or is damaged.
        """
        each = self.graph.blocks.pages_per_block
        firsts = FIRST_PAGE + blocks * each if self.first_pages is None else self.first_pages[blocks]
        breaks = np.flatnonzero(np.diff(firsts) != each) + 1
        runs = [Run(int(part[0]), len(part) * each) for part in np.split(firsts, breaks)]
        pages = self.reader.start(runs).wait()
        check(pages, self.path, self.file_id, runs)
        found = self.graph.blocks.nodes(payloads(pages))
        for what, array, most in (
            ("vectors", found.positions, self.graph.num_vectors),
            ("nodes", found.edges, len(self.graph.codes)),
        ):
            if array.min() < NO_ID or array.max() >= most:
                raise damaged(self.path, f"a node points outside the {most:,} {what}")
        return found

    # -- private ------------------------------------------------------------------------------

    def _followed(
        self,
        compared: Comparing,
        beam: _Beam,
        was_read: NDArray[np.int64],
        left_out: NDArray[np.int32],
        query: NDArray[np.int64],
        edges: NDArray[np.int32],
        is_followed: NDArray[np.bool_],
    ) -> _Beam:
        """The beam with the neighbours of the nodes that are followed, `[m, num_nodes]`, of the queries `[m]`."""
        num, num_nodes, num_blocks = len(beam.nodes), len(self.graph.codes), self.graph.num_blocks
        row, place = np.nonzero(is_followed)
        near = edges[row, place]
        keys = (query[row].astype(np.int64) * num_nodes)[:, None] + near
        keys = distinct(keys[near != NO_ID])
        there, known = np.nonzero(beam.nodes != NO_ID)
        keys = keys[~_is_in(keys, np.sort(there * num_nodes + beam.nodes[there, known]))]
        query, node = keys // num_nodes, (keys % num_nodes).astype(np.int32)
        is_new = ~_is_in(query * num_blocks + node // self.graph.blocks.per_block, was_read) & (node != left_out[query])
        query, node = query[is_new], node[is_new]
        costs = compared.with_codes(query, self.graph.codes[node])
        enters = costs < beam.costs[query, -1]
        query, node, costs = query[enters], node[enters], costs[enters]
        rows, columns = _as_rows(query, num, 1)
        return _best_of(beam, *_spread(rows, columns, num, costs[:, None], node[:, None]), True)


def distinct(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """The distinct keys, ascending: `np.unique`, which hashes, takes several times as long."""
    ordered = np.sort(keys)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if ordered.size else ordered


def _nothing(num: int, width: int) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    return np.full((num, width), np.inf), np.full((num, width), NO_ID, np.int32)


def _first_open(beam: _Beam, width: int) -> NDArray[np.bool_]:
    """The first `width` nodes of each beam whose blocks were not read."""
    return beam.is_open & (np.cumsum(beam.is_open, axis=1) <= width)


def _best_of(beam: _Beam, costs: NDArray[np.float64], nodes: NDArray[np.int32], is_open: bool) -> _Beam:
    """The best of a beam and of further nodes, `[num_queries, m]`; an infinite cost for none."""
    if not costs.shape[1]:
        return beam
    every = np.concatenate([beam.costs, costs], axis=1)
    order = np.argsort(every, axis=1, kind="stable")[:, : beam.costs.shape[1]]
    kept = np.take_along_axis(every, order, axis=1)
    which = np.take_along_axis(np.concatenate([beam.nodes, nodes], axis=1), order, axis=1)
    more = np.full(costs.shape, is_open)
    opened = np.take_along_axis(np.concatenate([beam.is_open, more], axis=1), order, axis=1)
    is_node = np.isfinite(kept)
    return _Beam(kept, np.where(is_node, which, NO_ID), opened & is_node)


def _without_blocks(
    beam: _Beam, query: NDArray[np.int64], block: NDArray[np.int64], per_block: int, num_blocks: int
) -> _Beam:
    """A beam without the nodes of the blocks that were read: they come back with their true costs."""
    keys = np.arange(len(beam.nodes))[:, None] * num_blocks + beam.nodes // per_block
    gone = _is_in(keys.reshape(-1), query * num_blocks + block).reshape(keys.shape) & (beam.nodes != NO_ID)
    return _Beam(np.where(gone, np.inf, beam.costs), np.where(gone, NO_ID, beam.nodes), beam.is_open & ~gone)


def _merged(
    best: BestNodes,
    query: NDArray[np.int64],
    costs: NDArray[np.float64],
    nodes: NDArray[np.int32],
    positions: NDArray[np.int32],
) -> BestNodes:
    """The best with further nodes, `[m, per_block]`, of the queries `[m]`, ascending."""
    num, k = best.costs.shape
    rows, columns = _as_rows(query, num, costs.shape[1])
    more, which = _spread(rows, columns, num, costs, nodes)
    _, where = _spread(rows, columns, num, costs, positions)
    every = np.concatenate([best.costs, more], axis=1)
    order = np.argsort(every, axis=1, kind="stable")[:, :k]
    kept = np.take_along_axis(every, order, axis=1)
    parts = (
        np.where(np.isinf(kept), NO_ID, np.take_along_axis(np.concatenate(pair, axis=1), order, axis=1))
        for pair in ((best.nodes, which), (best.positions, where))
    )
    return BestNodes(kept, *parts)


def _as_rows(query: NDArray[np.int64], num: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and first column of each of several parts of `width`, when the parts of a query, ascending, form a row."""
    first = np.searchsorted(query, np.arange(num))
    return query, (np.arange(len(query)) - first[query]) * width


def _spread(
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    num: int,
    costs: NDArray[np.float64],
    values: NDArray[np.int32],
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Parts `[m, width]` as rows `[num, w]`, padded with infinity and `NO_ID`."""
    width = costs.shape[1]
    most = int(columns.max()) + width if columns.size else 0
    found, which = _nothing(num, most)
    at = columns[:, None] + np.arange(width)
    found[rows[:, None], at] = costs
    which[rows[:, None], at] = values
    return found, which


def _is_in(keys: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each key is among the sorted keys `known`."""
    if not known.size:
        return np.zeros(keys.shape, bool)
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return known[at] == keys
