"""Make candidate plans on one mesh: formulate, solve and assemble under the user's request and pins.

In: a `PlanRequest`, the pins of one mesh. Out: `MeshTask`, which makes `Candidate`s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import TimeLimitError
from autopar.formulate.formulation import Formulation, formulate
from autopar.hardware.profile import HardwareProfile
from autopar.ir.sharding import TensorSharding
from autopar.planner.candidate import Candidate
from autopar.planner.plan_assembly import assemble
from autopar.planner.program_groups import ProgramGroups, program_groups
from autopar.planner.request import PlanRequest
from autopar.plans.records import Rematerialization
from autopar.solve.problem import Solution, Solver
from autopar.transforms.program import Program

#: Optimality gap of problems with a memory limit. The planner solves many of them, and closing the last tenth of a percent
#: would take most of the time.
_LIMITED_GAP = 5e-3
#: Share of the solver's time on a mesh that one such problem may take.
_LIMITED_SHARE = 0.1

#: A form of a program, and its groups.
Form = tuple[Program, ProgramGroups]


@dataclass(frozen=True, slots=True)
class MeshTask:
    """The task to plan a program on one mesh.

    Args:
        pins: input position -> sharding.
    """

    request: PlanRequest
    pins: dict[int, TensorSharding]

    @property
    def profile(self) -> HardwareProfile:
        return self.request.profile

    @property
    def budget_bytes(self) -> float:
        """The peak memory that a plan may have, per device."""
        return self.request.budget.plan_bytes

    @property
    def solver(self) -> Solver:
        """The solver of problems without a memory limit."""
        return self.request.solver_within()

    @property
    def approximate_solver(self) -> Solver:
        """The solver of problems with a memory limit, and of those with estimated overlap: faster, with a wider gap."""
        return self.request.solver_within(_LIMITED_SHARE, relative_gap=_LIMITED_GAP)

    def plan_without_limit(
        self,
        program: Program,
        like: Formulation,
        recomputed: tuple[Rematerialization, ...],
        seconds_per_byte: float = 0.0,
    ) -> Candidate:
        """Plan a program without a memory limit.

        Args:
            like: the formulation of another form of the program, on the same mesh.
            recomputed: the rematerializations in `program`.
            seconds_per_byte: price of the memory that arguments occupy.

        Raises:
            TimeLimitError: the solver found no assignment in time.
        """
        graph = program.graph
        groups = like.groups if graph is like.graph else program_groups(graph, self.pins).groups
        f = formulate(graph, groups, like.mesh, like.profile, pins=self.pins, held=self.request.held)
        solution = self.solver.solve(f.with_memory_priced(seconds_per_byte))
        if solution.choices:
            memory_s = solution.cost - f.problem.evaluate(solution.choices)
            solution = replace(solution, cost=solution.cost - memory_s, lower_bound=solution.lower_bound - memory_s)
        return self.candidate(program, f, solution, recomputed)

    def candidate(
        self, program: Program, f: Formulation, solution: Solution, recomputed: tuple[Rematerialization, ...] = ()
    ) -> Candidate:
        """The candidate of a solution.

        Raises:
            TimeLimitError: the solution has no assignment.
        """
        if len(solution.choices) != len(f.decisions):
            raise TimeLimitError(f"planning for mesh {f.mesh} ended with: {solution.status.value}")
        return Candidate(program, f, solution, assemble(f, solution.choices, self.pins), recomputed)
