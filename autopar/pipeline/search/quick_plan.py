"""A program planned on a submesh for its price alone.

In: the forms of a program, a shape of submesh, its devices' profile. Out: `Candidate`, and the `Way` it was planned: on which
mesh, in which form. Ways are weighed by the solver's cost, and only the chosen one is laid out on a device. What is
found for one run of layers is the way for all that are made of the same.

State (parameters, what an optimizer has, gradients summed up) can be given a price: the dearer, the fewer copies of it
there are on the devices of a submesh, and the more they send each other. And a gradient's sum over devices can be ruled
out to stay pending from microbatch to microbatch, as it does where each runs in programs of its own.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost.hardware_profile import HardwareProfile
from autopar.cost.resharding_matrix import ReshardingTimes
from autopar.errors import TimeLimitError
from autopar.formulate.formulation import Formulation, formulate
from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate
from autopar.planner.mesh_search import distinct_meshes
from autopar.planner.plan_assembly import assemble
from autopar.planner.program_groups import ProgramGroups, program_groups
from autopar.rules.grouping import Group
from autopar.solve.problem import Edge, Problem, Solution, Solver
from autopar.transforms.program import Program

#: Another form is laid out, too, where the solver's costs are as close as this: they know nothing of what is hidden.
_CLOSE = 1.05


@dataclass(frozen=True, slots=True)
class Way:
    """How a program is planned.

    Args:
        form: position in `Program.forms`.
        state_price: of a byte of state, in units of what it takes to write it and to read it in each microbatch.
        pending: whether sums may stay pending.
    """

    mesh: MeshShape
    form: int
    state_price: float = 0.0
    pending: bool = False


class Form:
    """A form of a program, with what no mesh changes: its groups, and primitives without a rule."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @functools.cached_property
    def _grouped(self) -> ProgramGroups:
        return program_groups(self.program.graph)

    @property
    def groups(self) -> tuple[Group, ...]:
        return self._grouped.groups

    @property
    def unknown(self) -> Counter[str]:
        return self._grouped.unknown


@dataclass(frozen=True, slots=True)
class _Solved:
    way: Way
    form: Form
    formulation: Formulation
    solution: Solution

    def made(self, *, figures_only: bool = True) -> Candidate:
        parts = assemble(self.formulation, self.solution.choices, {}, figures_only=figures_only)
        return Candidate(self.form.program, self.formulation, self.solution, parts)


def forms_of(program: Program) -> tuple[Form, ...]:
    """The forms of a program; as it was written comes last."""
    return tuple(map(Form, program.forms))


def meshes_for(meshes: Sequence[MeshShape], profile: HardwareProfile) -> list[MeshShape]:
    """Those that are worth planning for: on two axes all can be split that can be split on one of as many devices."""
    distinct, _ = distinct_meshes(meshes, profile, symmetric=True)
    with_two = [mesh for mesh in distinct if sum(size > 1 for size in mesh.axis_sizes) > 1]
    return with_two or distinct


class QuickPlanner:
    """Plans programs; what some of them share is computed once."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self._times: dict[tuple[MeshShape, HardwareProfile], ReshardingTimes] = {}
        #: The last problem of each form: it is asked at several prices of state.
        self._formulations: dict[int, tuple[Form, MeshShape, HardwareProfile, Formulation]] = {}

    def planned_in(
        self, way: Way, forms: Sequence[Form], profile: HardwareProfile, *, figures_only: bool = True
    ) -> Candidate:
        """The plan in a given way.

        Raises:
            TimeLimitError: the solver found none.
        """
        return self._solved(way, forms, profile).made(figures_only=figures_only)

    def quickest(
        self,
        meshes: Sequence[MeshShape],
        forms: Sequence[Form],
        profile: HardwareProfile,
        *,
        state_price: float = 0.0,
        pending: bool = False,
    ) -> tuple[Candidate, Way]:
        """The quickest plan: the program as it was written on each mesh, and on the best of them its other form.

        Raises:
            TimeLimitError: the solver found none.
        """
        whole = len(forms) - 1
        ways = [Way(mesh, whole, state_price, pending) for mesh in meshes]
        best = min((self._solved(way, forms, profile) for way in ways), key=lambda one: one.solution.cost)
        others = [self._solved(replace(best.way, form=form), forms, profile) for form in range(whole)]
        least = min(one.solution.cost for one in (best, *others))
        close = [one for one in (best, *others) if one.solution.cost <= _CLOSE * least]
        made = [(one.made(), one.way) for one in close]
        return min(made, key=lambda one: one[0].step_time_s)

    def _solved(self, way: Way, forms: Sequence[Form], profile: HardwareProfile) -> _Solved:
        form = forms[way.form]
        f = self._formulation(form, way.mesh, profile)
        solution = self.solver.solve(_priced(f, form.program, way))
        if len(solution.choices) != len(f.decisions):
            raise TimeLimitError(f"planning for mesh {way.mesh} ended with: {solution.status.value}")
        return _Solved(way, form, f, solution)

    def _formulation(self, form: Form, mesh: MeshShape, profile: HardwareProfile) -> Formulation:
        known = self._formulations.get(id(form))
        if known is not None and known[1:3] == (mesh, profile):
            return known[3]
        times = self._times.setdefault((mesh, profile), ReshardingTimes(mesh, profile))
        graph = form.program.graph
        f = formulate(graph, form.groups, mesh, profile, pins={}, resharding=times)
        self._formulations[id(form)] = form, mesh, profile, f
        return f


def _priced(f: Formulation, program: Program, way: Way) -> Problem:
    """The problem, with what a way says of state and of sums."""
    graph, loop = f.graph, program.trace.microbatches
    trips = float(loop.params["length"]) if loop is not None else 1.0
    per_byte = trips * way.state_price * 2 / f.profile.hbm_bytes_per_s
    renewed = {position for position, _ in graph.carried}
    state = [value for position, value in enumerate(graph.inputs) if position in renewed]
    sums = [value for node in graph.nodes if node.primitive == "enter_carry" for value in node.results]
    costs = list(f.problem.node_costs)
    entering = {"enter_carry", "enter_const"}  # what is made before the loop is held as long as state is
    state += [value for node in graph.nodes if node.primitive in entering for value in node.results]
    edges, held = list(f.problem.edges), set(state)
    for flow in f.flows:  # what several read otherwise than it is made is one more buffer
        if flow.value in held and f.decisions[flow.target].kind == "copy":
            info = graph.values[flow.value]
            sizes = np.array([wanted.local_size(info.shape, f.mesh) for wanted in flow.wanted])
            moved = np.array([[made != wanted for wanted in flow.wanted] for made in flow.made])
            edges.append(Edge(flow.source, flow.target, per_byte * info.itemsize * sizes * moved))
    for value in state:
        if value in f.value_made:
            node, shardings = f.value_made[value]
            info = graph.values[value]
            sizes = np.array([sharding.local_size(info.shape, f.mesh) for sharding in shardings])
            costs[node] = costs[node] + per_byte * info.itemsize * sizes
    for value in () if way.pending else sums:
        if value in f.value_made:
            node, shardings = f.value_made[value]
            held = np.array([bool(sharding.unreduced) for sharding in shardings])
            if not held.all():
                costs[node] = np.where(held, np.inf, costs[node])
    return replace(f.problem, node_costs=tuple(costs), edges=tuple(edges))
