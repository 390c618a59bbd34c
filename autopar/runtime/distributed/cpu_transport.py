"""Arrays that pass between processes: on CPUs JAX needs an address for that before it first looks at the devices.

GPUs send by themselves. On CPUs each process listens on a port of its own, which JAX's coordination service tells the
others.
"""

from __future__ import annotations

import socket

import jax

from autopar.errors import ProcessError
from autopar.jax_interop.processes import (
    backends_are_initialized,
    configured_num_processes,
    coordinator_address,
    cross_host_address,
)


def let_arrays_pass() -> None:
    """Let `jax.device_put` move arrays between processes, as a step in stages does.

    To be called in every process after `jax.distributed.initialize` and before anything that looks at the devices.
    `parallelize(stages=...)` calls it, so that a script that decorates its step before it makes an array needs not. With
    one process, on GPUs, and where JAX has an address already it changes nothing.

    Raises:
        ProcessError: JAX has looked at its devices already, and they are CPUs of several processes without addresses.
    """
    if configured_num_processes() < 2 or cross_host_address():
        return
    if backends_are_initialized():
        if jax.devices()[0].platform != "cpu":
            return
        check_arrays_pass("cpu")
    address = _own_address(coordinator_address())
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    jax.config.update("jax_cross_host_transfer_socket_address", f"{address}:{port}")


def check_arrays_pass(platform: str) -> None:
    """Refuse to move arrays between processes that cannot.

    Args:
        platform: of the devices.

    Raises:
        ProcessError: they are CPUs, and have no address for that.
    """
    if platform == "cpu" and not cross_host_address():
        raise ProcessError(
            "arrays cannot pass between these CPU processes: JAX has to know an address for that before it first looks at"
            " the devices. Decorate the step, or call `autopar.let_arrays_pass()`, right after"
            " `jax.distributed.initialize(...)`, before any array is made"
        )


def _own_address(other: str) -> str:
    """By which address of this host another host reaches it: that of the way there."""
    host = other.rpartition(":")[0].strip("[]") or "127.0.0.1"
    family, _, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(place)  # sends nothing
        return way.getsockname()[0]
