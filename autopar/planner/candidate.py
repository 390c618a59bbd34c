"""Define a candidate plan: a program, an assignment of strategies, and the predicted step time and memory.

In: a program, a formulation, its solution and the assembled parts. Out: `Candidate`.
"""

from __future__ import annotations

import math
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
    def compared_s(self) -> float:
        """Seconds by which plans are compared: the geometric mean of two step times, one by the device's own rates and one
        by XLA's latency estimator.

        Each of the two models overlap that the other misses. XLA's estimator has one price for convolutions and library
        attention of any size: their time beyond that, by the device's own rates, is added to it. XLA's estimator counts a
        loop as one short operation: in a program with loops the own rates alone count.
        """
        prediction = self.parts.prediction
        if prediction.xla_step_time_s is None or self.program.graph.loops:
            return prediction.step_time_s
        return math.sqrt(prediction.step_time_s * (prediction.xla_step_time_s + self.parts.simulation.unestimated_s))

    @property
    def peak_bytes(self) -> float:
        return self.parts.prediction.peak_bytes
