"""Random problems of a few nodes with their optima; the memory limit is within 1e-7 of some assignment's memory.

In: a seed. Out: a `Problem`, and the cost of the cheapest assignment that fits, by exhaustive search over arrays.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from autopar.solve.problem import ROUNDING, Edge, Problem, Solution, Status, Usage

MOST_ASSIGNMENTS = 3_000
COSTS = ("whole", "large", "fractions", "decades", "ties", "forbidden", "negative")


def near_tight(seed: int) -> Problem:
    """A problem whose limit is at or just above, or just below, what some assignment holds."""
    rng = np.random.default_rng([seed, 11])
    sizes = rng.integers(1, 6, int(rng.integers(2, 8)))
    while math.prod(sizes.tolist()) > MOST_ASSIGNMENTS:
        sizes = np.maximum(1, sizes - 1)
    kind = str(rng.choice(COSTS))

    def costs(*shape: int) -> np.ndarray:
        if kind == "large":
            return rng.integers(0, 10**12, shape).astype(float)
        if kind == "fractions":
            return rng.random(shape) * 10.0 ** rng.integers(-6, 3)
        if kind == "decades":
            return rng.random(shape) * 10.0 ** rng.integers(-12, 13, shape)
        if kind == "ties":
            return rng.integers(0, 2, shape).astype(float)
        drawn = rng.integers(-9 if kind == "negative" else 0, 10, shape).astype(float)
        return np.where(rng.random(shape) < 0.2, np.inf, drawn) if kind == "forbidden" else drawn

    nodes = tuple(costs(n) for n in sizes)
    pairs = [p for p in itertools.permutations(range(len(sizes)), 2) if rng.random() < 0.35]
    edges = tuple(Edge(u, v, costs(sizes[u], sizes[v])) for u, v in pairs)
    usages = []
    for _ in range(int(rng.integers(2, 2 * len(sizes) + 2))):
        node, start = int(rng.integers(len(sizes))), int(rng.integers(0, 6))
        amounts = rng.integers(0, 10, sizes[node]) * 10.0 ** rng.integers(0, 15)
        usages.append(Usage(node, start, start + int(rng.integers(1, 4)), amounts + rng.integers(0, 5, sizes[node])))
    problem = Problem(nodes, edges, tuple(usages))
    total, peak = every(problem)
    allowed = np.flatnonzero(np.isfinite(total))
    if not len(allowed):
        return problem
    low = np.quantile(peak[allowed], rng.choice([0.0, 0.05, 0.3]), method="lower")
    above = math.floor(low * 10.0 ** -rng.integers(7, 16))
    return replace(problem, memory_limit=float(low + above if rng.random() < 0.85 else low - 1))


def every(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Cost and peak of every assignment, in the order of `np.ndindex`."""
    sizes = tuple(len(c) for c in problem.node_costs)
    at = np.indices(sizes).reshape(len(sizes), -1)
    total = np.zeros(at.shape[1])
    for node, costs in enumerate(problem.node_costs):
        total += costs[at[node]]
    for e in problem.edges:
        total += e.costs[at[e.source], at[e.target]]
    held = np.zeros((max((u.end for u in problem.usages), default=1), at.shape[1]))
    for u in problem.usages:
        held[u.start : u.end] += u.amounts[at[u.node]]
    return total, held.max(axis=0)


def optimum(problem: Problem) -> float:
    """The cost of the cheapest assignment that fits; `inf` if none does."""
    total, peak = every(problem)
    limit = np.inf if problem.memory_limit is None else problem.memory_limit * (1 + ROUNDING)
    return float(total[peak <= limit].min(initial=np.inf))


def faults(problem: Problem, solution: Solution, *, must_find: bool = True) -> list[str]:
    """What a solution says that is not true."""
    least = optimum(problem)
    rounding = 1e-14 * problem.magnitude(solution.choices) if solution.choices else 1e-12 * abs(least)
    found: list[str] = []
    if solution.lower_bound > least + rounding:
        found.append(f"bound {solution.lower_bound!r} above the optimum {least!r}")
    if not solution.choices:
        if math.isfinite(least) and (must_find or solution.status is Status.INFEASIBLE):
            found.append(f"{solution.status} though {least!r} fits")
        return found
    if not problem.fits(solution.choices) or solution.cost != problem.evaluate(solution.choices):
        found.append("what it chose does not fit, or costs something else")
    if solution.status is Status.OPTIMAL and solution.cost > least + 1e-6 * abs(least) + rounding:
        found.append(f"{solution.cost!r} called optimal where {least!r} is")
    if (
        solution.status is Status.OPTIMAL
        and solution.gap > 1e-6
        and solution.cost - solution.lower_bound > 100 * rounding
    ):
        found.append(f"optimal with a gap of {solution.gap}")
    return found
