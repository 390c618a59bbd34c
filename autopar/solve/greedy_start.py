"""An assignment that fits, found fast and whatever it costs: what a search falls back on.

In: a `Problem`. Out: an assignment of finite cost that holds as little as its choice, node by node, can see. After
each choice what it forbids is deleted from all nodes that follow from it, so that chains of equal shardings are
decided as one. Where too much is held at some instants, memory is dearer there the next time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from autopar.solve.live_instants import Instants, instants_of
from autopar.solve.problem import ROUNDING, Problem

_ROUNDS = 6
_DEARER = 4.0  # times, at the instants at which too much is held


def cheap_start(problem: Problem, *, deadline: float) -> tuple[int, ...]:
    """An assignment of finite cost that fits; empty if none was found.

    Args:
        deadline: on the clock of `time.monotonic`.
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
        prices = np.where(over, prices * _DEARER, prices)
    return ()


def _held(problem: Problem, instants: Instants | None, prices: np.ndarray) -> list[np.ndarray]:
    """What each strategy holds over all instants, weighted by their prices."""
    held = [np.zeros(len(c)) for c in problem.node_costs]
    if instants is not None:
        until = np.concatenate(([0.0], np.cumsum(prices)))
        first = np.searchsorted(instants.times, [u.start for u in instants.usages])
        last = np.searchsorted(instants.times, [u.end for u in instants.usages])
        for usage, weight in zip(instants.usages, (until[last] - until[first]).tolist(), strict=True):
            held[usage.node] = held[usage.node] + weight * usage.amounts
    return held


class _Greedy:
    """A problem's edges by node, and which pairs of strategies they allow."""

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
        """Choose for one node after another what holds least, and of that what costs least."""
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
        """Delete what has no allowed partner left, from some nodes on; False if that leaves a node nothing."""
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
