"""Solve a problem without its memory limit by variable elimination (dynamic programming over dense tables).

In: a `Problem`, whose usages and limit are ignored. Out: an `Elimination`, an order in which the nodes are
minimised out one by one. Node costs are passed to `solve`, so one order serves many prices of memory.

Minimising out node v adds all tables that contain v and takes the minimum over v's strategies, which gives a table
over v's neighbours. A neighbour's side of that table has one entry per *class* of strategies with equal costs
(`compact_costs.py`), not per strategy. Steps that add the same tables in the same way, as in identical layers, are
computed once. (Dechter, "Bucket elimination", 1999.)

Tables that would grow too large are split (`elimination_order.py`). The result is then an assignment and a lower bound,
not the optimum. A node's own costs are divided among its buckets so that each strategy's cheapest completion costs
the same in every bucket, which tightens the bound (Ihler et al., "Join-graph based cost-shifting schemes", 2012).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solve.elimination_order import Bucket, Factor, Order
from autopar.solve.label_classes import Partitions
from autopar.solve.least_sum import least_sum
from autopar.solve.problem import Problem


def plan_exact(problem: Problem, *, max_entries: int, max_work: int) -> Elimination | None:
    """An order that finds the optimum; None if it exceeds the limits. The arguments are those of `plan_elimination`."""
    order = Order(problem, max_entries)
    while (node := order.cheapest()) is not None:
        order.remove(node)
        if order.work > max_work or len(order.steps[-1]) > 1:
            return None
    return _elimination(order)


def plan_elimination(problem: Problem, *, max_entries: int, max_work: int) -> Elimination:
    """An order of elimination with tables split where they exceed the limits.

    Args:
        max_entries: largest table that a step may leave.
        max_work: total number of entries added up, above which `max_entries` is reduced.
    """
    while True:
        order = Order(problem, max_entries)
        while (node := order.cheapest()) is not None and order.work <= max_work:
            order.remove(node)
        if node is None:
            return _elimination(order)
        max_entries = max_entries // 4


def _elimination(order: Order) -> Elimination:
    return Elimination(tuple(order.factors), tuple(order.steps), tuple(order.cores), order.partitions)


@dataclass(frozen=True, slots=True)
class _Forward:
    """The forward pass under some node costs: the table of each factor, an identity shared by equal tables, and the
    share of the node's costs in each bucket's output."""

    tables: list[np.ndarray]
    same: list[int]
    own: dict[int, np.ndarray]
    value: float


@dataclass(frozen=True, slots=True)
class Elimination:
    """An order in which to eliminate a problem's nodes, with the tables of its edges."""

    _factors: tuple[Factor, ...] = field(repr=False)
    _steps: tuple[tuple[Bucket, ...], ...] = field(repr=False)
    _cores: tuple[np.ndarray, ...] = field(repr=False)
    _partitions: Partitions = field(repr=False)
    #: The costs of the last forward pass, and the pass.
    _last: list[tuple[Sequence[np.ndarray], _Forward]] = field(default_factory=list, repr=False, compare=False)

    @property
    def exact(self) -> bool:
        """Whether `solve` finds the optimum rather than an assignment and a bound."""
        return all(len(buckets) == 1 for buckets in self._steps)

    def solve(self, node_costs: Sequence[np.ndarray]) -> tuple[tuple[int, ...], float]:
        """A cheap assignment and a lower bound: the optimum and its cost if `exact`.

        A bound of `inf` proves that no assignment has finite cost; the assignment is then meaningless.
        """
        forward = self._forward(node_costs)
        choices = [0] * len(node_costs)
        for buckets in reversed(self._steps):
            node = buckets[0].node
            costs = np.array(node_costs[node], float)
            for number in (number for bucket in buckets for number in bucket.inputs):
                costs += self._seen_from(node, number, forward.tables[number], choices)
            choices[node] = int(costs.argmin())
        return tuple(choices), forward.value

    def marginals(self, node_costs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For each strategy of each node, a lower bound of the cost of all assignments that take it.

        If `exact`, the bound is the cost of the cheapest such assignment. One backward pass computes it: each bucket
        receives from the bucket that used its table the cheapest completion by the nodes eliminated later.
        """
        forward = self._forward(node_costs)
        marginals = [np.full(len(c), -np.inf) for c in node_costs]
        unit = 1e-12 * (abs(forward.value) or 1.0)
        rest: dict[int, np.ndarray] = {}  # by factor: cheapest completion by the nodes outside it
        known: dict[tuple[object, ...], tuple[np.ndarray, dict[int, np.ndarray]]] = {}
        for bucket in (bucket for buckets in reversed(self._steps) for bucket in buckets):
            above = rest.pop(bucket.output) if bucket.scope else np.array(forward.value - forward.tables[bucket.output])
            own = forward.own[bucket.output]
            # Completions of identical layers differ by rounding only, from sums in another order.
            key = (forward.same[bucket.output], np.round(above / unit).tobytes())
            if key not in known:
                known[key] = self._descend(bucket, forward.tables, own, above)
            of_class, below = known[key]
            through = own + of_class[self._partitions.labels[bucket.parts[0]]]
            marginals[bucket.node] = np.maximum(marginals[bucket.node], through)
            for place, table in below.items():
                rest[bucket.inputs[place]] = table
        return marginals

    # -- forward -----------------------------------------------------------------------------

    def _forward(self, node_costs: Sequence[np.ndarray]) -> _Forward:
        """The forward pass, kept because `marginals` commonly follows `solve` with the same costs."""
        if self._last and self._last[0][0] is node_costs:
            return self._last[0][1]
        forward = self._ran_forward(node_costs)
        if isinstance(node_costs, tuple):  # a list may change
            self._last[:] = [(node_costs, forward)]
        return forward

    def _ran_forward(self, node_costs: Sequence[np.ndarray]) -> _Forward:
        forward = _Forward([*self._cores], [f.kind for f in self._factors[: len(self._cores)]], {}, 0.0)
        known: dict[tuple[object, ...], tuple[np.ndarray, int]] = {}
        value = 0.0
        for buckets in self._steps:
            costs = self._divided(buckets, forward, np.asarray(node_costs[buckets[0].node], float))
            for bucket, own in zip(buckets, costs, strict=True):
                inputs = tuple(forward.same[number] for number in bucket.inputs)
                key = (self._factors[bucket.output].kind, own.tobytes(), inputs)
                if key not in known:
                    known[key] = (self._minimise(bucket, forward.tables, own), -1 - len(known))
                table, identity = known[key]
                forward.tables.append(table)
                forward.same.append(identity)
                forward.own[bucket.output] = own
                value += 0.0 if bucket.scope else float(table)
        return _Forward(forward.tables, forward.same, forward.own, value)

    def _divided(self, buckets: Sequence[Bucket], forward: _Forward, costs: np.ndarray) -> list[np.ndarray]:
        """A node's costs divided among its buckets so that every strategy costs the same in each."""
        if len(buckets) == 1:
            return [costs]
        leasts = [self._least(bucket, forward.tables)[self._partitions.labels[bucket.parts[0]]] for bucket in buckets]
        mean = (costs + sum(leasts)) / len(buckets)
        return [
            np.where(np.isfinite(mean), mean - np.where(np.isfinite(least), least, 0.0), np.inf) for least in leasts
        ]

    def _least(self, bucket: Bucket, tables: Sequence[np.ndarray]) -> np.ndarray:
        """The minimum of the sum of a bucket's tables, per class of its node."""
        return least_sum(self._terms(bucket, tables), (0,)).reshape(-1)

    def _minimise(self, bucket: Bucket, tables: Sequence[np.ndarray], costs: np.ndarray) -> np.ndarray:
        own = self._own(bucket, costs).reshape(-1, *(1,) * len(bucket.scope))
        return least_sum([own, *self._terms(bucket, tables)], range(1, own.ndim))[0]

    def _own(self, bucket: Bucket, costs: np.ndarray) -> np.ndarray:
        """The cost of the cheapest strategy of each class of a bucket's node."""
        own = np.full(self._partitions.counts[bucket.parts[0]], np.inf)
        np.minimum.at(own, self._partitions.labels[bucket.parts[0]], costs)
        return own

    def _terms(self, bucket: Bucket, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The tables that a bucket adds up, aligned to its axes."""
        return [self._aligned(number, bucket, tables[number]) for number in bucket.inputs]

    def _aligned(self, number: int, bucket: Bucket, table: np.ndarray) -> np.ndarray:
        """A factor's table with the axes and classes of a bucket; missing axes have size 1."""
        factor = self._factors[number]
        order = sorted(range(len(factor.scope)), key=lambda i: bucket.axis(factor.scope[i]))
        table = table.transpose(order)
        shape = [1] * (1 + len(bucket.scope))
        for axis, i in enumerate(order):
            at = bucket.axis(factor.scope[i])
            if bucket.parts[at] != factor.parts[i]:
                table = table.take(self._coarser(bucket.parts[at], factor.parts[i]), axis=axis)
            shape[at] = table.shape[axis]
        return table.reshape(shape)

    def _coarser(self, fine: int, coarse: int) -> np.ndarray:
        """Map each class of partition `fine` to the class of partition `coarse` that contains it."""
        return self._partitions.labels[coarse][self._partitions.first[fine]]

    def _seen_from(self, node: int, number: int, table: np.ndarray, choices: Sequence[int]) -> np.ndarray:
        """A factor's cost per strategy of one node, given the choices of its other nodes."""
        factor, labels = self._factors[number], self._partitions.labels
        sides = zip(factor.scope, factor.parts, strict=True)
        return table[tuple(labels[p] if n == node else labels[p][choices[n]] for n, p in sides)]

    # -- backward ----------------------------------------------------------------------------

    def _descend(
        self, bucket: Bucket, tables: Sequence[np.ndarray], costs: np.ndarray, above: np.ndarray
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Propagate the cheapest completion above a bucket to its node and inputs.

        Returns:
            The minimum of each class of the node without the node's own cost, and by position the completions of the
            inputs that other buckets produced.
        """
        own = self._own(bucket, costs).reshape(-1, *(1,) * len(bucket.scope))
        terms = [above[None], *self._terms(bucket, tables)]
        places = [i for i, number in enumerate(bucket.inputs) if number >= len(self._cores)]
        axes = {i: frozenset(map(bucket.axis, self._factors[bucket.inputs[i]].scope)) for i in places}
        least = {kept: least_sum(terms, kept) for kept in set(axes.values()) or {frozenset([0])}}
        of_class = least_sum([min(least.values(), key=np.size)], {0}).reshape(-1)
        return of_class, {i: self._below(bucket, i, least[axes[i]] + own, tables[bucket.inputs[i]]) for i in places}

    def _below(self, bucket: Bucket, place: int, least: np.ndarray, table: np.ndarray) -> np.ndarray:
        """Reduce a minimum from a bucket's classes to those of an input, and subtract the input's table."""
        factor = self._factors[bucket.inputs[place]]
        axes = [bucket.axis(n) for n in factor.scope]
        least = least.squeeze(tuple(a for a in range(least.ndim) if a not in axes))
        least = least.transpose(np.argsort(np.argsort(axes)))
        for axis, (at, coarse) in enumerate(zip(axes, factor.parts, strict=True)):
            if bucket.parts[at] != coarse:
                labels = self._coarser(bucket.parts[at], coarse)
                order = np.argsort(labels, kind="stable")
                bounds = np.searchsorted(labels[order], np.arange(self._partitions.counts[coarse]))
                least = np.minimum.reduceat(least.take(order, axis=axis), bounds, axis=axis)
        return np.where(np.isfinite(table), least - np.where(np.isfinite(table), table, 0.0), np.inf)
