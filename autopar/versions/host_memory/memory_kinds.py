"""Name the memories of a device: its own, and the host memory that it can copy from while it computes."""

from __future__ import annotations

from typing import Any

import jax

#: JAX's name of page-locked host memory.
HOST = "pinned_host"


def is_in_host_memory(place: Any) -> bool:
    """Whether a sharding puts arrays in host memory; a device never does."""
    return isinstance(place, jax.sharding.Sharding) and place.memory_kind == HOST


def device_sharding(array: jax.Array) -> jax.sharding.Sharding:
    """The sharding of an array in the memory of its devices."""
    return _with_kind(array.sharding, next(iter(array.sharding.device_set)).default_memory().kind)


def host_sharding(array: jax.Array) -> jax.sharding.Sharding:
    """The placement on one device, or replicated, in host memory: where results of any shape go."""
    sharding = array.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return _with_kind(sharding, HOST)


def put(array: Any, place: Any) -> jax.Array:
    """`jax.device_put`, also of an array in host memory to the device that owns this memory, which JAX refuses by the device."""
    if isinstance(place, jax.Device) and in_host_memory(array):
        place = jax.sharding.SingleDeviceSharding(place, memory_kind=place.default_memory().kind)
    return jax.device_put(array, place)


def on_device(array: Any) -> Any:
    """An array in the memory of its devices: arithmetic is not done in host memory."""
    return jax.device_put(array, device_sharding(array)) if in_host_memory(array) else array


def in_host_memory(array: Any) -> bool:
    """Whether an array is a JAX array in host memory."""
    return isinstance(array, jax.Array) and is_in_host_memory(array.sharding)


def _with_kind(sharding: Any, kind: str) -> jax.sharding.Sharding:
    return sharding if sharding.memory_kind == kind else sharding.with_memory_kind(kind)
