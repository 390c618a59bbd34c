"""Represent an array of stacked layers whose layers are on several submeshes, or an array that replicas of a stage hold.

In: the parts, each sharded over the submesh of a stage.
Out: the leaf that the user holds between steps. If all parts have equally many layers and equal shardings on equal
submeshes, the leaf is one `jax.Array`: the layer dim is sharded over a mesh axis that spans the submeshes, and nothing
is copied. Otherwise the leaf is a `StackedLeaf`, which assembles the array on demand, as JAX has no unequal parts. An
array of replicas is one `jax.Array`, replicated over a mesh axis that spans their submeshes; nothing is copied either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import ProcessError
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.run.transfers import devices_of

#: The mesh axis that spans the stages' submeshes.
STAGE_AXIS = "stage"
#: The mesh axis that spans the submeshes of one stage's replicas.
REPLICA_AXIS = "replica"
#: The attribute of an array on the submeshes of replicas: those of this process, by their shardings.
_REPLICAS = "_autopar_replicas"


class StackedLeaf:
    """An array in parts on several submeshes. It is a pytree leaf; `numpy.asarray` and `jax.numpy.asarray` assemble it.

    Args:
        parts: all parts, by their layers.
    """

    def __init__(self, parts: Mapping[Rows, jax.Array]) -> None:
        self.parts = dict(sorted(parts.items()))

    @property
    def dim(self) -> int:
        """The dim that counts layers."""
        return next(iter(self.parts)).dim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        first = next(iter(self.parts.values()))
        length = sum(rows.stop - rows.start for rows in self.parts)
        return (*first.shape[: self.dim], length, *first.shape[self.dim + 1 :])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> Any:
        return next(iter(self.parts.values())).dtype

    @property
    def weak_type(self) -> bool:
        return bool(next(iter(self.parts.values())).weak_type)

    def assembled(self) -> jax.Array:
        """The whole array: where its parts are, if they are equal but for replicas; else on the devices of the first part.

        Raises:
            ProcessError: some parts are in other processes, and they are unequal.
        """
        if len({rows.stop - rows.start for rows in self.parts}) == 1:
            first: dict[Rows | None, jax.Array] = {rows: _first_replica(part) for rows, part in self.parts.items()}
            if sharding_of_parts({rows: part.sharding for rows, part in first.items()}) is not None:
                return assembled(first)
        parts = list(self.parts.values())
        if not all(part.is_fully_addressable for part in parts):
            raise ProcessError(
                f"{self!r} is in unequal parts on several processes, so it cannot be saved or read as one array."
                " Choose a number of `stages` that divides its layers"
            )
        sharding = parts[0].sharding
        if isinstance(sharding, NamedSharding):  # the layer dim is replicated: the layers may not be divisible
            spec = [None if d == self.dim else names for d, names in enumerate(sharding.spec)]
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
        return jnp.concatenate([jax.device_put(part, sharding) for part in parts], axis=self.dim)

    def block_until_ready(self) -> StackedLeaf:
        jax.block_until_ready(list(self.parts.values()))
        return self

    def __jax_array__(self) -> jax.Array:
        return self.assembled()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.concatenate([np.asarray(part) for part in self.parts.values()], axis=self.dim)
        return whole if dtype is None else whole.astype(dtype)

    def __repr__(self) -> str:
        parts = ", ".join(f"{rows.start}:{rows.stop}" for rows in self.parts)
        return f"StackedLeaf({self.dtype}{list(self.shape)}, layers {parts})"


def as_arrays(tree: Any) -> Any:
    """A state with each `StackedLeaf` replaced by a `jax.Array`, for saving or for other libraries."""
    return jax.tree.map(lambda leaf: leaf.assembled() if isinstance(leaf, StackedLeaf) else leaf, tree)


def part_of(leaf: Any, rows: Rows | None, sharding: NamedSharding) -> Any:
    """Some layers of a leaf, or the whole leaf if `rows` is None. Shards that are already in place are not copied."""
    held = held_part(leaf, rows, sharding)
    if held is not None:
        return held
    if isinstance(leaf, StackedLeaf):
        if rows in leaf.parts:
            return leaf.parts[rows]
        leaf = leaf.assembled()
    return leaf if rows is None else rows_of(leaf, rows)


def held_part(leaf: Any, rows: Rows | None, sharding: NamedSharding) -> jax.Array | None:
    """Some layers of a leaf, or the whole leaf if `rows` is None, of shards that are already as a sharding has them; None
    if some are not. All processes decide the same."""
    if isinstance(leaf, StackedLeaf):
        return held_part(leaf.parts[rows], None, sharding) if rows in leaf.parts else None
    if not isinstance(leaf, jax.Array) or not sharding.device_set <= leaf.sharding.device_set:
        return None
    if rows is None and (leaf.sharding == sharding or leaf.sharding.device_set == sharding.device_set):
        return leaf if leaf.sharding.is_equivalent_to(sharding, leaf.ndim) else None
    replicas: Mapping[NamedSharding, jax.Array] = getattr(leaf, _REPLICAS, {})
    if rows is None and sharding in replicas:
        return replicas[sharding]
    held, rows = leaf.sharding.devices_indices_map(leaf.shape), rows or Rows(0, 0, leaf.shape[0] if leaf.ndim else 0)
    shape = tuple(rows.stop - rows.start if d == rows.dim else size for d, size in enumerate(leaf.shape))
    wanted = sharding.devices_indices_map(shape)
    if not all(_is_same_slice(held[d] or (), at or (), rows, leaf.shape) for d, at in wanted.items()):
        return None
    here = {shard.device: shard.data for shard in leaf.addressable_shards}
    shards = [here[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=leaf.dtype)


def _first_replica(array: jax.Array) -> jax.Array:
    """An array of `array_of_replicas` on the first submesh alone; any other array as it is."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        return array
    first, *names = sharding.mesh.axis_names
    used = {name for entry in sharding.spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    if not first.startswith(REPLICA_AXIS) or first in used or not names:
        return array
    held = held_part(array, None, NamedSharding(Mesh(devices_of(sharding)[0], names), sharding.spec))
    return array if held is None else held


def over_replicas(shardings: Sequence[NamedSharding]) -> NamedSharding:
    """The sharding of an array that is on several submeshes, with the same sharding on each."""
    first = shardings[0]
    if len(shardings) == 1:
        return first
    name = next(
        f"{REPLICA_AXIS}{'_' * n}" for n in range(99) if f"{REPLICA_AXIS}{'_' * n}" not in first.mesh.axis_names
    )
    mesh = Mesh(np.stack([devices_of(one) for one in shardings]), (name, *first.mesh.axis_names))
    return NamedSharding(mesh, first.spec)


def array_of_replicas(replicas: Sequence[Any], sharding: NamedSharding) -> Any:
    """One array on several submeshes.

    Args:
        replicas: the array on each; None where only other processes have it.
        sharding: from `over_replicas`.
    """
    here = [one for one in replicas if one is not None]
    shards = [shard.data for one in here for shard in one.addressable_shards]
    made = jax.make_array_from_single_device_arrays(here[0].shape, sharding, shards, dtype=here[0].dtype)
    setattr(made, _REPLICAS, {one.sharding: one for one in here})  # to take it apart costs as much as to make it
    return made


def rows_of(leaf: Any, rows: Rows) -> Any:
    """Some layers of an array."""
    return leaf[tuple(slice(rows.start, rows.stop) if d == rows.dim else slice(None) for d in range(leaf.ndim))]


def assembled(parts: Mapping[Rows | None, Any]) -> Any:
    """A leaf assembled from its parts."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    arrays = {rows: parts[rows] for rows in sorted(rows for rows in parts if rows is not None)}
    sharding = sharding_of_parts({rows: array.sharding for rows, array in arrays.items()})
    leaf = StackedLeaf(arrays)
    if sharding is None:
        return leaf
    shards = [shard.data for array in arrays.values() for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards, dtype=leaf.dtype)


def sharding_of_parts(parts: Mapping[Rows | None, Any]) -> NamedSharding | None:
    """The sharding of a leaf, given those of its parts; None if no `NamedSharding` describes it."""
    if set(parts) == {None}:
        return parts[None]
    rows = sorted(one for one in parts if one is not None)
    shardings = [parts[one] for one in rows]
    first = shardings[0]
    if not all(isinstance(one, NamedSharding) for one in shardings) or len({r.stop - r.start for r in rows}) != 1:
        return None
    meshes = [one.mesh for one in shardings]
    layouts = {(one.spec, one.mesh.axis_names, one.mesh.devices.shape) for one in shardings}
    devices = [device for mesh in meshes for device in mesh.devices.flat]
    if len(layouts) != 1 or len(set(devices)) != len(devices) or STAGE_AXIS in first.mesh.axis_names:
        return None
    mesh = Mesh(np.stack([one.devices for one in meshes]), (STAGE_AXIS, *first.mesh.axis_names))
    dim = rows[0].dim
    spec = [*first.spec, *(None,) * (dim + 1 - len(first.spec))]
    within = spec[dim] if isinstance(spec[dim], tuple) else () if spec[dim] is None else (spec[dim],)
    spec[dim] = (STAGE_AXIS, *within)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _is_same_slice(held: tuple[slice, ...], wanted: tuple[slice, ...], rows: Rows, shape: tuple[int, ...]) -> bool:
    """Whether the slice of the whole that a device holds is the slice it needs of some layers."""
    for d, (slice_held, slice_wanted, size) in enumerate(zip(held, wanted, shape, strict=True)):
        offset, length = (rows.start, rows.stop - rows.start) if d == rows.dim else (0, size)
        start, stop, _ = slice_wanted.indices(length)
        if slice_held.indices(size)[:2] != (start + offset, stop + offset):
            return False
    return True
