"""Broadcast small results, such as the loss, to every process.

In: an array that is replicated over the devices of a stage.
Out: an array with one copy in every process.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.pipeline.run.transfers import Crossing, Wire, devices_of

#: The largest number of elements of a small result.
MOST_ELEMENTS = 1024


def is_small(aval: Any) -> bool:
    """Whether a result is broadcast: it is numeric and has at most `MOST_ELEMENTS` elements."""
    return math.prod(aval.shape) <= MOST_ELEMENTS and not jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)


class Broadcaster:
    """Broadcasts a value to every process.

    Args:
        source: the value's sharding, replicated over the devices of a stage.

    Attributes:
        sharding: the result's sharding, replicated over one device of each process.
    """

    def __init__(self, aval: Any, source: NamedSharding) -> None:
        self.aval, self.source = aval, source
        device_of: dict[int, Any] = {}
        for device in (*devices_of(source).flat, *jax.devices()):
            device_of.setdefault(device.process_index, device)
        first = devices_of(source).flat[0]
        holders = {device.process_index for device in devices_of(source).flat}
        self.sharding = _replicated([device_of[process] for process in sorted(device_of)])
        self.start = _replicated([first])
        self.crossings = [
            Crossing(aval.shape, aval.dtype, Wire(self.start, _replicated([device_of[process]])))
            for process in sorted(device_of)
            if process not in holders
        ]
        self.first, self.local_device = first, device_of[jax.process_index()]

    def broadcast(self, value: Any) -> Any:
        """Return this process's copy. `value` is None if only other processes have the array."""
        local = None
        part = None
        if value is not None:
            shards = {shard.device: shard.data for shard in value.addressable_shards}
            local = shards.get(self.local_device)
            if self.first in shards:
                part = self._of([shards[self.first]], self.start)
        for crossing in self.crossings:
            moved = crossing.move(part)
            if moved is not None:
                local = moved.addressable_shards[0].data
        assert local is not None, "every process has or receives a copy"
        return self._of([local], self.sharding)

    def _of(self, shards: list[Any], sharding: NamedSharding) -> Any:
        return jax.make_array_from_single_device_arrays(self.aval.shape, sharding, shards, dtype=self.aval.dtype)


def _replicated(devices: list[Any]) -> NamedSharding:
    mesh = Mesh(np.array(devices, dtype=object), ("process",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec())
