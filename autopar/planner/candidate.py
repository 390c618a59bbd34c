"""A candidate for the plan: a program, an assignment of strategies, and what they lead to on a device.

In: a program, a formulation and its solution. Out: `Candidate`, by which plans are compared; `Planning`, which makes them.
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
    """A plan's parts, and the program that they are of.

    Args:
        recomputed: what the program computes again, of the program that it was made of.
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
        """By what plans are compared: the geometric mean of both opinions of the step time, where there are two. Each
        knows something that the other does not of what hides what. XLA's estimator takes a loop for one short operation; and it
        has one price for a convolution and for attention in a library whatever their size, so what these take beyond that by
        the device's own rates is added."""
        prediction = self.parts.prediction
        if prediction.xla_step_time_s is None or self.program.graph.loops:
            return prediction.step_time_s
        return math.sqrt(prediction.step_time_s * (prediction.xla_step_time_s + self.parts.simulation.unestimated_s))

    @property
    def peak_bytes(self) -> float:
        return self.parts.prediction.peak_bytes


@dataclass(frozen=True, slots=True)
class Planning:
    """What all plans on one mesh share.

    Args:
        limited: solver of problems with a limit of memory.
        groups_of: the groups of a graph.
        held: values of the graph as it is before anything is computed again, and how they must be made.
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
        """The plan of a program without a budget.

        Args:
            seconds_per_byte: what it costs to hold arguments.

        Raises:
            TimeLimitError: the solver found none.
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
        """The plan of a solution.

        Raises:
            TimeLimitError: it has no choices.
        """
        if len(solution.choices) != len(f.decisions):
            raise TimeLimitError(f"planning for mesh {f.mesh} ended with: {solution.status.value}")
        return Candidate(program, f, solution, assemble(f, solution.choices, self.pins), recomputed)
