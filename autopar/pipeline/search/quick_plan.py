"""Plan a program on a submesh quickly, to estimate its cost.

In: the forms of a program, a shape of submesh, and its devices' profile.
Out: a `Candidate` and its `Way`: the mesh and the form. Ways are compared by the solver's cost; only the best ones are
assembled as device programs. The way found for one run of layers is reused for all runs of equal layers.

State (parameters, optimizer state, accumulated gradients) can have a price. The higher it is, the fewer copies of state
the devices of a submesh hold, and the more they communicate. Values may be unreduced across microbatches where the
executor can defer their reduction (`cut.deferred_reductions`); if all microbatches are one program, any may.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost.resharding_matrix import ReshardingTimes
from autopar.errors import TimeLimitError
from autopar.formulate.formulation import Formulation, formulate
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.cut.deferred_reductions import deferrable
from autopar.planner.candidate import Candidate
from autopar.planner.mesh_search import distinct_meshes
from autopar.planner.plan_assembly import assemble
from autopar.planner.program_groups import ProgramGroups, program_groups
from autopar.rules.grouping import Group
from autopar.solve.problem import Edge, Problem, Solution, Solver
from autopar.transforms.program import Program

#: Forms whose solver costs are within this factor are assembled too, as the solver ignores overlap.
_CLOSE = 1.05


@dataclass(frozen=True, slots=True)
class Way:
    """The mesh, form and prices for which a program is planned.

    Args:
        mesh: the mesh of the submesh's devices.
        form: the position in `Program.forms`.
        state_price: the price of a byte of state, in units of its write and read time per microbatch.
        pending: whether any reduction may be deferred across microbatches; else those that the executor defers.
    """

    mesh: MeshShape
    form: int
    state_price: float = 0.0
    pending: bool = False


class Form:
    """A form of a program and what does not depend on the mesh: its groups, and its primitives without a rule.

    Args:
        pins: the shardings of inputs that are fixed, by position.
    """

    def __init__(self, program: Program, pins: Mapping[int, TensorSharding] | None = None) -> None:
        self.program, self.pins = program, dict(pins or {})

    @functools.cached_property
    def _grouped(self) -> ProgramGroups:
        return program_groups(self.program.graph, self.pins)

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

    def assembled(self, *, figures_only: bool = True) -> Candidate:
        parts = assemble(self.formulation, self.solution.choices, self.form.pins, figures_only=figures_only)
        return Candidate(self.form.program, self.formulation, self.solution, parts)


def forms_of(program: Program, pins: Mapping[int, TensorSharding] | None = None) -> tuple[Form, ...]:
    """The forms of a program; the original form is the last.

    Args:
        pins: the shardings of inputs that are fixed, by position.
    """
    return tuple(Form(form, pins) for form in program.forms)


def meshes_for(meshes: Sequence[MeshShape], profile: HardwareProfile, *, symmetric: bool = True) -> list[MeshShape]:
    """The meshes worth planning: two axes can express every sharding of a single axis with as many devices.

    Args:
        symmetric: whether the names of axes have no effect. A pin of one axis means another sharding on each mesh.
    """
    distinct, _ = distinct_meshes(meshes, profile, symmetric=symmetric)
    if not symmetric:
        return distinct
    with_two = [mesh for mesh in distinct if sum(size > 1 for size in mesh.axis_sizes) > 1]
    return with_two or distinct


class QuickPlanner:
    """Plans programs and caches what they share."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self._times: dict[tuple[MeshShape, HardwareProfile], ReshardingTimes] = {}
        #: The last problem of each form, reused at several prices of state.
        self._formulations: dict[int, tuple[Form, MeshShape, HardwareProfile, Formulation]] = {}

    def planned_in(
        self, way: Way, forms: Sequence[Form], profile: HardwareProfile, *, figures_only: bool = True
    ) -> Candidate:
        """The plan in a given way.

        Raises:
            TimeLimitError: the solver found no solution in time.
        """
        return self._solved(way, forms, profile).assembled(figures_only=figures_only)

    def quickest(
        self,
        meshes: Sequence[MeshShape],
        forms: Sequence[Form],
        profile: HardwareProfile,
        *,
        state_price: float = 0.0,
        pending: bool = False,
    ) -> tuple[Candidate, Way]:
        """The fastest plan: the original form on each mesh, and the other forms on the best mesh.

        Raises:
            TimeLimitError: the solver found no solution in time.
        """
        whole = len(forms) - 1
        ways = [Way(mesh, whole, state_price, pending) for mesh in meshes]
        best = min((self._solved(way, forms, profile) for way in ways), key=lambda one: one.solution.cost)
        others = [self._solved(replace(best.way, form=form), forms, profile) for form in range(whole)]
        least = min(one.solution.cost for one in (best, *others))
        close = [one for one in (best, *others) if one.solution.cost <= _CLOSE * least]
        assembled = [(one.assembled(), one.way) for one in close]
        return min(assembled, key=lambda one: one[0].step_time_s)

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
        f = formulate(graph, form.groups, mesh, profile, pins=form.pins, resharding=times)
        self._formulations[id(form)] = form, mesh, profile, f
        return f


def _priced(f: Formulation, program: Program, way: Way) -> Problem:
    """The problem with a way's prices of state and constraint on reductions."""
    graph, loop = f.graph, program.trace.microbatches
    iterations = float(loop.params["length"]) if loop is not None else 1.0
    per_byte = iterations * way.state_price * 2 / f.profile.memory_bytes_per_s
    renewed = {position for position, _ in graph.carried}
    state = [value for position, value in enumerate(graph.inputs) if position in renewed]
    sums = [value for node in graph.nodes if node.primitive == "enter_carry" for value in node.results]
    costs = list(f.problem.node_costs)
    entering = {"enter_carry", "enter_const"}  # values made before the loop live as long as state
    state += [value for node in graph.nodes if node.primitive in entering for value in node.results]
    edges, held = list(f.problem.edges), set(state)
    for flow in f.flows:  # a value that is resharded for several users needs one more buffer
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
    waiting = set(sums) if way.pending or loop is None else deferrable(program.trace)
    for value in (value for value in sums if value not in waiting):
        if value in f.value_made:
            node, shardings = f.value_made[value]
            held = np.array([bool(sharding.unreduced) for sharding in shardings])
            if not held.all():
                costs[node] = np.where(held, np.inf, costs[node])
    return replace(f.problem, node_costs=tuple(costs), edges=tuple(edges))
