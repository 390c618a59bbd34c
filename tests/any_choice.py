"""A solver that returns a valid assignment without optimizing, for problems without a memory budget."""

from __future__ import annotations

import random

from autopar.solve.problem import Problem, Solution, Status


class AnyChoice:
    """Draws each choice by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def solve(self, problem: Problem) -> Solution:
        choices = tuple(self.random.randrange(len(costs)) for costs in problem.node_costs)
        return Solution(choices, 0.0, 0.0, Status.FEASIBLE)
