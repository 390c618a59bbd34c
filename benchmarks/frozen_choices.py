"""A plan's choices kept, so that it can be priced anew without being chosen anew.

A cost model under change chooses other plans, and XLA would have to compile them all again. With the
choices of last time its new predictions stand beside the compiled programs of last time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from autopar.solve.ilp import Ilp
from autopar.solve.problem import Problem, Solution, Status


@dataclass(slots=True)
class Remembering:
    """Solves as ever, and remembers the last outcome."""

    choices: tuple[int, ...] = ()

    def solve(self, problem: Problem) -> Solution:
        solution = Ilp(time_limit_s=60.0).solve(problem)
        self.choices = solution.choices
        return solution

    def save(self, file: Path) -> None:
        """Keep the choices."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.choices) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Frozen:
    """Takes the choices it is given; solves only where they do not fit the problem."""

    choices: tuple[int, ...]

    @classmethod
    def load(cls, file: Path) -> Frozen:
        return cls(tuple(json.loads(file.read_text(encoding="utf-8"))))

    def solve(self, problem: Problem) -> Solution:
        sizes = [len(costs) for costs in problem.node_costs]
        if len(sizes) == len(self.choices) and all(c < n for c, n in zip(self.choices, sizes, strict=True)):
            cost = problem.evaluate(self.choices)
            return Solution(self.choices, cost, cost, Status.FEASIBLE)
        return Ilp(time_limit_s=60.0).solve(problem)
