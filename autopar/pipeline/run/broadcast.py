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
        own: dict[int, Any] = {}
        for device in (*devices_of(source).flat, *jax.devices()):
            own.setdefault(device.process_index, device)
        first = devices_of(source).flat[0]
        has_it = {device.process_index for device in devices_of(source).flat}
        self.sharding = _whole([own[process] for process in sorted(own)])
        self.start = _whole([first])
        self.crossings = [
            Crossing(aval.shape, aval.dtype, Wire(self.start, _whole([own[process]])))
            for process in sorted(own)
            if process not in has_it
        ]
        self.first, self.mine = first, own[jax.process_index()]

    def broadcast(self, value: Any) -> Any:
        """Return this process's copy. `value` is None if only other processes have the array."""
        here = None
        part = None
        if value is not None:
            shards = {shard.device: shard.data for shard in value.addressable_shards}
            here = shards.get(self.mine)
            if self.first in shards:
                part = self._of([shards[self.first]], self.start)
        for crossing in self.crossings:
            moved = crossing.move(part)
            if moved is not None:
                here = moved.addressable_shards[0].data
        assert here is not None, "every process has or receives a copy"
        return self._of([here], self.sharding)

    def _of(self, shards: list[Any], sharding: NamedSharding) -> Any:
        return jax.make_array_from_single_device_arrays(self.aval.shape, sharding, shards, dtype=self.aval.dtype)


def _whole(devices: list[Any]) -> NamedSharding:
    mesh = Mesh(np.array(devices, dtype=object), ("process",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec())
