"""Access JAX's internals for multi-process jobs: coordination service, device-to-device copies, exit without waiting.

In: the state that `jax.distributed.initialize` has set. Out: its client and address; copies to other devices.
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
    """The client of JAX's coordination service (None before `jax.distributed.initialize`), this process's index, and the
    number of processes. This does not initialize a backend."""
    state = _distributed.global_state
    return state.client, state.process_id, state.num_processes


def coordinator_address() -> str:
    """The address of the coordination service; "" before `jax.distributed.initialize`."""
    return _distributed.global_state.coordinator_address or ""


def configured_num_processes() -> int:
    """The number of processes in `jax.distributed.initialize`; 1 before that. This does not initialize a backend."""
    return _distributed.global_state.num_processes or 1


def backends_are_initialized() -> bool:
    """Whether JAX has initialized its backends."""
    return _xla_bridge.backends_are_initialized()


def cross_host_address() -> str:
    """The address on which this process receives arrays from others; "" if it does not."""
    return _xla_bridge.CROSS_HOST_TRANSFER_SOCKET_ADDRESS.value


def copying_to(sharding: jax.sharding.NamedSharding) -> Callable[[Any], Any]:
    """A function that copies an array, device by device, to `sharding` on as many other devices.

    The array must already have that sharding on its own devices. It does the copies of `jax.device_put`, without the
    dispatch that takes ten times as long.
    """
    devices = sharding._internal_device_list
    copy, as_is = _xla_client.batched_copy_array_to_devices_with_sharding, _xla_client.ArrayCopySemantics.REUSE_INPUT
    return lambda array: copy([array], [devices], [sharding], [as_is])[0]


def leave_without_waiting() -> None:
    """Let this process exit at once; otherwise JAX waits at exit for other processes, which hang or are gone."""
    state = _distributed.global_state
    held = (state.client, state.service, state.preemption_sync_manager)
    state.client = state.service = state.preemption_sync_manager = None
    # Other processes may still read from the service, and its client aborts the process if the service is gone, so both
    # must stay alive. So must the devices' clients: their destructors wait for all transfers between processes.
    clients = {device.client for device in jax.local_devices()} if backends_are_initialized() else set()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((held, clients)))
