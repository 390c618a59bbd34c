"""Reference results for comparison, and a solver that forces strategies that no optimum would choose."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.ilp import Ilp
from autopar.solve.problem import Problem, Solution, Status

MOST_ASSIGNMENTS = 200_000


def exhaustive(problem: Problem) -> Solution:
    """The optimum by exhaustive search; for problems of a few nodes."""
    sizes = [len(c) for c in problem.node_costs]
    assert math.prod(sizes) <= MOST_ASSIGNMENTS, "too large to try everything"
    best: tuple[int, ...] = ()
    least = math.inf
    for choices in itertools.product(*map(range, sizes)):
        cost = problem.evaluate(choices)
        if cost < least and problem.fits(choices):
            best, least = choices, cost
    status = Status.INFEASIBLE if math.isinf(least) else Status.OPTIMAL
    return Solution(best, least, least, status)


def least_memory(problem: Problem) -> float:
    """The least peak memory of any assignment of finite cost, by exhaustive search."""
    every = itertools.product(*(range(len(c)) for c in problem.node_costs))
    return min((problem.peak_memory(c) for c in every if math.isfinite(problem.evaluate(c))), default=math.inf)


@dataclass(frozen=True, slots=True)
class RandomSolver:
    """Random strategies: an assignment of finite cost that fits, found by random prices of strategies.

    So tests also run plans that no solver would choose. Equal seeds draw equal assignments.
    """

    seed: int

    def solve(self, problem: Problem) -> Solution:
        rng = np.random.default_rng(self.seed)
        costs = tuple(np.where(np.isfinite(c), rng.random(len(c)), np.inf) for c in problem.node_costs)
        edges = tuple(replace(e, costs=np.where(np.isfinite(e.costs), 0.0, np.inf)) for e in problem.edges)
        drawn = Ilp().solve(replace(problem, node_costs=costs, edges=edges))
        if not drawn.choices:
            return drawn
        return Solution(drawn.choices, problem.evaluate(drawn.choices), -math.inf, Status.FEASIBLE)
