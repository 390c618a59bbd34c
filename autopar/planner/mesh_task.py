"""Collect what the plans on one mesh share: the request, the budget, the pins, the solvers.

In: a `PlanRequest`, pins of one mesh. Out: `MeshTask`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.ir.sharding import TensorSharding
from autopar.planner.candidate import Planning
from autopar.planner.program_groups import ProgramGroups, program_groups
from autopar.planner.request import PlanRequest
from autopar.rules.grouping import Group
from autopar.solve.problem import Solver
from autopar.transforms.program import Program

#: How close to the optimum a plan under a budget is proven: of its many problems, the last tenth of a percent would take
#: most of the time.
_LIMITED_GAP = 5e-3
#: Of the solver's time for a mesh, what one of these problems gets at the most.
_LIMITED_SHARE = 0.1

#: A form of a program, and its groups.
Form = tuple[Program, ProgramGroups]


@dataclass(frozen=True, slots=True)
class MeshTask:
    """The request for one mesh.

    Args:
        pins: input position -> sharding.
    """

    request: PlanRequest
    pins: Mapping[int, TensorSharding]

    @property
    def profile(self) -> HardwareProfile:
        return self.request.profile

    @property
    def budget_bytes(self) -> float:
        """The bytes that a plan may fill."""
        return self.request.budget.plan_bytes

    @property
    def solver(self) -> Solver:
        """The solver for problems without a memory limit."""
        return self.request.solver_within()

    @property
    def limited(self) -> Solver:
        """The solver for problems with a memory limit or with estimated prices."""
        return self.request.solver_within(_LIMITED_SHARE, relative_gap=_LIMITED_GAP)

    @property
    def planning(self) -> Planning:
        """The `Planning` that makes candidates on this mesh."""
        return Planning(dict(self.pins), self.solver, self.limited, self._groups_of, self.request.held)

    def _groups_of(self, graph: Graph) -> tuple[Group, ...]:
        return program_groups(graph, self.pins).groups
