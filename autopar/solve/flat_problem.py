"""Flatten a problem into arrays for numba's compiled loops.

In: a `Problem`, preferably reduced. Out: a `Pairwise` of arrays: the concatenated strategies of all nodes, the tables
of all edges (equal tables once), the edges of each node, and its memory usages.

Only instants at which memory can exceed the limit are kept, numbered in order; a usage is live over a range of them.
`base` contains the memory of nodes with a single strategy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autopar.solve.compact_costs import Table
from autopar.solve.live_instants import instants_of
from autopar.solve.problem import Problem

NODE = np.dtype([("start", "i8"), ("edges", "i8"), ("lower", "i8"), ("pieces", "i8")])
EDGE = np.dtype(
    [
        *((name, "i8") for name in ("tail", "head", "tail_labels", "head_labels", "core", "core_t")),
        *((name, "i8") for name in ("num_rows", "num_cols", "to_tail", "to_head")),
    ]
)
PIECE = np.dtype([("first", "i8"), ("last", "i8"), ("at", "i8")])


Records = Any  #: an array of one of these dtypes; numba exposes the fields of its entries as attributes


class Pairwise(NamedTuple):
    """Arrays of a problem, with tail < head for every edge. (A named tuple, because numba accepts no dataclass.)

    Args:
        nodes: one `NODE` per node and one at the end: offsets of its strategies in `costs`, its edges in `edges_of`
            and its usages in `pieces`; the number of its edges to lower nodes, which come first.
        edges: one `EDGE` per edge: its nodes; offsets of their class labels in `labels`, of its table in `entries`
            (tail classes by head classes, and transposed), and of its messages to either node.
        edges_of: edges by node.
        pieces: one `PIECE` per usage of a node with several strategies: it is live over the instants at positions
            [first, last) and takes `amounts[at + strategy]` bytes.
        costs: cost of every strategy.
        labels, entries, amounts: data that the offsets above point into, equal arrays stored once.
        base: bytes at each instant that no choice changes.
        num_messages: number of entries of all messages.
        limit: memory limit at every instant, in bytes; `inf` for no limit.
    """

    nodes: Records
    edges: Records
    edges_of: np.ndarray
    pieces: Records
    costs: np.ndarray
    labels: np.ndarray
    entries: np.ndarray
    amounts: np.ndarray
    base: np.ndarray
    num_messages: int
    limit: float


class _Store:
    """Concatenated arrays, equal arrays stored once."""

    def __init__(self, dtype: type) -> None:
        self.parts: list[np.ndarray] = []
        self._dtype, self._size = dtype, 0
        self._known: dict[bytes, int] = {}

    def put(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array, self._dtype).ravel()
        key = array.tobytes()
        if key not in self._known:
            self._known[key] = self._size
            self.parts.append(array)
            self._size += len(array)
        return self._known[key]

    def all(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, self._dtype), *self.parts])


def pairwise(problem: Problem) -> Pairwise:
    """Flatten a problem without parallel edges; an edge's source may be above or below its target."""
    num_nodes = len(problem.node_costs)
    sizes = [len(c) for c in problem.node_costs]
    labels, entries, amounts = _Store(np.int64), _Store(np.float64), _Store(np.float64)
    edges = _edges(problem, labels, entries)
    # Seen from its head, an edge leads to a lower node: such edges come first.
    ends = np.concatenate((edges["head"], edges["tail"]))
    order = np.lexsort((np.concatenate((edges["tail"], edges["head"])), ends))
    pieces, base = _pieces(problem, amounts)
    nodes = np.zeros(num_nodes + 1, NODE)
    nodes["start"] = np.concatenate(([0], np.cumsum(sizes)))
    nodes["edges"] = np.searchsorted(ends[order], np.arange(num_nodes + 1))
    nodes["lower"][:-1] = np.bincount(edges["head"], minlength=num_nodes)
    nodes["pieces"] = np.searchsorted([node for node, *_ in pieces], np.arange(num_nodes + 1))
    return Pairwise(
        nodes=nodes,
        edges=edges,
        edges_of=np.concatenate((np.arange(len(edges)),) * 2)[order],
        pieces=np.array([piece for _, *piece in map(tuple, pieces)], np.int64).reshape(-1, 3).view(PIECE).reshape(-1),
        costs=np.concatenate([np.zeros(0), *problem.node_costs]),
        labels=labels.all(),
        entries=entries.all(),
        amounts=amounts.all(),
        base=base,
        num_messages=int((edges["num_rows"] + edges["num_cols"]).sum()),
        limit=np.inf if problem.memory_limit is None else float(problem.memory_limit),
    )


def _edges(problem: Problem, labels: _Store, entries: _Store) -> np.ndarray:
    known: dict[tuple[int, bool], tuple[int, ...]] = {}
    rows: list[tuple[int, ...]] = []
    num_messages = 0
    for edge in sorted(problem.edges, key=lambda e: (min(e.source, e.target), max(e.source, e.target))):
        flipped = edge.source > edge.target
        key = (id(edge.costs), flipped)
        if key not in known:
            table = Table.of(edge.costs.T if flipped else edge.costs)
            at = (labels.put(table.rows), labels.put(table.cols), entries.put(table.core), entries.put(table.core.T))
            known[key] = (*at, *table.core.shape)
        ends = (edge.target, edge.source) if flipped else (edge.source, edge.target)
        num_rows, num_cols = known[key][-2:]
        rows.append((*ends, *known[key], num_messages, num_messages + num_rows))
        num_messages += num_rows + num_cols
    return np.array(rows, EDGE)


def _pieces(problem: Problem, amounts: _Store) -> tuple[list[tuple[int, int, int, int]], np.ndarray]:
    """The usages of nodes with several strategies, each (node, first, last, at), and the bytes of the other nodes."""
    if problem.memory_limit is None:
        return [], np.zeros(0)
    instants = instants_of(problem)
    first = np.searchsorted(instants.times, [u.start for u in instants.usages])
    last = np.searchsorted(instants.times, [u.end for u in instants.usages])
    change = np.zeros(len(instants.times) + 1)
    pieces: list[tuple[int, int, int, int]] = []
    for usage, start, end in zip(instants.usages, first.tolist(), last.tolist(), strict=True):
        if start < end and len(usage.amounts) == 1:
            change[start] += usage.amounts[0]
            change[end] -= usage.amounts[0]
        elif start < end:
            pieces.append((usage.node, start, end, amounts.put(usage.amounts)))
    return sorted(pieces), np.cumsum(change)[:-1]
