"""Define a candidate plan: a program, an assignment of strategies, and the predicted step time and memory.

In: a program, a formulation, its solution and the assembled parts. Out: `Candidate`.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.formulate.formulation import Formulation
from autopar.planner.plan_assembly import Assembled
from autopar.plans.records import Rematerialization
from autopar.solve.problem import Solution
from autopar.transforms.program import Program


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate plan.

    Args:
        parts: the plan's parts that follow from the solution.
        rematerialized: the rematerializations that `program` contains, as nodes of the program without them.
    """

    program: Program
    formulation: Formulation
    solution: Solution
    parts: Assembled
    rematerialized: tuple[Rematerialization, ...] = ()

    @property
    def step_time_s(self) -> float:
        return self.parts.prediction.step_time_s

    @property
    def peak_bytes(self) -> float:
        return self.parts.prediction.peak_bytes
