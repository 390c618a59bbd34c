"""Choose the sharding in which a value passes from one stage to another, and what either stage does to reshard it.

In: a value's shape, and its planned sharding on the sender's and on the receiver's mesh.
Out: `wire_between`, the `Split` that it has on either side while it passes; `changes_between`, the collectives that lead
from one `Split` to another on the same devices. The executor reshards by the first; the search prices by the second.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.resharding_paths import Move, resharding_moves
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.cut.extract_stages import Port
from autopar.pipeline.cut.pieces import Layout
from autopar.plans.plan import Plan

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A sharding on a mesh of some devices, in row-major order."""

    mesh: MeshShape
    sharding: TensorSharding

    def num_parts(self, shape: Shape) -> int:
        """The number of different parts of a value; 0 if it is empty."""
        return math.prod(shape) // max(1, self.sharding.local_size(shape, self.mesh))


def wire_between(shape: Shape, source: Split, target: Split) -> tuple[Split, Split]:
    """The equal splits of a value on the sender's and on the receiver's devices while it passes.

    Between submeshes of equal size, the value is sent with the finer of the two shardings: the sender slices it, or the
    receiver gathers it. Between other submeshes, it is sent in as many parts as the greatest common divisor of both
    sizes.
    """
    senders, receivers = source.mesh.num_devices, target.mesh.num_devices
    if senders == receivers:
        finer = target if target.num_parts(shape) >= source.num_parts(shape) else source
        return finer, finer
    parts = math.gcd(senders, receivers)
    dim = _split_dim(shape, parts, (target.sharding, source.sharding))
    sharding = TensorSharding(tuple(("part",) if d == dim else () for d in range(len(shape))))
    here, there = (
        Split(MeshShape(("part", "copy"), (parts, size // parts)), sharding) for size in (senders, receivers)
    )
    return here, there


def even_part(sharding: TensorSharding, shape: Shape, mesh: MeshShape) -> TensorSharding:
    """The sharding of those dims that it divides evenly, as an array has between stages."""
    if len(sharding.dims) != len(shape):  # PRNG keys, sharded by their raw numbers
        return sharding
    dims = zip(shape, sharding.dims, strict=True)
    return TensorSharding(tuple(axes if size % mesh.sizes(axes) == 0 else () for size, axes in dims))


def taken_shardings(plan: Plan, layout: Layout, ports: Sequence[Port]) -> dict[Port, TensorSharding]:
    """The sharding that a stage expects of each of its inputs. What it receives in each microbatch arrives with the
    loop's sharding, where that divides it."""
    found = {port: tensor.sharding for port, tensor in zip(ports, plan.inputs, strict=True)}
    defined = {one.value: one.shardings for one in plan.constraints if one.node is None or one.operand is None}
    for value, inner in layout.takes_inside.items():
        if path := defined.get(inner, ()):
            shape = tuple(layout.trace.avals[inner].shape)
            found[Port("inside", value)] = even_part(path[-1].resolved(), shape, plan.mesh)
    return found


def changes_between(shape: Shape, itemsize: float, before: Split, after: Split) -> tuple[MeshShape, tuple[Move, ...]]:
    """The collectives that change a value's split on the same devices, and the mesh whose axes they run over: the
    coarsest that expresses both splits (`named_axes` translates its axes). Axes that split a dim together on both sides
    are one axis, because XLA moves them at once. If no mesh expresses both, as for 2x3 and 3x2, the value is gathered
    whole.
    """
    fine = _refined(before.mesh, after.mesh)
    if fine is None:
        whole = TensorSharding(((),) * len(shape))
        return before.mesh, resharding_moves(before.sharding, whole, shape, itemsize, before.mesh)
    both = [_in_axes_of(fine, split) for split in (before, after)]
    together = [all(_are_one(sharding, *pair) for sharding in both) for pair in itertools.pairwise(fine.axis_names)]
    first = [0, *(n + 1 for n, are_one in enumerate(together) if not are_one)]
    sizes = [math.prod(fine.axis_sizes[n:end]) for n, end in itertools.pairwise([*first, len(fine.axis_sizes)])]
    coarse = MeshShape(tuple(fine.axis_names[n] for n in first), tuple(sizes))
    one, other = (
        TensorSharding(tuple(tuple(axis for axis in axes if axis in coarse.axis_names) for axes in sharding.dims))
        for sharding in both
    )
    if one != other and one.local_shape(shape, coarse) == other.local_shape(
        shape, coarse
    ):  # XLA moves equal parts once
        here, there = _places(one), _places(other)
        moved = tuple(axis for axis in coarse.axis_names if here.get(axis) != there.get(axis))
        return coarse, (Move("collective-permute", moved, other, itemsize * one.local_size(shape, coarse)),)
    return coarse, resharding_moves(one, other, shape, itemsize, coarse)


def named_axes(axes: Sequence[str], of: MeshShape, mesh: MeshShape) -> tuple[str, ...]:
    """The axes of a mesh that are together some axes of another mesh of the same devices; these if there are none.

    >>> named_axes(("axis0",), MeshShape(("axis0", "axis1"), (4, 2)), MeshShape(("a", "b", "c"), (2, 2, 2)))
    ('a', 'b')
    """
    spans = [(of.stride(axis), of.stride(axis) * of.size(axis)) for axis in axes]
    found = tuple(
        axis
        for axis in mesh.axis_names
        if any(low <= mesh.stride(axis) and mesh.stride(axis) * mesh.size(axis) <= high for low, high in spans)
    )
    return found if mesh.sizes(found) == of.sizes(tuple(axes)) else tuple(axes)


def _places(sharding: TensorSharding) -> dict[str, tuple[int, int]]:
    """The dim of each axis, and its place among the axes of this dim."""
    return {axis: (dim, place) for dim, axes in enumerate(sharding.dims) for place, axis in enumerate(axes)}


def _are_one(sharding: TensorSharding, major: str, minor: str) -> bool:
    """Whether two neighbouring axes split one dim as a single axis would, or none."""
    used = sharding.axes
    return not {major, minor} & set(used) or any((major, minor) in itertools.pairwise(dim) for dim in sharding.dims)


def _refined(one: MeshShape, other: MeshShape) -> MeshShape | None:
    """The coarsest mesh of which each axis of both is a product of neighbouring axes."""
    strides = sorted({*_strides(one), *_strides(other)}, reverse=True)
    if any(larger % smaller for larger, smaller in itertools.pairwise(strides)):
        return None
    sizes = [larger // smaller for larger, smaller in itertools.pairwise(strides)] or [1]
    return MeshShape(tuple(f"axis{n}" for n in range(len(sizes))), tuple(sizes))


def _strides(mesh: MeshShape) -> list[int]:
    return [mesh.num_devices, *(mesh.stride(axis) for axis in mesh.axis_names)]


def _in_axes_of(fine: MeshShape, split: Split) -> TensorSharding:
    """A sharding by the axes of a refined mesh."""
    mesh, parts = split.mesh, dict[str, tuple[str, ...]]()
    for axis in mesh.axis_names:
        low, high = mesh.stride(axis), mesh.stride(axis) * mesh.size(axis)
        parts[axis] = tuple(one for one in fine.axis_names if low <= fine.stride(one) < high)
    return TensorSharding(tuple(tuple(one for axis in axes for one in parts[axis]) for axes in split.sharding.dims))


def _split_dim(shape: Shape, parts: int, like: Sequence[TensorSharding]) -> int | None:
    """The dim to split into parts: one that either sharding splits, else the first that is divisible."""
    divides = [dim for dim, size in enumerate(shape) if size and size % parts == 0]
    if parts == 1 or not divides:
        return None
    split = [dim for one in like for dim, axes in enumerate(one.dims) if axes]
    return next((dim for dim in split if dim in divides), divides[0])
