"""Improve an assignment by local search: change one node, or two neighbours at once.

In: a `Problem` and an assignment that fits. Out: a local optimum that fits and costs no more. Costs are compared
exactly: `math.fsum` adds up every change that float64 finds again, without rounding.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np

from autopar.solve.live_instants import instants_of
from autopar.solve.problem import ROUNDING, Edge, Problem


def polish(problem: Problem, choices: Sequence[int], *, deadline: float) -> tuple[int, ...]:
    """Improve an assignment by changes of one node and of two neighbours, until none is left or time is up.

    Args:
        choices: an assignment of finite cost that fits.
        deadline: end of the search, by `time.monotonic`.
    """
    moves = _Moves(problem, choices)
    while moves.sweep(deadline):
        pass
    found = tuple(moves.choices)
    return found if problem.fits(found) else tuple(choices)


class _Moves:
    """An assignment, its live memory at each instant, and the moves that change it."""

    def __init__(self, problem: Problem, choices: Sequence[int]) -> None:
        self.choices = [int(c) for c in choices]
        self._costs = problem.node_costs
        self._between: dict[tuple[int, int], list[Edge]] = {}
        for e in problem.edges:
            self._between.setdefault((min(e.source, e.target), max(e.source, e.target)), []).append(e)
        self._tables = {pair: self._table(pair) for pair in self._between}
        least = {key: float(table.min()) for key, table in {id(t): t for t in self._tables.values()}.items()}
        self._least = {pair: least[id(table)] for pair, table in self._tables.items()}
        self._neighbours: list[list[tuple[int, np.ndarray]]] = [[] for _ in self._costs]
        for (u, v), table in self._tables.items():
            self._neighbours[u].append((v, table))
            self._neighbours[v].append((u, table.T))
        self._usages: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in self._costs]
        self._limit = math.inf
        self._loads = np.zeros(0)
        if problem.memory_limit is not None:
            instants = instants_of(problem)
            self._limit = problem.memory_limit * (1 + ROUNDING)
            self._loads = instants.loads(self.choices)
            first = np.searchsorted(instants.times, [u.start for u in instants.usages]).tolist()
            last = np.searchsorted(instants.times, [u.end for u in instants.usages]).tolist()
            for usage, a, b in zip(instants.usages, first, last, strict=True):
                if a < b and len(usage.amounts) > 1:
                    self._usages[usage.node].append((a, b, np.asarray(usage.amounts, float)))
        self._free = [n for n, c in enumerate(self._costs) if len(c) > 1]
        self._totals: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}

    def _table(self, pair: tuple[int, int]) -> np.ndarray:
        """The sum of the edge costs between two nodes, [strategies of the lower node, of the higher one]."""
        tables = [e.costs if e.source == pair[0] else e.costs.T for e in self._between[pair]]
        return tables[0] if len(tables) == 1 else np.sum(tables, axis=0)

    def sweep(self, deadline: float) -> bool:
        """Try every node and every edge once. Returns whether anything changed."""
        changed = False
        for node in self._free:
            if time.monotonic() >= deadline:
                return False
            changed |= self._improve_node(node)
        for u, v in self._tables:
            if len(self._costs[u]) > 1 and len(self._costs[v]) > 1:
                if time.monotonic() >= deadline:
                    return False
                changed |= self._improve_pair(u, v)
        return changed

    def _total(self, node: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The sum of finite costs of each strategy of a node and its edges, and the number of its infinite costs (None: 0)."""
        if node not in self._totals:
            columns = [self._costs[node], *(t[:, self.choices[other]] for other, t in self._neighbours[node])]
            terms = np.array(columns, float)
            forbidden = np.isinf(terms)
            if forbidden.any():
                self._totals[node] = np.where(forbidden, 0.0, terms).sum(axis=0), forbidden.sum(axis=0)
            else:
                self._totals[node] = terms.sum(axis=0), None
        return self._totals[node]

    def _improve_node(self, node: int) -> bool:
        total, forbidden = self._total(node)
        better = total < total[self.choices[node]]
        if forbidden is not None:
            better &= forbidden == 0
        if not better.any():
            return False
        for peak, held, _ in self._segments(node):
            better &= peak + held <= self._limit
        cheapest = sorted(np.flatnonzero(better).tolist(), key=lambda s: total[s])
        return any(self._change({node: new}) for new in cheapest)

    def _improve_pair(self, u: int, v: int) -> bool:
        table, old_u, old_v = self._tables[u, v], self.choices[u], self.choices[v]
        of_u, of_v = self._without(u, table[:, old_v]), self._without(v, table[old_u])
        now = of_u[old_u] + of_v[old_v] + table[old_u, old_v]
        if of_u.min() + of_v.min() + self._least[u, v] >= now:
            return False
        total = of_u[:, None] + of_v + table
        better = total < now
        if not better.any():
            return False
        for peak, held_u, held_v in self._segments(u, v):
            better &= (peak + held_u)[:, None] + held_v <= self._limit
        at = np.argwhere(better).tolist()
        cheapest = sorted(at, key=lambda pair: total[tuple(pair)])
        return any(self._change({u: new_u, v: new_v}) for new_u, new_v in cheapest)

    def _without(self, node: int, shared: np.ndarray) -> np.ndarray:
        """The cost of each strategy of a node without the edge whose current cost is `shared`."""
        total, forbidden = self._total(node)
        if forbidden is None:
            return total - shared
        gone = np.isinf(shared)
        return np.where(forbidden > gone, np.inf, total - np.where(gone, 0.0, shared))

    def _segments(self, u: int, v: int = -1) -> list[tuple[float, np.ndarray, np.ndarray]]:
        """Ranges of instants over which the memory of two nodes is constant: the current peak of the range, and the
        change of memory by each strategy of either node."""
        both = [(n, usage) for n in (u, v) if n >= 0 for usage in self._usages[n]]
        ends = sorted({end for _, (a, b, _) in both for end in (a, b)})
        segments = []
        for a, b in itertools.pairwise(ends):
            held = [np.zeros(len(self._costs[u])), np.zeros(len(self._costs[v]) if v >= 0 else 1)]
            for n, (start, end, amounts) in both:
                if start <= a and b <= end:
                    held[n != u] = held[n != u] + (amounts - amounts[self.choices[n]])
            segments.append((float(self._loads[a:b].max()), held[0], held[1]))
        return segments

    def _change(self, new: dict[int, int]) -> bool:
        """Change the strategies of some nodes if the exact cost falls."""
        old = {node: self.choices[node] for node in new}
        if self._change_of_cost(old, new) >= 0.0:
            return False
        for node, choice in new.items():
            for a, b, amounts in self._usages[node]:
                self._loads[a:b] += amounts[choice] - amounts[old[node]]
            self.choices[node] = choice
            self._totals.pop(node, None)
            for other, _ in self._neighbours[node]:
                self._totals.pop(other, None)
        return True

    def _change_of_cost(self, old: dict[int, int], new: dict[int, int]) -> float:
        pairs = {(min(n, other), max(n, other)) for n in new for other, _ in self._neighbours[n]}
        terms: list[float] = []
        for sign, changed in ((1.0, new), (-1.0, old)):
            terms += [sign * float(self._costs[n][s]) for n, s in changed.items()]
            for e in (e for pair in pairs for e in self._between[pair]):
                s, t = (changed.get(n, self.choices[n]) for n in (e.source, e.target))
                terms.append(sign * float(e.costs[s, t]))
        return math.fsum(terms)
