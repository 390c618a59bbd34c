"""Collect shardings of inputs from the arguments' metadata and from another plan.

In: a program, a `PlanRequest`. Out: `LayoutHints`: the sharding of inputs by path, and notes for the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import PinError, PlanMismatchError
from autopar.frontend.libraries import active_axis_rules
from autopar.frontend.sharding_metadata import Annotation, Rules, specs_of
from autopar.ir.mesh import MeshShape
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.plans.records import TensorPlan
from autopar.transforms.program import Program


@dataclass(frozen=True, slots=True)
class Layouts:
    """Shardings of inputs by path, and notes for the user."""

    pins: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutHints:
    """Shardings that a plan should follow.

    Args:
        metadata: shardings from the metadata of the arguments.
        is_hint: whether the plan may ignore the metadata.
        like: shardings from another plan.
    """

    metadata: Layouts
    is_hint: bool
    like: Layouts

    @property
    def pins(self) -> dict[str, Any]:
        """All shardings by path; those of another plan take precedence."""
        return {**self.metadata.pins, **self.like.pins}

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.metadata.notes, *self.like.notes)

    @property
    def without_metadata(self) -> LayoutHints:
        """The hints without the metadata."""
        return replace(self, metadata=replace(self.metadata, pins={}))


def layout_hints(program: Program, request: PlanRequest) -> LayoutHints:
    """The shardings of a program's inputs that are known before planning.

    Raises:
        PinError: see `metadata_layouts`.
        PlanMismatchError: `like` is for another mesh, or shares no state with the program.
    """
    like = Layouts()
    if request.like is not None:
        check_mesh_like(request.like, request.meshes[0])
        like = plan_layouts(request.like, program)
    given = request.mesh is not None
    own = metadata_layouts(program, request.metadata, request.logical_axis_rules, request.meshes, mesh_given=given)
    return LayoutHints(own, request.metadata == "hint" and bool(own.pins), like)


def metadata_layouts(
    program: Program, metadata: str, rules: Rules | None, meshes: Sequence[MeshShape], *, mesh_given: bool = True
) -> Layouts:
    """Shardings from the metadata of the arguments, such as Flax's logical axes.

    Args:
        metadata: "pin", "hint" or "ignore".
        rules: mesh axes by logical axis name; by default the rules of the active `nn.logical_axis_rules`.
        meshes: the meshes to choose from.
        mesh_given: whether the user gave the mesh. A rule for an axis that the mesh lacks is then dropped, because it is meant
            for other meshes; otherwise it is an error.

    Raises:
        PinError: `metadata` has another value, or a rule names an axis that no mesh to choose from has.
    """
    if metadata not in ("pin", "hint", "ignore"):
        raise PinError(f'`metadata` is {metadata!r}: give "pin", "hint" or "ignore"')
    annotations = program.as_traced.annotations
    if metadata == "ignore" or not annotations:
        return Layouts()
    axes = list(dict.fromkeys(axis for mesh in meshes for axis in mesh.axis_names))
    rules = active_axis_rules() if rules is None else rules
    specs, lost = specs_of(annotations, rules, axes)
    if metadata == "pin" and not mesh_given and meshes[0].num_devices > 1:
        _check_rules_lead_to_axes(annotations, rules, lost, meshes)
    notes = [
        f"the metadata of {_some(paths)} name {name!r}, which leads to no axis of the mesh ({', '.join(axes)}): it says"
        f' nothing here. To give it one: `logical_axis_rules=[("{name}", "{axes[-1]}")]`'
        for name, paths in lost.items()
    ]
    if specs and metadata == "pin":
        notes.append(f'{_some(specs)} {_are(specs)} split as their metadata say; `metadata="ignore"` plans them freely')
    return Layouts(specs, tuple(notes))


def _check_rules_lead_to_axes(
    annotations: Mapping[str, Annotation],
    rules: Rules,
    lost: Mapping[str, Sequence[str]],
    meshes: Sequence[MeshShape],
) -> None:
    """Refuse rules that name a mesh axis which no mesh to choose from has.

    Args:
        lost: logical names that lead to no mesh axis, with the paths of their arrays.

    Raises:
        PinError: a rule names such an axis; with the rule, and a mesh that has its axes.
    """
    known = list(dict.fromkeys(axis for mesh in meshes for axis in mesh.axis_names))
    for name, paths in lost.items():
        ruled = {axes: None for path in paths for n, axes in (*rules, *annotations[path].rules) if n == name and axes}
        for axes in ruled:
            wanted = (axes,) if isinstance(axes, str) else tuple(axes)
            if set(wanted) <= set(known):
                continue
            from_rules = dict.fromkeys(
                axis for _, entry in rules for axis in ((entry,) if isinstance(entry, str) else entry or ())
            )
            first, *others = dict.fromkeys([*from_rules, *wanted])
            example = ",".join([f"{first}={meshes[0].num_devices}", *(f"{axis}=1" for axis in others)])
            raise PinError(
                f"the logical axis rule ({name!r}, {axes!r}) applies to {_some(paths)}, but no mesh that autopar would choose"
                f" for {meshes[0].num_devices} devices has {_axes(wanted, known)}: the axes there are"
                f" {', '.join(known)}. Give a mesh with the axes of the rules, e.g."
                f' `mesh="{example}"`; or rules that lead to these axes; or `metadata="ignore"`'
            )


def _axes(wanted: Sequence[str], known: Sequence[str]) -> str:
    missing = [f"`{axis}`" for axis in wanted if axis not in known]
    return f"the {'axis' if len(missing) == 1 else 'axes'} {', '.join(missing)}"


def plan_layouts(plan: Plan, program: Program) -> Layouts:
    """The shardings that another step's plan gave the state that both steps share.

    An input is shared if the other step carries an input of the same path, shape and dtype. Where the two steps name their
    arguments differently, one path without the argument's name must end in the other.

    Raises:
        PlanMismatchError: no input is shared.
    """
    state: dict[tuple[tuple[int, ...], str], list[TensorPlan]] = {}
    for tensor in plan.inputs:
        if tensor.role != "data":
            state.setdefault((tensor.shape, tensor.dtype), []).append(tensor)
    pins: dict[str, Any] = {}
    for path, shape, dtype in program.as_traced.signature.inputs:
        found = _matching(path, state.get((tuple(shape), dtype), []))
        if found is not None:
            pins[path] = found.sharding
    if not pins:
        carried = ", ".join(f"`{t.path}`" for group in state.values() for t in group[:1])
        raise PlanMismatchError(
            f"no argument of `{program.signature.name}` is part of the state of `{plan.program.name}`, the plan given as"
            f" `like`, which carries {carried or 'nothing'}. Give the step the same state, or leave `like` out"
        )
    return Layouts(pins, (f"{_some(pins)} {_are(pins)} laid out as by the plan of `{plan.program.name}`",))


def check_mesh_like(plan: Plan, mesh: MeshShape) -> None:
    """Refuse `like` for another mesh.

    Raises:
        PlanMismatchError: the meshes differ.
    """
    if mesh != plan.mesh:
        raise PlanMismatchError(
            f"`like` is planned for mesh {plan.mesh.describe()}, but `mesh` is {mesh.describe()}: state cannot have the same"
            " sharding on both. Leave `mesh` out"
        )


def _matching(path: str, others: Sequence[TensorPlan]) -> TensorPlan | None:
    """The tensor that a path refers to; None where there is none, or several with different shardings."""
    exact = [other for other in others if other.path == path]
    below = [other for other in others if _is_below(path, other.path)]
    for found in (exact, [b for b in below if b.role == "parameter"], below):
        if found and all(other.sharding == found[0].sharding for other in found):
            return found[0]
        if found:
            return None
    return None


def _is_below(path: str, other: str) -> bool:
    """Whether one path ends in the other, both without the argument's name."""
    one, two = path.split("/")[1:], other.split("/")[1:]
    short, long = sorted((one, two), key=len)
    return bool(short) and long[len(long) - len(short) :] == short


def _some(paths: Any) -> str:
    shown = [f"`{path}`" for path in list(paths)[:2]]
    more = len(list(paths)) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _are(paths: Any) -> str:
    return "is" if len(list(paths)) == 1 else "are"
