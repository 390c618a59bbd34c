"""Reduce a problem to a smaller one with the same optimum (presolve).

In: a `Problem`. Out: `Reduced`. Its problem has the same optimal cost; its node 0, the ground, has one strategy with
the cost and usages of everything already decided. `expand` maps an assignment of it to an assignment of the original
problem with the same cost and no higher peak.

The rules are applied node by node until none changes anything:

- `delete_forbidden`: delete a strategy that costs `inf` or has no finite partner on some edge.
- `follow`: if each strategy of v leaves one finite strategy of u, merge u into v.
- `dominate`: delete strategy s if another strategy s' never costs more, whatever the neighbours choose (the sum
  over the edges of the worst case), and never takes more memory.
- `eliminate`: minimise out a node with at most two neighbours and no memory; two neighbours get an edge.

When a table is stored, parallel edges are added up, and each edge's minimum cost moves to its nodes. The result of a
rule depends only on the node's costs, usages and tables, so it is computed once for nodes where these are equal
(`hash_consing.py`).
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solve.compact_costs import Table
from autopar.solve.hash_consing import SharedTables
from autopar.solve.live_instants import instants_of
from autopar.solve.problem import Edge, Problem, Usage

_FITS_CACHE = 1 << 14  # entries
_LISTEN = 16  # nodes between two checks of the deadline


class Contradiction(Exception):
    """A node has no strategy left: the problem has no assignment of finite cost."""


class Overdue(Exception):
    """Time ran out before the problem was reduced."""


@dataclass(frozen=True, slots=True)
class _Decided:
    """A removed node: its strategy is `picks`, indexed by the strategies of the nodes of `scope`."""

    node: int
    scope: tuple[int, ...]
    labels: tuple[np.ndarray, ...]
    picks: np.ndarray


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduced problem and the mapping back to the original strategies.

    Args:
        problem: reduced problem; node 0 is the ground, the others are `kept`.
        kept: original number of each node but the ground.
        labels: original strategies of each kept node, in order.
        counts: number of changes by each rule, by its name.
    """

    problem: Problem
    kept: tuple[int, ...]
    labels: tuple[np.ndarray, ...]
    counts: dict[str, int]
    _num_nodes: int = field(repr=False)
    _decided: tuple[_Decided, ...] = field(repr=False)

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The assignment of the original problem for an assignment of `problem` (ground included)."""
        full = np.zeros(self._num_nodes, int)
        for node, labels, choice in zip(self.kept, self.labels, choices[1:], strict=True):
            full[node] = labels[choice]
        for step in reversed(self._decided):
            at = tuple(int(np.searchsorted(ls, full[n])) for n, ls in zip(step.scope, step.labels, strict=True))
            full[step.node] = step.picks[at]
        return tuple(full.tolist())


class Network:
    """The problem during reduction: costs, tables and usages over the remaining strategies."""

    def __init__(self, problem: Problem) -> None:
        self.limited = problem.memory_limit is not None and len(instants_of(problem).times) > 0
        self.costs = [np.array(c, float) for c in problem.node_costs]
        self.labels = [np.arange(len(c)) for c in self.costs]
        self.tables: list[dict[int, Table]] = [{} for _ in self.costs]
        self.usages: list[dict[tuple[int, int], np.ndarray]] = [{} for _ in self.costs]
        self.ground_cost = 0.0
        self.ground: dict[tuple[int, int], float] = {}
        self.decided: list[_Decided] = []
        self.alive = [True] * len(self.costs)
        self.dirty = deque(range(len(self.costs)))
        self._queued = [True] * len(self.costs)
        self._finite: list[tuple[np.ndarray, bool] | None] = [None] * len(self.costs)
        self.counts: Counter[str] = Counter()
        self.shared = SharedTables()
        for e in problem.edges:
            self.connect(e.source, e.target, self.shared.of(e.costs))
        for u in problem.usages if self.limited else ():
            if u.start < u.end:
                self.hold(u.node, (u.start, u.end), np.asarray(u.amounts, float))

    def touch(self, node: int) -> None:
        """Queue a node for the rules."""
        if not self._queued[node]:
            self._queued[node] = True
            self.dirty.append(node)

    def is_finite(self, node: int) -> bool:
        """Whether all costs of a node are finite."""
        known, costs = self._finite[node], self.costs[node]
        if known is None or known[0] is not costs:
            known = self._finite[node] = (costs, bool(np.isfinite(costs).all()))
        return known[1]

    def next_dirty(self) -> int | None:
        """The next queued node; None if the queue is empty."""
        while self.dirty:
            node = self.dirty.popleft()
            self._queued[node] = False
            if self.alive[node]:
                return node
        return None

    def connect(self, u: int, v: int, table: Table) -> None:
        """Add a table to the edge between u and v."""
        if v in self.tables[u]:
            table = self.shared.plus(self.tables[u][v], table)
        normal, of_u, of_v = self.shared.normalised(table)
        if of_u is not None:
            self.costs[u] = self.costs[u] + of_u
        if of_v is not None:
            self.costs[v] = self.costs[v] + of_v
        if normal is None:
            self.disconnect(u, v)
        else:
            self.tables[u][v], self.tables[v][u] = normal, self.shared.transposed(normal)
        self.touch(u)
        self.touch(v)

    def disconnect(self, u: int, v: int) -> None:
        self.tables[u].pop(v, None)
        self.tables[v].pop(u, None)

    def hold(self, node: int, interval: tuple[int, int], amounts: np.ndarray) -> None:
        """Add memory to a node; the minimum over its strategies goes to the ground."""
        usages = self.usages[node]
        amounts = usages.pop(interval, 0.0) + amounts
        least = float(amounts.min(initial=np.inf))
        if np.isfinite(least) and least != 0.0:
            self.ground[interval] = self.ground.get(interval, 0.0) + least
            amounts = amounts - least
        if amounts.any():
            usages[interval] = amounts

    def weight(self, node: int) -> int:
        """The work of merging a node into another."""
        return len(self.tables[node]) + len(self.usages[node])

    def restrict(self, node: int, keep: np.ndarray) -> None:
        """Delete all strategies of a node but those at positions `keep`."""
        if not len(keep):
            raise Contradiction
        self.costs[node] = self.costs[node][keep]
        self.labels[node] = self.labels[node][keep]
        usages, self.usages[node] = self.usages[node], {}
        for interval, amounts in usages.items():
            self.hold(node, interval, amounts[keep])
        for other, table in tuple(self.tables[node].items()):
            self.disconnect(node, other)
            self.connect(node, other, self.shared.take(table, keep))

    def remove(self, node: int, scope: tuple[int, ...], picks: np.ndarray) -> None:
        """Remove a node whose strategy the nodes of `scope` decide; `picks` are positions of its strategies."""
        labels = tuple(self.labels[n] for n in scope)
        self.decided.append(_Decided(node, scope, labels, self.labels[node][picks]))
        for other in tuple(self.tables[node]):
            self.disconnect(node, other)
            self.touch(other)
        self.alive[node] = False


Rule = Callable[[Network, int], bool]  # `Reduced.counts` uses the function's name


def delete_forbidden(net: Network, node: int) -> bool:
    """Delete strategies of infinite cost, which includes those without a finite partner on some edge."""
    if net.is_finite(node):
        return False
    net.restrict(node, np.flatnonzero(np.isfinite(net.costs[node])))
    return True


def follow(net: Network, node: int) -> bool:
    """Merge a node into a neighbour whose every strategy leaves the node one finite strategy."""
    if not net.is_finite(node):
        return False
    for leader, table in net.tables[node].items():
        led, leads = net.shared.per_table("follow", _follows, table)
        if led:
            if leads and net.weight(node) > net.weight(leader):
                _merge(net, leader, node, net.shared.transposed(table))
            else:
                _merge(net, node, leader, table)
            return True
    return False


def _follows(table: Table) -> tuple[bool, bool]:
    """Whether each strategy of the second node leaves one finite strategy of the first, and vice versa."""
    finite = np.isfinite(table.core)
    if finite.all():
        return len(table.rows) == 1, len(table.cols) == 1
    led = (np.bincount(table.rows) @ finite == 1).all()
    return bool(led), bool((finite @ np.bincount(table.cols) == 1).all())


def _merge(net: Network, node: int, leader: int, table: Table) -> None:
    """Merge a node into the leader it follows; `table` is their edge, with the node's strategies as rows."""
    # The finite class has a single strategy.
    one_of_class = np.zeros(len(table.core), int)
    one_of_class[table.rows] = np.arange(len(table.rows))
    picks = one_of_class[np.isfinite(table.core).argmax(axis=0)][table.cols]
    net.costs[leader] = net.costs[leader] + net.costs[node][picks] + table.core[table.rows[picks], table.cols]
    others = {n: t for n, t in net.tables[node].items() if n != leader}
    net.remove(node, (leader,), picks)
    for other, others_table in others.items():
        net.connect(leader, other, net.shared.take(others_table, picks))
    for interval, amounts in net.usages[node].items():
        net.hold(leader, interval, amounts[picks])
    net.touch(leader)


def dominate(net: Network, node: int) -> bool:
    """Delete strategies that another strategy dominates, whatever the neighbours choose."""
    costs = net.costs[node]
    if len(costs) < 2 or not net.is_finite(node):
        return False
    tables, amounts = tuple(net.tables[node].values()), tuple(net.usages[node].values())
    keep = net.shared.once("dominate", tables, [costs, *amounts], lambda: _undominated(net, costs, tables, amounts))
    if len(keep) == len(costs):
        return False
    net.restrict(node, keep)
    return True


def _undominated(net: Network, costs: np.ndarray, tables: Sequence[Table], usages: Sequence[np.ndarray]) -> np.ndarray:
    """The strategies that no other strategy dominates."""
    excess = costs[None, :] - costs[:, None]  # [s, s']: the most by which s' can cost more than s
    for amounts in usages:
        excess[amounts[None, :] > amounts[:, None]] = np.inf
    for table in tables:
        if np.count_nonzero(excess <= 0.0) <= len(costs):  # each strategy dominates itself only
            return np.arange(len(costs))
        worst = net.shared.per_table("worst", _worst, table)
        excess = excess + worst[table.rows[:, None], table.rows]
    dominated = excess <= 0.0
    dominated &= ~dominated.T | np.tri(len(costs), k=-1, dtype=bool)  # of two equal strategies the first stays
    return np.flatnonzero(~dominated.any(axis=1))


def _worst(table: Table) -> np.ndarray:
    """[r, r']: the most by which row r' of a normalised table's core can exceed row r."""
    core = table.core
    rows, columns = core.shape
    with np.errstate(invalid="ignore"):  # fmax ignores the nan of inf - inf
        if rows * rows * columns <= _FITS_CACHE:
            return np.fmax.reduce(core[None, :, :] - core[:, None, :], axis=2)
        worst = np.full((rows, rows), -np.inf)
        difference = np.empty((rows, rows))
        for column in np.ascontiguousarray(core.T):
            np.subtract(column[None, :], column[:, None], out=difference)
            np.fmax(worst, difference, out=worst)
        return worst


def eliminate(net: Network, node: int) -> bool:
    """Minimise out a node with at most two neighbours and no memory."""
    scope = tuple(net.tables[node])
    if len(scope) > 2 or net.usages[node] or not net.is_finite(node):
        return False
    tables = [net.tables[n][node] for n in scope]  # [classes of n, classes of node]
    costs = net.costs[node]
    if not scope:
        net.ground_cost += float(costs.min())
        net.remove(node, (), np.asarray(costs.argmin()))
        return True
    if len(scope) == 1:
        picks, least = net.shared.once("leaf", tables, [costs], lambda: _minimise_leaf(tables[0], costs))
        net.costs[scope[0]] = net.costs[scope[0]] + least
        net.remove(node, scope, picks)
        return True
    picks, left = net.shared.once("between", tables, [costs], lambda: _minimise_between(tables[0], tables[1], costs))
    net.remove(node, scope, picks)
    net.connect(*scope, net.shared.one(left))
    return True


def _minimise_leaf(table: Table, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The best strategy of a node with one neighbour, and its cost, per strategy of the neighbour."""
    total = table.core[:, table.cols] + costs
    return total.argmin(axis=1)[table.rows], total.min(axis=1)[table.rows]


def _minimise_between(first: Table, second: Table, costs: np.ndarray) -> tuple[np.ndarray, Table]:
    """The best strategy of a node with two neighbours, per pair of their strategies, and the edge it leaves."""
    total = (first.core[:, first.cols] + costs)[:, None, :] + second.core[:, second.cols][None, :, :]
    picks = total.argmin(axis=2)
    left = Table(first.rows, second.rows, total.min(axis=2)).compact()
    return picks[first.rows[:, None], second.rows], left


RULES: tuple[Rule, ...] = (delete_forbidden, follow, eliminate, dominate)


def reduce(problem: Problem, *, rules: Sequence[Rule] = RULES, deadline: float = math.inf) -> Reduced | None:
    """Shrink a problem without changing its optimum.

    Args:
        rules: rules to apply.
        deadline: end of the reduction, by `time.monotonic`.

    Returns:
        The reduced problem; None if no assignment has finite cost.

    Raises:
        Overdue: if the deadline passes first.
    """
    if not all(len(costs) for costs in problem.node_costs):
        return None
    net = Network(problem)
    try:
        _fixpoint(net, rules, deadline)
    except Contradiction:
        return None
    return _reduced(net, problem)


def _fixpoint(net: Network, rules: Sequence[Rule], deadline: float) -> None:
    looked = 0
    while (node := net.next_dirty()) is not None:
        looked += 1
        if looked % _LISTEN == 0 and time.monotonic() >= deadline:
            raise Overdue
        for rule in rules:
            if rule(net, node):
                net.counts[rule.__name__] += 1
                net.touch(node)
                break


def _reduced(net: Network, problem: Problem) -> Reduced:
    kept = tuple(n for n, alive in enumerate(net.alive) if alive)
    number = {n: i + 1 for i, n in enumerate(kept)}
    edges = [
        Edge(number[u], number[v], net.shared.dense(table)) for u in kept for v, table in net.tables[u].items() if u < v
    ]
    usages = [Usage(0, *interval, np.array([amount])) for interval, amount in net.ground.items()]
    usages += [Usage(number[n], *interval, a) for n in kept for interval, a in net.usages[n].items()]
    costs = (np.array([net.ground_cost]), *(net.costs[n] for n in kept))
    limit = problem.memory_limit if net.limited else None
    smaller = Problem(costs, tuple(edges), tuple(usages), limit)
    return Reduced(
        smaller, kept, tuple(net.labels[n] for n in kept), dict(net.counts), len(net.costs), tuple(net.decided)
    )
