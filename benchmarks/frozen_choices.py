"""Save a plan's choices, so that a changed cost model can price the same plan again.

A changed cost model would choose other plans, and XLA would have to compile them. With the saved choices, the new
predictions can be compared with the programs that are already compiled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from autopar.solve.ilp import Ilp
from autopar.solve.problem import Problem, Solution, Status


@dataclass(slots=True)
class Remembering:
    """Solves as `Ilp` does, and keeps the last choices."""

    choices: tuple[int, ...] = ()

    def solve(self, problem: Problem) -> Solution:
        solution = Ilp(time_limit_s=60.0).solve(problem)
        self.choices = solution.choices
        return solution

    def save(self, file: Path) -> None:
        """Write the choices to a file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.choices) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Frozen:
    """Returns the saved choices; solves only if they do not fit the problem."""

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
