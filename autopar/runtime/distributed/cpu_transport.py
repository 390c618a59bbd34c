"""Enable transfers of arrays between CPU processes.

JAX needs an address for them before it initializes its devices. GPUs need nothing. Each CPU process listens on a port,
which JAX's coordination service announces to the others.
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
    """Let `jax.device_put` move arrays between processes, as a pipelined step does.

    Call it in every process after `jax.distributed.initialize` and before anything that uses the devices.
    `parallelize(stages=...)` calls it, so a script that decorates its step before it makes an array need not. It does
    nothing with a single process, on GPUs, or if JAX has an address already.

    Raises:
        ProcessError: JAX has initialized its devices already, and they are CPUs of several processes without addresses.
    """
    if configured_num_processes() < 2 or cross_host_address():
        return
    if backends_are_initialized():
        if jax.devices()[0].platform != "cpu":
            return
        check_arrays_pass("cpu")
    address = own_address(coordinator_address())
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    jax.config.update("jax_cross_host_transfer_socket_address", f"{address}:{port}")


def check_arrays_pass(platform: str) -> None:
    """Refuse to move arrays between CPU processes without an address.

    Args:
        platform: the devices' platform.

    Raises:
        ProcessError: the devices are CPUs without an address.
    """
    if platform == "cpu" and not cross_host_address():
        raise ProcessError(
            "arrays cannot pass between these CPU processes: JAX needs an address before it initializes the devices."
            " Decorate the step, or call `autopar.let_arrays_pass()`, right after"
            " `jax.distributed.initialize(...)`, before any array is made"
        )


def own_address(other: str) -> str:
    """The address of this host by which another host reaches it: the one of the route to that host."""
    host = other.rpartition(":")[0].strip("[]") or "127.0.0.1"
    family, _, _, _, place = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as udp:
        udp.connect(place)  # a UDP socket sends nothing here
        return udp.getsockname()[0]
