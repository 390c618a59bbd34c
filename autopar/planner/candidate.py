"""Represent a candidate plan: a program, an assignment of strategies, and the predicted program of one device.

In: a program, a formulation and its solution. Out: `Candidate`, with the figures by which plans are compared;
`Planning`, which makes candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import TimeLimitError
from autopar.formulate.formulation import Formulation, formulate
from autopar.ir.graph import Graph
from autopar.ir.sharding import TensorSharding
from autopar.planner.plan_assembly import Assembled, assemble
from autopar.plans.records import Rematerialization
from autopar.rules.grouping import Group
from autopar.solve.problem import Solution, Solver
from autopar.transforms.program import Program


@dataclass(frozen=True, slots=True)
class Candidate:
    """A program, and the parts of its plan.

    Args:
        rematerialized: the values of the original program that this one computes again.
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
        """The seconds by which plans are compared: the geometric mean of two step times, by the device's own rates and
        by XLA's estimator. Their errors about overlap differ. XLA's estimator prices a loop as one short operation, so
        programs with loops use the first alone. It has one price for any convolution or library attention: their time
        beyond it, by the device's own rates, is added."""
        prediction = self.parts.prediction
        if prediction.xla_step_time_s is None or self.program.graph.loops:
            return prediction.step_time_s
        return math.sqrt(prediction.step_time_s * (prediction.xla_step_time_s + self.parts.simulation.unestimated_s))

    @property
    def peak_bytes(self) -> float:
        return self.parts.prediction.peak_bytes


@dataclass(frozen=True, slots=True)
class Planning:
    """Make candidates on one mesh.

    Args:
        limited: the solver for problems with a memory limit.
        groups_of: returns the groups of a graph.
        held: the required shardings of values; positions are those of the graph before rematerialization.
    """

    pins: dict[int, TensorSharding]
    solver: Solver
    limited: Solver
    groups_of: Callable[[Graph], tuple[Group, ...]]
    held: Mapping[int, TensorSharding] = field(default_factory=dict)

    def free(
        self,
        program: Program,
        like: Formulation,
        recomputed: tuple[Rematerialization, ...],
        seconds_per_byte: float = 0.0,
    ) -> Candidate:
        """The candidate of a program without a memory budget.

        Args:
            seconds_per_byte: the price of storing arguments.

        Raises:
            TimeLimitError: the solver found no assignment.
        """
        graph = program.graph
        groups = like.groups if graph is like.graph else self.groups_of(graph)
        f = formulate(graph, groups, like.mesh, like.profile, pins=self.pins, held=self.held)
        solution = self.solver.solve(f.with_memory_priced(seconds_per_byte))
        if solution.choices:
            paid_s = solution.cost - f.problem.evaluate(solution.choices)
            solution = replace(solution, cost=solution.cost - paid_s, lower_bound=solution.lower_bound - paid_s)
        return self.made(program, f, solution, recomputed)

    def made(
        self, program: Program, f: Formulation, solution: Solution, recomputed: tuple[Rematerialization, ...] = ()
    ) -> Candidate:
        """The candidate of a solution.

        Raises:
            TimeLimitError: the solution has no assignment.
        """
        if len(solution.choices) != len(f.decisions):
            raise TimeLimitError(f"planning for mesh {f.mesh} ended with: {solution.status.value}")
        return Candidate(program, f, solution, assemble(f, solution.choices, self.pins), recomputed)
