"""A value on its way from one submesh to another.

In: its shape and dtype, how it lies on the one and how the other wants it. Out: `Wire`, how it lies while it passes, on
each side; the programs on either side change the layout, which is made for the cheaper side to do. `Crossing` moves an
array so laid as `jax.device_put` does, device to device.

Between processes every process makes every move, in one order for all, also those of others: the backends number
transfers by counting, in each process, all those between any two (XLA's `CreateNewTransferKey`). Who does not have the
array gives one without shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.errors import ProcessError
from autopar.jax_interop import processes
from autopar.runtime.distributed.cpu_transport import check_arrays_pass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wire:
    """How a value lies while it passes: alike on both sides.

    Args:
        source, target: on the sender's devices, and on the receiver's.
    """

    source: NamedSharding
    target: NamedSharding


def wire(shape: Shape, source: NamedSharding, target: NamedSharding) -> Wire:
    """How a value passes that lies as `source` and is wanted as `target`.

    Between submeshes of the same size it passes in as small parts as either has it in: what is split on one side alone
    is sent in parts, and sliced before or gathered after. Between others, in as many parts as both sizes have in common.
    """
    senders, receivers = devices_of(source), devices_of(target)
    if senders.size == receivers.size:
        if _num_parts(target, shape) >= _num_parts(source, shape):
            return Wire(_on(target, senders), target)
        return Wire(source, _on(source, receivers))
    parts = math.gcd(senders.size, receivers.size)
    dim = _split_dim(shape, parts, (target, source))
    spec = PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, "part")
    ends = [
        NamedSharding(_mesh(devices.reshape(parts, -1), ("part", "copy")), spec) for devices in (senders, receivers)
    ]
    return Wire(*ends)


def as_it_lies(source: NamedSharding, target: NamedSharding) -> Wire | None:
    """The wire of a value that nobody lays anew before it is sent; None where it cannot pass as it lies."""
    if source.mesh.size != target.mesh.size:
        return None
    return Wire(source, _on(source, devices_of(target)))


class Crossing:
    """Moves arrays that lie as a wire's source to its target.

    Args:
        shape, dtype: of the arrays.

    Raises:
        ProcessError: some devices of both sides are one process's, others are not.
    """

    def __init__(self, shape: Shape, dtype: Any, wire: Wire) -> None:
        self.shape, self.dtype, self.wire = shape, dtype, wire
        one, other = processes_of(wire.source), processes_of(wire.target)
        #: Whether sender and receiver are the same devices, and there is nothing to move.
        self.is_here = tuple(devices_of(wire.source).flat) == tuple(devices_of(wire.target).flat)
        self.between_processes = not self.is_here and not (one == other and len(one) == 1)
        if self.between_processes and one & other:
            raise ProcessError(
                f"a value passes from devices of processes {sorted(one)} to devices of processes {sorted(other)}:"
                f" processes {sorted(one & other)} are on both sides, and JAX moves an array either inside one process or"
                " between processes. Give each process the devices of one submesh, or several whole submeshes"
            )
        self.is_mine = jax.process_index() in one | other
        alike = wire.source.mesh.size == wire.target.mesh.size
        self._put = processes.copying_to(wire.target) if alike else lambda value: jax.device_put(value, wire.target)
        if self.between_processes:
            check_arrays_pass(devices_of(wire.source).flat[0].platform)
            self._legs = _legs(shape, wire)
            here = jax.process_index()
            self._copies = [processes.copying_to(target) for _, target in self._legs]
            self._absent = [None if here in processes_of(a) else _absent(shape, dtype, a) for a, _ in self._legs]

    def move(self, value: Any) -> Any:
        """Start to move an array. None stands for one that lies in other processes alone, here and in what is returned."""
        if self.is_here:
            return value
        if not self.between_processes:
            return self._put(value) if self.is_mine else None
        arrived = []
        for (source, _), copy, absent in zip(self._legs, self._copies, self._absent, strict=True):
            arrived.append(copy(absent if absent is not None else self._part_of(value, source)))
        if jax.process_index() not in processes_of(self.wire.target):
            return None
        if len(arrived) == 1 and self._legs[0][1].mesh.size == self.wire.target.mesh.size:
            return _seen_as(arrived[0], self.wire.target)
        shards = [shard.data for one in arrived for shard in one.addressable_shards]
        return jax.make_array_from_single_device_arrays(self.shape, self.wire.target, shards, dtype=self.dtype)

    def _part_of(self, value: Any, source: NamedSharding) -> Any:
        if source is self.wire.source:
            return value
        wanted = set(devices_of(source).flat)
        shards = [shard.data for shard in value.addressable_shards if shard.device in wanted]
        return jax.make_array_from_single_device_arrays(self.shape, source, shards, dtype=self.dtype)


def devices_of(sharding: NamedSharding) -> np.ndarray:
    """Its mesh's devices, as the mesh has them."""
    devices = sharding.mesh.devices
    assert devices is not None, "a pipeline's meshes are of devices"
    return devices


def is_mine(sharding: NamedSharding) -> bool:
    """Whether this process has some of its devices."""
    return jax.process_index() in processes_of(sharding)


def processes_of(sharding: NamedSharding) -> frozenset[int]:
    """The processes that have its devices."""
    return frozenset(device.process_index for device in devices_of(sharding).flat)


def without_shards(shape: Shape, dtype: Any, sharding: jax.sharding.Sharding) -> Any:
    """What stands in this process for an array that lies in others alone."""
    return _absent(shape, dtype, sharding)


def _absent(shape: Shape, dtype: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def _legs(shape: Shape, wire: Wire) -> list[tuple[NamedSharding, NamedSharding]]:
    """Between processes, as many devices receive as send: moves from one copy of the sender's to each of the receiver's."""
    source, target = wire.source, wire.target
    if source.mesh.size == target.mesh.size:
        return [(source, target)]
    senders, receivers = devices_of(source), devices_of(target)
    start = source if senders.shape[1] == 1 else NamedSharding(_mesh(senders[:, :1], ("part", "copy")), source.spec)
    return [
        (start, NamedSharding(_mesh(receivers[:, i : i + 1], ("part", "copy")), target.spec))
        for i in range(receivers.shape[1])
    ]


def _seen_as(value: Any, sharding: NamedSharding) -> Any:
    """An array whose shards lie as a sharding has them, under that sharding."""
    if value.sharding == sharding:
        return value
    shards = [shard.data for shard in value.addressable_shards]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, shards, dtype=value.dtype)


def _on(sharding: NamedSharding, devices: np.ndarray) -> NamedSharding:
    """The same split over other devices, as many."""
    own = devices_of(sharding)
    if tuple(own.flat) == tuple(devices.flat):
        return sharding
    return NamedSharding(_mesh(devices.reshape(own.shape), sharding.mesh.axis_names), sharding.spec)


def _mesh(devices: np.ndarray, names: Sequence[str]) -> Mesh:
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def _num_parts(sharding: NamedSharding, shape: Shape) -> int:
    return math.prod(shape) // max(1, math.prod(sharding.shard_shape(shape)))


def _split_dim(shape: Shape, parts: int, like: Sequence[NamedSharding]) -> int | None:
    """The dim to send in parts: one that is split anyway, else the first that divides."""
    divides = [dim for dim, size in enumerate(shape) if size and size % parts == 0]
    if parts == 1 or not divides:
        return None
    split = [dim for one in like for dim, entry in enumerate(one.spec) if entry is not None]
    return next((dim for dim in split if dim in divides), divides[0])
