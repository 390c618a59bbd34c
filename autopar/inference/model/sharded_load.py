"""Copy a host array, such as a memory-mapped file, to sharded device memory slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding
from numpy.typing import NDArray


class Sliceable(Protocol):
    """An array on the host, or what can be read like one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, bounds: tuple[slice, ...], /) -> NDArray[Any]: ...


def load_sharded(
    view: Sliceable, dtype: Any, sharding: Sharding, report: Callable[[int], None] | None = None
) -> jax.Array:
    """Read each distinct slice of a sharding once, and copy it to its devices before the next one is read.

    Args:
        view: the array on the host, of any dtype and memory order.
        report: called with the bytes of each slice that has been read.
    """
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(view.shape).items():
        bounds = [part.indices(size)[:2] for part, size in zip(index or (), view.shape, strict=True)]
        devices.setdefault(tuple(bounds), []).append(device)
    parts: list[jax.Array] = []
    for bounds, holders in devices.items():
        # A copy: a CPU device aliases the host array, which must not be the memory-mapped file.
        part = np.array(view[tuple(slice(*bound) for bound in bounds)], dtype, order="C")
        parts += jax.block_until_ready([jax.device_put(part, device) for device in holders])
        if report is not None:
            report(part.nbytes)
        del part
    return jax.make_array_from_single_device_arrays(view.shape, sharding, parts)
