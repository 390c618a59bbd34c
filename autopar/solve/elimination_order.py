"""Choose the order in which to eliminate the nodes of a problem, greedily and without adding up costs.

In: a `Problem`. Out, step by step: the factors (tables over some nodes) that the elimination of a node adds up, and
the factors it leaves. The next node is always the one whose elimination adds up the smallest table. If even that is
too large, the factors that contain the node are split into buckets that are minimised separately. The node may then
take a different strategy in each bucket, so the result is a lower bound (Dechter and Rish, "Mini-buckets", 2003).

Factors of equal `kind` come from equal tables by equal steps.
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
_DEPTH = 16  # largest ratio of the table that a step adds up to the table it leaves


@dataclass(frozen=True, slots=True)
class Factor:
    """A table over the nodes of `scope`, with one axis entry per class of the partitions `parts`."""

    scope: tuple[int, ...]
    parts: tuple[int, ...]
    kind: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One step: add the factors `inputs` over (node, *scope) and minimise over the node into factor `output`."""

    node: int
    scope: tuple[int, ...]
    parts: tuple[int, ...]  # of (node, *scope)
    inputs: tuple[int, ...]
    output: int

    def axis(self, node: int) -> int:
        """The position of a node in (node, *scope)."""
        return 0 if node == self.node else 1 + self.scope.index(node)


class Order:
    """The graph of nodes and factors during elimination.

    Args:
        max_entries: largest table that a step may leave.
    """

    def __init__(self, problem: Problem, max_entries: int) -> None:
        self.partitions = Partitions()
        self.factors: list[Factor] = []
        self.cores: list[np.ndarray] = []  # tables of the first factors, which are the edges
        self.steps: list[tuple[Bucket, ...]] = []  # per node
        self.work = 0  # entries added up; equal steps count once
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
        # Sorted so that equal steps compare equal, however their nodes are numbered.
        inputs = sorted(self._of_node[node], key=lambda i: (self.factors[i].kind, self.factors[i].scope.index(node), i))
        groups = [inputs] if self._fits(node, inputs) else self._split(node, inputs)
        neighbours = tuple(self._neighbours[node])
        self._left.remove(node)
        for other in neighbours:
            self._of_node[other].difference_update(inputs)
            self._neighbours[other].discard(node)
        self.steps.append(tuple(self._add_bucket(node, group, len(groups)) for group in groups))
        if len(groups) > 1:  # neighbours in different buckets do not become neighbours
            for other in neighbours:
                scopes = (self.factors[i].scope for i in self._of_node[other])
                self._neighbours[other] = {n for scope in scopes for n in scope} - {other}
        for other in neighbours:
            self._rate(other)

    def _fits(self, node: int, inputs: Iterable[int]) -> bool:
        """Whether the sum of these factors is small enough."""
        parts_of = self._partitions_of(node, inputs)
        own = self.partitions.counts[parts_of[node]]
        total = math.prod(self.partitions.counts[p] for p in parts_of.values())
        return total <= self._max_entries * min(own, _DEPTH)

    def _split(self, node: int, inputs: Sequence[int]) -> list[list[int]]:
        """Split factors into few buckets that fit, by first-fit decreasing."""

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
        parts_of = self._partitions_of(node, inputs)
        scope = tuple(dict.fromkeys(n for i in inputs for n in self.factors[i].scope if n != node))
        parts = (parts_of[node], *(parts_of[n] for n in scope))
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
            # Reorder the core's classes as the partitions number them.
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
            parts_of = self._partitions_of(node, self._of_node[node])
            size = float(math.prod(self.partitions.counts[p] for p in parts_of.values()))
        else:  # too large to rate: the node comes last and is split
            size = 1e200 * neighbours
        if self._current.get(node) != size:
            self._current[node] = size
            heapq.heappush(self._heap, (size, node))

    def _partitions_of(self, node: int, inputs: Iterable[int]) -> dict[int, int]:
        """The partition of a node's strategies, and of each neighbour's, that all factors of the node distinguish."""
        parts_of = {node: self._whole[node]}
        for number in inputs:
            factor = self.factors[number]
            for other, part in zip(factor.scope, factor.parts, strict=True):
                parts_of[other] = self.partitions.refine(parts_of[other], part) if other in parts_of else part
        return parts_of
