"""Validate the positions, mesh axes and ranks in a plan file.

In: a plan with checked types. Out: nothing, or a `WrongFieldError` that names the field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING

from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.ir.sharding_changes import moved
from autopar.plans.json_codec import WrongFieldError
from autopar.plans.records import Placement
from autopar.plans.step_trace import check_trace

if TYPE_CHECKING:
    from autopar.plans.plan import Plan


def check_plan(plan: Plan) -> None:
    """Check that the axes, positions and ranks of a plan are valid.

    Raises:
        WrongFieldError: a check fails; it names the field.
    """
    for place, sharding, shape in _shardings(plan):
        check_sharding(sharding, plan.mesh, place)
        if shape is not None and len(sharding.dims) != len(shape):
            raise WrongFieldError(place, f"has {len(sharding.dims)} dims for a tensor of {len(shape)}")
    for number, tensor in enumerate(plan.inputs):
        if not tensor.path:
            raise WrongFieldError(f"inputs[{number}].path", "is empty")
    for name in (one.name for one in fields(plan.prediction)):
        found = getattr(plan.prediction, name)
        if any(number < 0 for number in (found.values() if isinstance(found, dict) else (found or 0.0,))):
            raise WrongFieldError(f"prediction.{name}", "must not be negative")
    if plan.available_devices is not None and plan.available_devices <= plan.num_devices:
        raise WrongFieldError("available_devices", f"must be more than the {plan.num_devices} devices of the mesh")
    _check_collectives(plan)
    check_positions(plan)
    check_trace(plan.trace, plan.memory)
    for number, index in [(n, index) for n, decision in enumerate(plan.decisions) for index in decision.collectives]:
        if not 0 <= index < len(plan.collectives):
            place = f"decisions[{number}].collectives"
            raise WrongFieldError(place, f"points at position {index} of a list of {len(plan.collectives)}")


def _check_collectives(plan: Plan) -> None:
    """Check that registered collectives match the changes of sharding they are used for."""
    for index, one in enumerate(plan.constraints):
        if one.by and (len(one.by) != len(one.shardings) or one.by[0] or one.node is None):
            raise WrongFieldError(
                f"constraints[{index}].by", "must name the collective that leads to each sharding after the first"
            )
        for (before, after), name in zip(pairwise(one.shardings), one.by[1:], strict=False):
            if name and moved(before, after) is None:
                raise WrongFieldError(f"constraints[{index}].by", f"has {name!r} lead from {before} to {after}")


def check_sharding(sharding: TensorSharding, mesh: MeshShape, place: str) -> None:
    """Check that a sharding is valid on a mesh.

    Raises:
        WrongFieldError: it is not; the error names the field `place`.
    """
    named = [axis for axes in (*sharding.dims, sharding.unreduced) for axis in axes]
    for axis in named:
        if axis not in mesh.axis_names:
            raise WrongFieldError(place, f"names the axis {axis!r}, which mesh {mesh.describe()} has not")
    if len(set(named)) != len(named):
        raise WrongFieldError(place, f"uses an axis twice: {sharding}")


def check_positions(plan: Placement) -> None:
    """Check that a plan's arguments and results match those of its program.

    Raises:
        WrongFieldError: a check fails; it names the field.
    """
    num_inputs, num_outputs = len(plan.inputs), len(plan.outputs)
    positions = [("donated", index, num_inputs) for index in plan.donated]
    positions += [("carried", index, num_inputs) for index, _ in plan.carried]
    positions += [("carried", index, num_outputs) for _, index in plan.carried]
    for place, index, size in positions:
        if not 0 <= index < size:
            raise WrongFieldError(place, f"points at position {index} of a list of {size}")
    for place, planned, signature in (
        ("inputs", num_inputs, plan.program.inputs),
        ("outputs", num_outputs, plan.program.outputs),
    ):
        if planned != len(signature):
            raise WrongFieldError(place, f"has {planned} entries, but `program.{place}` has {len(signature)}")


def _shardings(plan: Plan) -> Iterator[tuple[str, TensorSharding, tuple[int, ...] | None]]:
    for name, tensors in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        for index, tensor in enumerate(tensors):
            yield f"{name}[{index}].sharding", tensor.sharding, tensor.shape
    for index, decision in enumerate(plan.decisions):
        yield f"decisions[{index}].sharding", decision.sharding, decision.shape
        if decision.runner_up is not None:
            yield f"decisions[{index}].runner_up", decision.runner_up, decision.shape
    for index, constraint in enumerate(plan.constraints):
        for sharding in constraint.shardings:
            yield f"constraints[{index}].shardings", sharding, None
    for index, region in enumerate(plan.regions):
        for sharding in (*region.operands, *region.results):
            yield f"regions[{index}]", sharding, None
    for index, use in enumerate(plan.collectives):
        yield f"collectives[{index}].axes", TensorSharding((use.axes,)), None
