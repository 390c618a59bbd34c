"""Randomised search over strategies, as in FlexFlow: propose a change of one node, and accept it by Metropolis's rule.

(Jia, Zaharia and Aiken, "Beyond data and model parallelism for deep neural networks", 2019.) The search begins with
each node's cheapest strategy. While the assignment exceeds the memory limit, changes that raise memory at no instant
are always accepted; afterwards, changes that exceed the limit never are.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autopar.solve.live_instants import instants_of
from autopar.solve.problem import Problem, Solution, Status

_HEAT = 1e-6  # temperature, relative to the current cost
_LOOKS = 256  # proposals between two checks of the time


@dataclass(frozen=True, slots=True)
class Mcmc:
    """A `Solver` without a proof.

    Args:
        time_limit_s: time limit in seconds.
        seed: seed of its random numbers.
    """

    time_limit_s: float = 60.0
    seed: int = 0

    def solve(self, problem: Problem) -> Solution:
        """The best assignment found that fits."""
        deadline = time.monotonic() + self.time_limit_s
        walk = _Walk(problem, np.random.default_rng(self.seed))
        while time.monotonic() < deadline:
            for _ in range(_LOOKS):
                walk.propose()
        if not walk.best or not problem.fits(walk.best):
            return Solution((), math.inf, -math.inf, Status.NOT_FOUND)
        return Solution(walk.best, problem.evaluate(walk.best), -math.inf, Status.UNPROVEN)


class _Walk:
    """The current assignment, and the best so far."""

    def __init__(self, problem: Problem, rng: np.random.Generator) -> None:
        self.best: tuple[int, ...] = ()
        self._problem, self._rng = problem, rng
        self._choices = [int(c.argmin()) for c in problem.node_costs]
        self._free = [n for n, c in enumerate(problem.node_costs) if len(c) > 1]
        self._edges: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.node_costs]
        for e in problem.edges:
            self._edges[e.source].append((e.target, e.costs))
            self._edges[e.target].append((e.source, e.costs.T))
        self._limit = math.inf if problem.memory_limit is None else problem.memory_limit
        instants = instants_of(problem)
        self._loads = instants.loads(self._choices) if len(instants.usages) else np.zeros(1)
        self._held: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in problem.node_costs]
        for u in instants.usages:
            first, last = np.searchsorted(instants.times, (u.start, u.end))
            if first < last:
                self._held[u.node].append((int(first), int(last), u.amounts))
        self._cost, self._least = problem.evaluate(tuple(self._choices)), math.inf
        self._remember()

    def propose(self) -> None:
        """Propose another strategy for a node, and accept or reject it."""
        if not self._free:
            return
        node = self._free[int(self._rng.integers(len(self._free)))]
        old, new = self._choices[node], int(self._rng.integers(len(self._problem.node_costs[node])))
        peak = self._loads.max(initial=0.0)
        self._hold(node, old, new)
        after = self._loads.max(initial=0.0)
        if new == old or not (after <= self._limit or after < peak or self._easier(node, new)):
            self._hold(node, new, old)
            return
        change = self._of(node, new) - self._of(node, old)
        relieved = peak > self._limit and after < peak
        if not (relieved or math.isnan(change) or change <= _HEAT * abs(self._cost) * self._rng.exponential()):
            self._hold(node, new, old)
            return
        self._choices[node] = new
        finite = math.isfinite(change) and math.isfinite(self._cost)
        self._cost = self._cost + change if finite else self._problem.evaluate(tuple(self._choices))
        self._remember()

    def _easier(self, node: int, new: int) -> bool:
        """Whether a change raises memory at no instant."""
        return all(amounts[new] <= amounts[self._choices[node]] for _, _, amounts in self._held[node])

    def _of(self, node: int, strategy: int) -> float:
        own = float(self._problem.node_costs[node][strategy])
        return own + sum(float(costs[strategy, self._choices[other]]) for other, costs in self._edges[node])

    def _hold(self, node: int, old: int, new: int) -> None:
        for first, last, amounts in self._held[node]:
            self._loads[first:last] += amounts[new] - amounts[old]

    def _remember(self) -> None:
        if self._cost < self._least and self._loads.max(initial=0.0) <= self._limit:
            self.best, self._least = tuple(self._choices), self._cost
