"""Convert between autopar's `TensorSharding` and JAX's `PartitionSpec` and `NamedSharding`.

In: shardings of a plan, and a concrete or abstract mesh. Out: JAX objects, without device access. The inverse converts
a user's `PartitionSpec`, as in a pin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar.errors import MeshError, PinError
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding


def partition_spec(sharding: TensorSharding) -> PartitionSpec:
    """The `PartitionSpec` of a sharding, without trailing `None`s and without pending reductions.

    >>> partition_spec(TensorSharding(((), ("data", "model"), ())))
    P(None, ('data', 'model'))
    """
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in sharding.dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def tensor_sharding(spec: PartitionSpec, num_dims: int) -> TensorSharding:
    """The inverse of `partition_spec`, for a tensor of `num_dims` dims.

    Raises:
        PinError: the spec has more entries than the tensor has dims, an entry that names no axis, or one axis twice.

    >>> print(tensor_sharding(PartitionSpec("data"), 2))
    P('data')
    """
    if len(spec) > num_dims:
        raise PinError(f"{spec} has {len(spec)} entries, but the tensor has {num_dims} dims: drop the last ones")
    dims = tuple(_entry_axes(entry, spec) for entry in spec) + ((),) * (num_dims - len(spec))
    named = [axis for axes in dims for axis in axes]
    for axis in named:
        if named.count(axis) > 1:
            raise PinError(f"{spec} names the mesh axis {axis!r} twice: an axis can split one dim only")
    return TensorSharding(dims)


def _entry_axes(entry: Any, spec: PartitionSpec) -> tuple[str, ...]:
    if entry is None:
        return ()
    axes = (entry,) if isinstance(entry, str) else entry
    if not isinstance(axes, tuple | list) or not all(isinstance(axis, str) for axis in axes):
        raise PinError(f"{spec} has the entry {entry!r}: write None, an axis name, or a tuple of axis names")
    return tuple(axes)


def check_mesh(planned: MeshShape, mesh: Mesh | AbstractMesh) -> None:
    """Check that a mesh has the planned axes, in name, size and order.

    Raises:
        MeshError: it has other axes; the message names both meshes and the call that makes the planned one.
    """
    names, sizes = tuple(mesh.axis_names), tuple(mesh.axis_sizes)
    if (names, sizes) == (planned.axis_names, planned.axis_sizes):
        return
    given = ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True)) or "no axes"
    raise MeshError(
        f"the plan is for mesh {planned.describe()}, but this mesh has {given}. Make it with"
        f" `jax.make_mesh({planned.axis_sizes}, {planned.axis_names},"
        f" axis_types=(jax.sharding.AxisType.Auto,) * {len(planned.axis_names)})`, or plan again for this one."
    )


def named_shardings(shardings: Iterable[TensorSharding], mesh: Mesh | AbstractMesh) -> list[NamedSharding]:
    """One `NamedSharding` per sharding, on a mesh that `check_mesh` has accepted."""
    return [NamedSharding(mesh, partition_spec(sharding)) for sharding in shardings]
