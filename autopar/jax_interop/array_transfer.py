"""Move arrays between processes one-sided, by JAX's experimental transfer library.

In: arrays that a process offers. Out: the same arrays in a process that fetches them by address and number. Unlike
collectives it needs no common order of calls, and the end of one process ends no other.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import transfer as _transfer

#: Shape and dtype of an array, as JSON carries them.
Kind = tuple[Sequence[int], str]


@dataclass(frozen=True, slots=True)
class ArrayTransfer:
    """This process's end of all transfers.

    Args:
        server: JAX's; it holds what is offered until it is fetched.
        device: the device to which it fetches.
        numbers: of the offers.
        connections: to other processes, by address.
    """

    server: Any
    device: Any
    numbers: Iterator[int] = field(default_factory=itertools.count)
    connections: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Where other processes fetch what this one offers."""
        return self.server.address()

    def offer(self, arrays: Sequence[jax.Array]) -> int:
        """Let one other process fetch arrays once. Returns the number of the offer."""
        number = next(self.numbers)
        moved = [array for array in arrays if array.size]
        if moved:
            self.server.await_pull(number, moved)
        return number

    def fetch(
        self, address: str, number: int, kinds: Sequence[Kind], check: Callable[[], None] = lambda: None
    ) -> list[jax.Array]:
        """Fetch an offer, to this process's first device.

        Args:
            check: called every second while the arrays have not come, as from a process that is stopped; it raises to give
                up.

        Raises:
            RuntimeError: the other process has ended.
        """
        shapes = [
            jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=jax.sharding.SingleDeviceSharding(self.device))
            for shape, dtype in kinds
        ]
        full = [shape for shape in shapes if shape.size]  # the library does not transfer arrays without elements
        moved: Iterator[jax.Array] = iter(())
        if full:
            if address not in self.connections:
                self.connections[address] = self.server.connect(address)
            arrays = self.connections[address].pull(number, full)
            _wait(arrays, check)
            moved = iter(jax.block_until_ready(arrays))
        return [next(moved) if shape.size else jnp.zeros(shape.shape, shape.dtype) for shape in shapes]


def _wait(arrays: Sequence[Any], check: Callable[[], None]) -> None:
    """Wait until arrays have come, or their transfer has failed."""
    pause_s, checked_s = 1e-4, time.monotonic()
    while not all(array.is_ready() for array in arrays):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5e-3)
        if time.monotonic() - checked_s > 1:
            check()
            checked_s = time.monotonic()


@functools.cache
def start_array_transfer(host: str) -> ArrayTransfer:
    """Listen for fetches on free ports, until the process ends: a server that is destroyed leaves the processes that fetch
    from it waiting for ever.

    Args:
        host: the address by which other processes reach this one.
    """
    device = jax.local_devices()[0]
    bracketed = f"[{host}]" if ":" in host else host
    server = _transfer.start_transfer_server(device.client, f"{bracketed}:0", [f"{bracketed}:0"])
    return ArrayTransfer(server, device)


def kind_of(array: jax.Array) -> Kind:
    """Shape and dtype of an array."""
    return list(array.shape), str(array.dtype)
