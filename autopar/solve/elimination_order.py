"""In which order to eliminate the nodes of a problem, found before any cost is added up.

In: a `Problem`. Out, step by step: which factors (tables over some nodes) a node's elimination adds up, and
the factors it leaves. The next node is always the one whose elimination adds up the smallest table. Where
even that is too large, the factors that hold the node are split into buckets, each minimised by itself: the
node may then take a different strategy in each, which makes the result a lower bound (Dechter and Rish,
"Mini-buckets", 2003).

A factor's `kind` says how it came about: factors of equal kind come from equal tables by equal steps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.compact_costs import Table
from autopar.solve.label_classes import Partitions
from autopar.solve.problem import Edge, Problem

_MANY_NEIGHBOURS = 24  # a table over more nodes is never small
_DEPTH = 16  # how many times as large as the table it leaves the table may be that a step adds up


@dataclass(frozen=True, slots=True)
class Factor:
    """A table over the nodes of `scope`, their strategies classed by `parts`."""

    scope: tuple[int, ...]
    parts: tuple[int, ...]
    kind: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Add factors `inputs` over (node, *scope), keep the minimum over the node as factor `output`."""

    node: int
    scope: tuple[int, ...]
    parts: tuple[int, ...]  # of (node, *scope)
    inputs: tuple[int, ...]
    output: int

    def axis(self, node: int) -> int:
        """Where a node stands in (node, *scope)."""
        return 0 if node == self.node else 1 + self.scope.index(node)


class Order:
    """The graph of nodes and factors while nodes are taken out of it.

    Args:
        max_entries: largest table that a step may leave.
    """

    def __init__(self, problem: Problem, max_entries: int) -> None:
        self.partitions = Partitions()
        self.factors: list[Factor] = []
        self.cores: list[np.ndarray] = []  # tables of the first factors, the edges
        self.steps: list[tuple[Bucket, ...]] = []  # per node
        self.work = 0  # entries added up, the same steps counted once
        self._max_entries = max_entries
        self._left = set(range(len(problem.node_costs)))
        self._of_node: list[set[int]] = [set() for _ in problem.node_costs]
        self._neighbours: list[set[int]] = [set() for _ in problem.node_costs]
        self._whole = [self.partitions.number([0] * len(c)) for c in problem.node_costs]
        self._kinds: dict[Hashable, int] = {}
        known: dict[int, tuple[int, int, np.ndarray, int]] = {}
        for edge in problem.edges:
            self._add_edge(edge, known)
        self._heap: list[tuple[float, int]] = []
        self._current: dict[int, float] = {}
        for node in sorted(self._left):
            self._rate(node)

    def cheapest(self) -> int | None:
        """The node whose elimination adds up the smallest table; None if none is left."""
        while self._heap:
            size, node = heapq.heappop(self._heap)
            if node in self._left and self._current[node] == size:
                return node
        return None

    def remove(self, node: int) -> None:
        """Minimise a node out."""
        # Sorted so that the same steps look the same, however their nodes are numbered.
        inputs = sorted(self._of_node[node], key=lambda i: (self.factors[i].kind, self.factors[i].scope.index(node), i))
        groups = [inputs] if self._fits(node, inputs) else self._split(node, inputs)
        neighbours = tuple(self._neighbours[node])
        self._left.remove(node)
        for other in neighbours:
            self._of_node[other].difference_update(inputs)
            self._neighbours[other].discard(node)
        self.steps.append(tuple(self._add_bucket(node, group, len(groups)) for group in groups))
        if len(groups) > 1:  # neighbours in different buckets are none of each other's
            for other in neighbours:
                scopes = (self.factors[i].scope for i in self._of_node[other])
                self._neighbours[other] = {n for scope in scopes for n in scope} - {other}
        for other in neighbours:
            self._rate(other)

    def _fits(self, node: int, inputs: Iterable[int]) -> bool:
        """Whether the table that these factors make is affordable."""
        joined = self._joined(node, inputs)
        own = self.partitions.counts[joined[node]]
        total = math.prod(self.partitions.counts[p] for p in joined.values())
        return total <= self._max_entries * min(own, _DEPTH)

    def _split(self, node: int, inputs: Sequence[int]) -> list[list[int]]:
        """Few buckets that are each affordable: the largest factors first, each into the first that takes it."""

        def size(number: int) -> int:
            return math.prod(self.partitions.counts[p] for p in self.factors[number].parts)

        groups: list[list[int]] = []
        for number in sorted(inputs, key=size, reverse=True):
            for group in groups:
                if self._fits(node, [*group, number]):
                    group.append(number)
                    break
            else:
                groups.append([number])
        return [[i for i in inputs if i in group] for group in groups]

    def _add_bucket(self, node: int, inputs: Sequence[int], num_buckets: int) -> Bucket:
        joined = self._joined(node, inputs)
        scope = tuple(dict.fromkeys(n for i in inputs for n in self.factors[i].scope if n != node))
        parts = (joined[node], *(joined[n] for n in scope))
        bucket = Bucket(node, scope, parts, tuple(inputs), len(self.factors))
        arrangement = tuple((self.factors[i].kind, *map(bucket.axis, self.factors[i].scope)) for i in inputs)
        known = len(self._kinds)
        kind = self._kind((parts, arrangement, num_buckets))
        if kind == known:
            self.work += math.prod(self.partitions.counts[p] for p in parts)
        self._add(Factor(scope, parts[1:], kind))
        return bucket

    def _kind(self, key: Hashable) -> int:
        return self._kinds.setdefault(key, len(self._kinds))

    def _add_edge(self, edge: Edge, known: dict[int, tuple[int, int, np.ndarray, int]]) -> None:
        if id(edge.costs) not in known:
            table = Table.of(edge.costs)
            rows = self.partitions.number(table.rows.tolist())
            cols = self.partitions.number(table.cols.tolist())
            # The core with its classes in the order in which the partitions number them.
            first = self.partitions.first
            core = table.core[table.rows[first[rows]][:, None], table.cols[first[cols]]]
            known[id(edge.costs)] = (rows, cols, core, self._kind((rows, cols, core.tobytes())))
        rows, cols, core, kind = known[id(edge.costs)]
        self.cores.append(core)
        self._add(Factor((edge.source, edge.target), (rows, cols), kind))

    def _add(self, factor: Factor) -> None:
        for node in factor.scope:
            self._of_node[node].add(len(self.factors))
            self._neighbours[node].update(factor.scope)
            self._neighbours[node].discard(node)
        self.factors.append(factor)

    def _rate(self, node: int) -> None:
        neighbours = len(self._neighbours[node])
        if neighbours <= _MANY_NEIGHBOURS:
            joined = self._joined(node, self._of_node[node])
            size = float(math.prod(self.partitions.counts[p] for p in joined.values()))
        else:  # not worth finding out: it comes last, and is split
            size = 1e200 * neighbours
        if self._current.get(node) != size:
            self._current[node] = size
            heapq.heappush(self._heap, (size, node))

    def _joined(self, node: int, inputs: Iterable[int]) -> dict[int, int]:
        """How factors that hold a node class its strategies and its neighbours'."""
        joined = {node: self._whole[node]}
        for number in inputs:
            factor = self.factors[number]
            for other, part in zip(factor.scope, factor.parts, strict=True):
                joined[other] = self.partitions.join(joined[other], part) if other in joined else part
        return joined
