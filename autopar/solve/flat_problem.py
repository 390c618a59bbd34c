"""A problem laid out flat, for compiled loops.

In: a `Problem`, best reduced. Out: `Pairwise`, arrays only: the strategies of all nodes one after the other, the
tables of all edges (equal ones once), what each node is tied to, and what it holds over which instants.

Only instants at which memory can run out are counted, and numbered in order; a usage lives over a range of them.
What nodes without a choice hold is part of `base`.
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


Records = Any  #: an array of one of these: numba has fields of its entries as attributes


class Pairwise(NamedTuple):
    """Arrays of a problem; tail < head for every edge. (A tuple of few arrays, for that is what numba takes.)

    Args:
        nodes: one `NODE` each, and one more for the ends: where its strategies start in `costs`, its edges in
            `edges_of` and its usages in `pieces`; how many of its edges, the first ones, lead to lower nodes.
        edges: one `EDGE` each. Its nodes; where the classes of their strategies stand in `labels`, its table in
            `entries` (classes of the tail by classes of the head, and transposed), its messages to either.
        edges_of: edges by node.
        pieces: one `PIECE` per usage of a node with a choice: it lives over the instants at positions
            [first, last) and holds `amounts[at + strategy]` bytes.
        costs: of every strategy.
        labels, entries, amounts: see above; equal ones stand there once.
        base: bytes held at each instant in any case.
        num_messages: entries of all messages.
        limit: bytes, at every instant; `inf` if there is none.
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
    """Arrays one after the other, equal ones once."""

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
    """Lay a problem out flat. Its edges may stand in any direction; there are no parallel ones."""
    num_nodes = len(problem.node_costs)
    sizes = [len(c) for c in problem.node_costs]
    labels, entries, amounts = _Store(np.int64), _Store(np.float64), _Store(np.float64)
    edges = _edges(problem, labels, entries)
    # At its head an edge leads to a lower node; those come first.
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
    """The usages of nodes with a choice, each (node, first, last, at), and what the others hold."""
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
