"""Several processes of one job, by JAX's internals: the coordination service, transfers, an end without waiting.

In: nothing; what `jax.distributed.initialize` started. Out: its client and address; copies to other devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jaxlib import xla_client as _xla_client


def coordination_client() -> tuple[Any, int, int]:
    """The client of the service that `jax.distributed.initialize` started (None before that), this process's index, and
    the number of processes. No device is touched."""
    state = _distributed.global_state
    return state.client, state.process_id, state.num_processes


def coordinator_address() -> str:
    """Where the coordination service answers, as given to `jax.distributed.initialize`; "" before that."""
    return _distributed.global_state.coordinator_address or ""


def process_count_said() -> int:
    """How many processes `jax.distributed.initialize` was told of; 1 before that. No device is touched."""
    return _distributed.global_state.num_processes or 1


def backends_are_initialized() -> bool:
    """Whether JAX has looked at its devices."""
    return _xla_bridge.backends_are_initialized()


def cross_host_address() -> str:
    """Where this process listens for arrays of others; "" where it does not."""
    return _xla_bridge.CROSS_HOST_TRANSFER_SOCKET_ADDRESS.value


def copying_to(sharding: jax.sharding.NamedSharding) -> Callable[[Any], Any]:
    """What `jax.device_put(array, sharding)` comes to in the end where the array lies so on other devices, as many: copies
    from device to device, in a tenth of the time that it takes to find that out."""
    devices = sharding._internal_device_list
    copy, as_is = _xla_client.batched_copy_array_to_devices_with_sharding, _xla_client.ArrayCopySemantics.REUSE_INPUT
    return lambda array: copy([array], [devices], [sharding], [as_is])[0]


def leave_without_waiting() -> None:
    """Let this process end at once: JAX would first wait for the others to end too, which hang or are gone."""
    state = _distributed.global_state
    held = (state.client, state.service, state.preemption_sync_manager)
    state.client = state.service = state.preemption_sync_manager = None
    # Others may still read from the service, and its own client ends the process where it is gone: both stay to the end.
    # So do the devices' clients, which would wait until every transfer between processes has come to its end.
    clients = {device.client for device in jax.local_devices()} if backends_are_initialized() else set()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((held, clients)))
