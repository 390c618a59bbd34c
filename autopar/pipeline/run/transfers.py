"""Transfer values between submeshes.

In: a value's shape, dtype, source sharding and target sharding.
Out: a `Wire`, the pair of equally split shardings that the value has during the transfer. The programs on either side
reshard; the wire is chosen so that the cheaper side does. `Crossing` moves an array from device to device along a wire.

Between processes, all processes make the same transfers in the same order, because backends number transfers by
counting them in each process. A process performs those in which one of its devices takes part, and counts the others
(`moves_of_others`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from autopar.errors import ProcessError
from autopar.ir.mesh import MeshShape
from autopar.jax_interop import processes
from autopar.jax_interop.partition_spec import partition_spec, tensor_sharding
from autopar.pipeline.cut.wires import Shape, Split, wire_between
from autopar.runtime.distributed.cpu_transport import check_arrays_pass

#: A transfer between processes, from a sharding to an equal one on as many other devices.
Leg = tuple[NamedSharding, NamedSharding]


@dataclass(frozen=True, slots=True)
class Wire:
    """The shardings of a value during a transfer: the same split on both sides.

    Args:
        source: the sharding on the sender's devices.
        target: the sharding on the receiver's devices.
    """

    source: NamedSharding
    target: NamedSharding


def wire(shape: Shape, source: NamedSharding, target: NamedSharding) -> Wire:
    """The wire for a value that is sharded as `source` and needed as `target`; see `wire_between`."""
    here, there = wire_between(shape, split_of(source, shape), split_of(target, shape))
    if source.mesh.size == target.mesh.size:
        given = target if there == split_of(target, shape) else source
        return Wire(_on(given, devices_of(source)), _on(given, devices_of(target)))
    ends = (
        NamedSharding(_mesh(devices.reshape(end.mesh.axis_sizes), end.mesh.axis_names), partition_spec(end.sharding))
        for end, devices in ((here, devices_of(source)), (there, devices_of(target)))
    )
    return Wire(*ends)


def unchanged_wire(source: NamedSharding, target: NamedSharding) -> Wire | None:
    """The wire that needs no resharding before the transfer; None if the submeshes have different sizes."""
    if source.mesh.size != target.mesh.size:
        return None
    return Wire(source, _on(source, devices_of(target)))


class Crossing:
    """Moves arrays from a wire's source sharding to its target sharding.

    Args:
        shape: the arrays' shape.
        dtype: the arrays' dtype.

    Attributes:
        is_here: whether sender and receiver are the same devices, so that nothing moves.
        is_mine: whether a device of this process takes part.
        legs: the transfers between processes; none inside one process.

    Raises:
        ProcessError: the two submeshes have some but not all processes in common.
    """

    def __init__(self, shape: Shape, dtype: Any, wire: Wire) -> None:
        self.shape, self.dtype, self.wire = shape, dtype, wire
        one, other = processes_of(wire.source), processes_of(wire.target)
        self.is_here = tuple(devices_of(wire.source).flat) == tuple(devices_of(wire.target).flat)
        self.between_processes = not self.is_here and not (one == other and len(one) == 1)
        if self.between_processes and one & other:
            raise ProcessError(
                f"a value passes from devices of processes {sorted(one)} to devices of processes {sorted(other)}:"
                f" processes {sorted(one & other)} are on both sides, and JAX moves an array either inside one process"
                " or between processes. Give each process the devices of one submesh, or several whole submeshes"
            )
        self.is_mine = jax.process_index() in one | other
        self._receives = jax.process_index() in other
        self.legs: list[Leg] = []
        same_size = wire.source.mesh.size == wire.target.mesh.size
        self._put = processes.copying_to(wire.target) if same_size else lambda value: jax.device_put(value, wire.target)
        if self.between_processes:
            check_arrays_pass(devices_of(wire.source).flat[0].platform)
            self.legs = _legs(shape, wire)
            here = jax.process_index()
            self._copies = [processes.copying_to(target) for _, target in self.legs]
            self._absent = [None if here in processes_of(a) else _absent(shape, dtype, a) for a, _ in self.legs]

    def move(self, value: Any) -> Any:
        """Start to move an array. None, as argument or result, stands for an array that only other processes have."""
        if self.is_here:
            return value
        if not self.between_processes:
            return self._put(value) if self.is_mine else None
        arrived = []
        for (source, _), copy, absent in zip(self.legs, self._copies, self._absent, strict=True):
            arrived.append(copy(absent if absent is not None else self._part_of(value, source)))
        if not self._receives:
            return None
        if len(arrived) == 1 and self.legs[0][1].mesh.size == self.wire.target.mesh.size:
            return seen_as(arrived[0], self.wire.target)
        shards = [shard.data for one in arrived for shard in one.addressable_shards]
        return jax.make_array_from_single_device_arrays(self.shape, self.wire.target, shards, dtype=self.dtype)

    def _part_of(self, value: Any, source: NamedSharding) -> Any:
        if source is self.wire.source:
            return value
        wanted = set(devices_of(source).flat)
        shards = [shard.data for shard in value.addressable_shards if shard.device in wanted]
        return jax.make_array_from_single_device_arrays(self.shape, source, shards, dtype=self.dtype)


def devices_of(sharding: NamedSharding) -> np.ndarray:
    """The devices of a sharding's mesh, in the mesh's shape."""
    devices = sharding.mesh.devices
    assert devices is not None, "a pipeline's meshes are concrete"
    return devices


def is_mine(sharding: NamedSharding) -> bool:
    """Whether this process has devices of the sharding."""
    return jax.process_index() in processes_of(sharding)


def processes_of(sharding: NamedSharding) -> frozenset[int]:
    """The processes that have devices of the sharding."""
    return frozenset(device.process_index for device in devices_of(sharding).flat)


def without_shards(shape: Shape, dtype: Any, sharding: jax.sharding.Sharding) -> Any:
    """The placeholder, in this process, for an array that only other processes have."""
    return _absent(shape, dtype, sharding)


def _absent(shape: Shape, dtype: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def _legs(shape: Shape, wire: Wire) -> list[Leg]:
    """The transfers between processes: from one copy at the sender to each copy at the receiver. JAX needs as many
    receiving devices as sending ones in each transfer."""
    source, target = wire.source, wire.target
    if source.mesh.size == target.mesh.size:
        return [(source, target)]
    senders, receivers = devices_of(source), devices_of(target)
    start = source if senders.shape[1] == 1 else NamedSharding(_mesh(senders[:, :1], ("part", "copy")), source.spec)
    return [
        (start, NamedSharding(_mesh(receivers[:, i : i + 1], ("part", "copy")), target.spec))
        for i in range(receivers.shape[1])
    ]


def seen_as(value: Any, sharding: NamedSharding) -> Any:
    """The same shards under another, equivalent sharding."""
    if value.sharding == sharding:
        return value
    shards = [shard.data for shard in value.addressable_shards]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, shards, dtype=value.dtype)


def _on(sharding: NamedSharding, devices: np.ndarray) -> NamedSharding:
    """The same sharding on other devices, as many."""
    own = devices_of(sharding)
    if tuple(own.flat) == tuple(devices.flat):
        return sharding
    return NamedSharding(_mesh(devices.reshape(own.shape), sharding.mesh.axis_names), sharding.spec)


def _mesh(devices: np.ndarray, names: Sequence[str]) -> Mesh:
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def split_of(sharding: NamedSharding, shape: Shape) -> Split:
    mesh = MeshShape(tuple(sharding.mesh.axis_names), tuple(sharding.mesh.axis_sizes))
    return Split(mesh, tensor_sharding(sharding.spec, len(shape)))
