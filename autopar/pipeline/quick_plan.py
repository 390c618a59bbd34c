"""A program planned on a submesh for its price alone.

In: the forms of a program, a shape of submesh, its devices' profile. Out: `Made`, and the `Way` it was planned: on which
mesh, in which form. Ways are weighed by the solver's cost, and only the chosen one is laid out on a device. What is
found for one run of layers is the way for all that are made of the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.assemble import assemble
from autopar.cost.hardware import HardwareProfile
from autopar.errors import TimeLimitError
from autopar.formulation import Formulation, formulate
from autopar.mesh import MeshShape
from autopar.planner import distinct_meshes, rules_of
from autopar.program import Program
from autopar.rules.groups import Group, form_groups
from autopar.solve.problem import Solution, Solver
from autopar.within_budget import Made

#: Another form is laid out, too, where the solver's costs are as close as this: they know nothing of what is hidden.
_CLOSE = 1.05


@dataclass(frozen=True, slots=True)
class Way:
    """How a program is planned.

    Args:
        form: position in `Program.forms`.
    """

    mesh: MeshShape
    form: int


@dataclass(frozen=True, slots=True)
class Form:
    """A form of a program, with what no mesh changes."""

    program: Program
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class _Solved:
    way: Way
    form: Form
    formulation: Formulation
    solution: Solution

    def made(self) -> Made:
        parts = assemble(self.formulation, self.solution.choices, {})
        return Made(self.form.program, self.formulation, self.solution, parts)


def forms_of(program: Program) -> tuple[Form, ...]:
    """The forms of a program; as it was written comes last."""
    found = []
    for form in program.forms:
        rules, _ = rules_of(form.graph)
        found.append(Form(form, form_groups(form.graph, rules, frozenset(range(len(form.graph.inputs))))))
    return tuple(found)


def meshes_for(meshes: Sequence[MeshShape], profile: HardwareProfile) -> list[MeshShape]:
    """Those that are worth planning for: on two axes all can be split that can be split on one of as many devices."""
    distinct, _ = distinct_meshes(meshes, profile, symmetric=True)
    with_two = [mesh for mesh in distinct if sum(size > 1 for size in mesh.axis_sizes) > 1]
    return with_two or distinct


def planned_in(way: Way, forms: Sequence[Form], profile: HardwareProfile, solver: Solver) -> Made:
    """The plan in a given way.

    Raises:
        TimeLimitError: the solver found none.
    """
    return _solved(way, forms, profile, solver).made()


def quickest(
    meshes: Sequence[MeshShape], forms: Sequence[Form], profile: HardwareProfile, solver: Solver
) -> tuple[Made, Way]:
    """The quickest plan: the program as it was written on each mesh, and on the best of them its other form.

    Raises:
        TimeLimitError: the solver found none.
    """
    whole = len(forms) - 1
    best = min((_solved(Way(mesh, whole), forms, profile, solver) for mesh in meshes), key=lambda one: one.solution.cost)
    others = [_solved(Way(best.way.mesh, form), forms, profile, solver) for form in range(whole)]
    least = min(one.solution.cost for one in (best, *others))
    close = [one for one in (best, *others) if one.solution.cost <= _CLOSE * least]
    made = [(one.made(), one.way) for one in close]
    return min(made, key=lambda one: one[0].step_time_s)


def _solved(way: Way, forms: Sequence[Form], profile: HardwareProfile, solver: Solver) -> _Solved:
    form = forms[way.form]
    f = formulate(form.program.graph, form.groups, way.mesh, profile, pins={}, memory_budget_bytes=None)
    solution = solver.solve(f.problem)
    if len(solution.choices) != len(f.decisions):
        raise TimeLimitError(f"planning for mesh {way.mesh} ended with: {solution.status.value}")
    return _Solved(way, form, f, solution)
