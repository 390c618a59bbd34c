"""Exact reductions: a smaller problem with the same optimum, and the way back.

In: a `Problem`. Out: `Reduced`, whose problem has the same optimal cost (node 0 of it is the ground: one
strategy, whose cost and usages are all that is decided already) and whose `expand` turns an assignment of
it into one of the original with the same cost and no higher peak.

The rules, applied node by node until none of them does anything:

- `delete_forbidden`: a strategy that costs `inf`, or has no finite partner on some edge, goes.
- `follow`: where each strategy of v leaves one finite strategy of u, u follows v and merges into it.
- `dominate`: s goes where another strategy s' is never dearer, whatever the neighbours do (sum over the
  edges of the worst case), and never holds more memory.
- `eliminate`: a node with at most two neighbours and no memory is minimised out; two neighbours get an edge.

Parallel edges are added, and what an edge costs in any case is moved to its nodes, when a table is stored. What a
rule finds for a node follows from the node's costs, usages and tables, so for nodes that have equal ones it is found
once (`solve/hash_consing.py`).
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
_LISTEN = 16  # nodes between two looks at the clock


class Contradiction(Exception):
    """A node has no strategy left: the problem has no assignment of finite cost."""


class Overdue(Exception):
    """Time ran out before the problem was reduced."""


@dataclass(frozen=True, slots=True)
class _Decided:
    """A node whose strategy follows from others': `picks[position of each in labels]`."""

    node: int
    scope: tuple[int, ...]
    labels: tuple[np.ndarray, ...]
    picks: np.ndarray


@dataclass(frozen=True, slots=True)
class Reduced:
    """A reduced problem and the way back to the original's strategies.

    Args:
        problem: node 0 is the ground; the others are `kept`.
        kept: original number of each node but the ground.
        labels: original strategies of each kept node, in order.
        counts: how often each rule did something, by its name.
    """

    problem: Problem
    kept: tuple[int, ...]
    labels: tuple[np.ndarray, ...]
    counts: dict[str, int]
    _num_nodes: int = field(repr=False)
    _decided: tuple[_Decided, ...] = field(repr=False)

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Strategies of the original's nodes, from those of `problem`'s (the ground's included)."""
        full = np.zeros(self._num_nodes, int)
        for node, labels, choice in zip(self.kept, self.labels, choices[1:], strict=True):
            full[node] = labels[choice]
        for step in reversed(self._decided):
            at = tuple(int(np.searchsorted(ls, full[n])) for n, ls in zip(step.scope, step.labels, strict=True))
            full[step.node] = step.picks[at]
        return tuple(full.tolist())


class Network:
    """The problem while it shrinks: costs, tables and usages over the strategies still alive."""

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
        self.counts: Counter[str] = Counter()
        self.shared = SharedTables()
        for e in problem.edges:
            self.connect(e.source, e.target, self.shared.of(e.costs))
        for u in problem.usages if self.limited else ():
            if u.start < u.end:
                self.hold(u.node, (u.start, u.end), np.asarray(u.amounts, float))

    def touch(self, node: int) -> None:
        """Have the rules look at a node again."""
        if not self._queued[node]:
            self._queued[node] = True
            self.dirty.append(node)

    def next_dirty(self) -> int | None:
        """The next node to look at."""
        while self.dirty:
            node = self.dirty.popleft()
            self._queued[node] = False
            if self.alive[node]:
                return node
        return None

    def connect(self, u: int, v: int, table: Table) -> None:
        """Add a table to the edge of u and v."""
        if v in self.tables[u]:
            table = self.shared.plus(self.tables[u][v], table)
        normal, of_u, of_v = self.shared.normalised(table)
        self.costs[u] = self.costs[u] + of_u
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
        """Add to what a node holds; what it holds in any case goes to the ground."""
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
        """Take out a node that is decided by those of `scope`; `picks` are positions of its strategies."""
        labels = tuple(self.labels[n] for n in scope)
        self.decided.append(_Decided(node, scope, labels, self.labels[node][picks]))
        for other in tuple(self.tables[node]):
            self.disconnect(node, other)
            self.touch(other)
        self.alive[node] = False


Rule = Callable[[Network, int], bool]  # a function: its name is what `Reduced.counts` says


def delete_forbidden(net: Network, node: int) -> bool:
    """Strategies of infinite cost go (a pair without finite partner made its node's cost infinite)."""
    finite = np.isfinite(net.costs[node])
    if finite.all():
        return False
    net.restrict(node, np.flatnonzero(finite))
    return True


def follow(net: Network, node: int) -> bool:
    """Merge a node into a neighbour each of whose strategies leaves it one finite strategy."""
    if not np.isfinite(net.costs[node]).all():
        return False
    for leader, table in net.tables[node].items():
        led, leads = net.shared.once("follow", [table], [], lambda table=table: _follows(table))
        if led:
            if leads and net.weight(node) > net.weight(leader):
                _merge(net, leader, node, net.shared.transposed(table))
            else:
                _merge(net, node, leader, table)
            return True
    return False


def _follows(table: Table) -> tuple[bool, bool]:
    """Whether each strategy of the second node leaves the first one finite strategy, and the other way round."""
    finite = np.isfinite(table.core)
    led = (np.bincount(table.rows) @ finite == 1).all()
    return bool(led), bool((finite @ np.bincount(table.cols) == 1).all())


def _merge(net: Network, node: int, leader: int, table: Table) -> None:
    """Merge a node into the one it follows; `table` is their edge, seen from the node."""
    # Any strategy of the one class that is finite: it is the class's only one.
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
    """Delete strategies that another one beats whatever the neighbours do."""
    costs = net.costs[node]
    if len(costs) < 2 or not np.isfinite(costs).all():
        return False
    tables, amounts = tuple(net.tables[node].values()), tuple(net.usages[node].values())
    keep = net.shared.once("dominate", tables, [costs, *amounts], lambda: _undominated(net, costs, tables, amounts))
    if len(keep) == len(costs):
        return False
    net.restrict(node, keep)
    return True


def _undominated(net: Network, costs: np.ndarray, tables: Sequence[Table], usages: Sequence[np.ndarray]) -> np.ndarray:
    """The strategies that none beats."""
    excess = costs[None, :] - costs[:, None]  # [s, s']: how much dearer s' can be than s
    for amounts in usages:
        excess[amounts[None, :] > amounts[:, None]] = np.inf
    for table in tables:
        if not (excess <= 0.0).sum() > len(costs):
            return np.arange(len(costs))
        worst = net.shared.once("worst", [table], [], lambda table=table: _worst(table.core))
        excess = excess + worst[table.rows[:, None], table.rows]
    beaten = excess <= 0.0
    beaten &= ~beaten.T | np.tri(len(costs), k=-1, dtype=bool)  # of two equals the first stays
    return np.flatnonzero(~beaten.any(axis=1))


def _worst(core: np.ndarray) -> np.ndarray:
    """[r, r']: the most by which row r' of a normalised core can exceed row r."""
    rows, columns = core.shape
    with np.errstate(invalid="ignore"):  # inf - inf is nan: no matter
        if rows * rows * columns <= _FITS_CACHE:
            return np.fmax.reduce(core[None, :, :] - core[:, None, :], axis=2)
        worst = np.full((rows, rows), -np.inf)
        difference = np.empty((rows, rows))
        for column in np.ascontiguousarray(core.T):
            np.subtract(column[None, :], column[:, None], out=difference)
            np.fmax(worst, difference, out=worst)
        return worst


def eliminate(net: Network, node: int) -> bool:
    """Minimise out a node with at most two neighbours that holds no memory."""
    scope = tuple(net.tables[node])
    if len(scope) > 2 or net.usages[node] or not np.isfinite(net.costs[node]).all():
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
    """The best strategy of a node with one neighbour, by the neighbour's, and what it costs."""
    total = table.core[:, table.cols] + costs
    return total.argmin(axis=1)[table.rows], total.min(axis=1)[table.rows]


def _minimise_between(first: Table, second: Table, costs: np.ndarray) -> tuple[np.ndarray, Table]:
    """The best strategy of a node with two neighbours, by theirs, and the edge that it leaves."""
    total = (first.core[:, first.cols] + costs)[:, None, :] + second.core[:, second.cols][None, :, :]
    picks = total.argmin(axis=2)
    left = Table(first.rows, second.rows, total.min(axis=2)).compact()
    return picks[first.rows[:, None], second.rows], left


RULES: tuple[Rule, ...] = (delete_forbidden, follow, eliminate, dominate)


def reduce(problem: Problem, *, rules: Sequence[Rule] = RULES, deadline: float = math.inf) -> Reduced | None:
    """Shrink a problem without changing its optimum.

    Args:
        rules: which rules to apply.
        deadline: on the clock of `time.monotonic`.

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
