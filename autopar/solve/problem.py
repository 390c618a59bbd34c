"""Define the planning problem and its solution as plain numbers, without graph, mesh or JAX.

    minimise    sum_u c_u[s_u] + sum_(u,v) C_uv[s_u, s_v]
    over        one strategy s_u per node u
    subject to  sum of the usages live at t, each m[s_u], <= memory_limit     for every instant t

A forbidden strategy or pair has cost `inf`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

ROUNDING = 1e-12  # relative; whole bytes add up exactly


@dataclass(frozen=True, slots=True)
class Edge:
    """Cost of every pair of strategies of two different nodes: `costs[s_source, s_target]`, seconds."""

    source: int
    target: int
    costs: np.ndarray


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory that a node holds over instants `[start, end)`: bytes per strategy. A node may have several."""

    node: int
    start: int
    end: int
    amounts: np.ndarray


@dataclass(frozen=True, slots=True)
class Problem:
    """Node cost vectors, edges (parallel ones add), usages and the limit (None: no limit)."""

    node_costs: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...] = ()
    usages: tuple[Usage, ...] = ()
    memory_limit: float | None = None

    def evaluate(self, choices: tuple[int, ...]) -> float:
        """Cost of an assignment in seconds, correctly rounded to float64; `inf` if it takes a forbidden choice."""
        return math.fsum(self._terms(choices))

    def magnitude(self, choices: tuple[int, ...]) -> float:
        """Sum of the absolute values of the terms of `evaluate`, in seconds: its rounding error scales with this."""
        return math.fsum(map(abs, self._terms(choices)))

    def _terms(self, choices: tuple[int, ...]) -> list[float]:
        """The node and edge costs that an assignment adds up."""
        terms = [float(costs[s]) for costs, s in zip(self.node_costs, choices, strict=True)]
        return terms + [float(e.costs[choices[e.source], choices[e.target]]) for e in self.edges]

    def peak_memory(self, choices: tuple[int, ...]) -> float:
        """Largest sum of live usages over all instants, in bytes."""
        change: dict[int, float] = {}
        for u in self.usages:
            if u.start < u.end:
                amount = float(u.amounts[choices[u.node]])
                change[u.start] = change.get(u.start, 0.0) + amount
                change[u.end] = change.get(u.end, 0.0) - amount
        peak = live = 0.0
        for instant in sorted(change):
            live += change[instant]
            peak = max(peak, live)
        return peak

    def fits(self, choices: tuple[int, ...]) -> bool:
        """Whether an assignment respects the limit, up to the rounding of float64 sums."""
        return self.memory_limit is None or self.peak_memory(choices) <= self.memory_limit * (1 + ROUNDING)


class Status(Enum):
    """How a solve ended; the value is the message for the user."""

    OPTIMAL = "proven optimal"
    FEASIBLE = "feasible, stopped by the time limit: raise `time_limit_s` to close the gap"
    STEPPED = "feasible, stopped by the step limit: raise `step_limit` to close the gap"
    CLOSE = "feasible, gap within the requested tolerance: lower `relative_gap` to close the gap"
    INTERRUPTED = "feasible, stopped by Ctrl-C: let it run on to close the gap"
    UNPROVEN = "feasible, by a method that proves nothing"
    INFEASIBLE = "no assignment fits the memory budget: raise the budget or use more devices"
    NOT_FOUND = "no assignment found within the time limit: raise `time_limit_s`"


@dataclass(frozen=True, slots=True)
class Solution:
    """The outcome of a solve; without an assignment `choices` is empty and `cost` is `inf`."""

    choices: tuple[int, ...]
    cost: float
    lower_bound: float
    status: Status

    @property
    def gap(self) -> float:
        """(cost - lower bound) / cost; up to 1e-6 counts as proven optimal."""
        if not self.choices:
            return float("inf")
        return 0.0 if self.cost == 0 else max(0.0, (self.cost - self.lower_bound) / abs(self.cost))


class Solver(Protocol):
    """Anything that solves a `Problem`; a planner takes one as an argument."""

    def solve(self, problem: Problem) -> Solution:
        """The best assignment found, with the status that says how good it is."""
        ...
