"""Find an assignment that fits quickly, at any cost, as a fallback of the search.

In: a `Problem`. Out: an assignment of finite cost, chosen greedily, node by node, for low memory. Each choice is
propagated: strategies that it forbids are deleted from other nodes, so a chain of nodes with equal shardings is
decided at once. If some instants exceed the limit, the next round raises the price of memory there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from autopar.solve.live_instants import Instants, instants_of
from autopar.solve.problem import ROUNDING, Problem

_ROUNDS = 6
_PRICE_FACTOR = 4.0  # factor on the price of memory at instants above the limit


def cheap_start(problem: Problem, *, deadline: float) -> tuple[int, ...]:
    """An assignment of finite cost that fits; empty if none was found.

    Args:
        deadline: end of the search, by `time.monotonic`.
    """
    if not all(len(c) for c in problem.node_costs):
        return ()
    greedy = _Greedy(problem)
    instants = None if problem.memory_limit is None else instants_of(problem)
    prices = np.zeros(0) if instants is None else np.ones(len(instants.times))
    for _ in range(_ROUNDS):
        held = _held(problem, instants, prices)
        choices = greedy.run(held, deadline)
        if instants is None or problem.memory_limit is None or not choices or problem.fits(choices):
            return choices
        over = instants.loads(choices) > problem.memory_limit * (1 + ROUNDING)
        prices = np.where(over, prices * _PRICE_FACTOR, prices)
    return ()


def _held(problem: Problem, instants: Instants | None, prices: np.ndarray) -> list[np.ndarray]:
    """The memory of each strategy summed over all instants, weighted by their prices."""
    held = [np.zeros(len(c)) for c in problem.node_costs]
    if instants is not None:
        until = np.concatenate(([0.0], np.cumsum(prices)))
        first = np.searchsorted(instants.times, [u.start for u in instants.usages])
        last = np.searchsorted(instants.times, [u.end for u in instants.usages])
        for usage, weight in zip(instants.usages, (until[last] - until[first]).tolist(), strict=True):
            held[usage.node] = held[usage.node] + weight * usage.amounts
    return held


class _Greedy:
    """The edges of each node, and the pairs of strategies that they allow."""

    def __init__(self, problem: Problem) -> None:
        self._costs = problem.node_costs
        self._edges: list[list[tuple[int, np.ndarray, np.ndarray | None]]] = [[] for _ in problem.node_costs]
        allowed: dict[int, np.ndarray | None] = {}  # None: every pair
        for e in problem.edges:
            if id(e.costs) not in allowed:
                finite = np.isfinite(e.costs)
                allowed[id(e.costs)] = None if finite.all() else finite
            pairs = allowed[id(e.costs)]
            self._edges[e.source].append((e.target, e.costs, pairs))
            self._edges[e.target].append((e.source, e.costs.T, None if pairs is None else pairs.T))

    def run(self, held: Sequence[np.ndarray], deadline: float) -> tuple[int, ...]:
        """Choose, node by node, the strategy with the least memory, then the least cost."""
        alive = [np.isfinite(c) for c in self._costs]
        choices = [-1] * len(alive)
        if not self._spread(alive, range(len(alive))):
            return ()
        for node, costs in enumerate(self._costs):
            if time.monotonic() >= deadline:
                return ()
            left = np.flatnonzero(alive[node])
            if len(left) > 1:
                cost = costs[left]
                for other, table, _ in self._edges[node]:
                    if choices[other] >= 0:
                        cost = cost + table[left, choices[other]]
                left = left[np.lexsort((cost, held[node][left]))]
                alive[node] = np.arange(len(costs)) == left[0]
                if not self._spread(alive, [node]):
                    return ()
            choices[node] = int(left[0])
        return tuple(choices)

    def _spread(self, alive: list[np.ndarray], nodes: Sequence[int]) -> bool:
        """Propagate deletions from `nodes`: delete strategies without an allowed partner (arc consistency).

        Returns:
            False if a node has no strategy left.
        """
        waiting, queued = deque(nodes), set(nodes)
        while waiting:
            node = waiting.popleft()
            queued.discard(node)
            for other, _, pairs in self._edges[node]:
                if pairs is None:
                    continue
                left = alive[other] & pairs[alive[node]].any(axis=0)
                if left.sum() < alive[other].sum():
                    alive[other] = left
                    if other not in queued:
                        queued.add(other)
                        waiting.append(other)
            if not alive[node].any():
                return False
        return True
