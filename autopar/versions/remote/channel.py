"""Exchange requests and answers between a worker's and a server's process.

In: a message of JSON values, and arrays. Out: both in the other process. Messages pass through JAX's coordination service as
keys; arrays pass directly between the processes, by the address and number in the message.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autopar.errors import ProcessError, StoreError
from autopar.jax_interop.array_transfer import ArrayTransfer, kind_of, start_array_transfer
from autopar.jax_interop.processes import coordinator_address
from autopar.runtime.distributed.coordination_store import Service, service_of_jax
from autopar.runtime.distributed.cpu_transport import own_address
from autopar.versions.host_memory.memory_kinds import on_device

#: Seconds between signs of life, and without one after which a process counts as dead.
BEAT_S, DEAD_S = 1.0, 10.0
#: Seconds to wait for a process that has not given any.
START_S = 300.0
#: The longest single wait, in seconds, so that Ctrl-C is handled and the death of the other process is noticed.
_PART_OF_A_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Channel:
    """One process's connection to the others of a store.

    Args:
        root: the key below which all messages of the store are.
        who: this process, as others look for its signs of life: "server 0", "worker 1".
        seen: for each other process, its last sign of life and when it came.
    """

    service: Service
    transfer: ArrayTransfer
    root: str
    who: str
    over: threading.Event = field(default_factory=threading.Event)
    seen: dict[str, tuple[bytes | None, float]] = field(default_factory=dict)

    def send(self, key: str, message: Any, arrays: Sequence[jax.Array] = ()) -> None:
        """Write a message, and offer arrays with it, from the memory of the device."""
        arrays = [on_device(array) for array in arrays]
        number = self.transfer.offer(arrays) if arrays else -1
        offer = [self.transfer.address, number, [kind_of(array) for array in arrays]]
        self.service.put(f"{self.root}/{key}/value", json.dumps([message, offer]).encode())

    def receive(self, key: str, sender: str, check: Callable[[], None] = lambda: None) -> tuple[Any, list[jax.Array]]:
        """Wait for a message, and fetch its arrays.

        Args:
            sender: who writes it.
            check: called while the message has not come; it raises if it will not.

        Raises:
            StoreError: the sender has given no sign of life for `DEAD_S`, or ended before its arrays were fetched.
        """
        while (found := self.service.get(f"{self.root}/{key}/value", _PART_OF_A_WAIT_S)) is None:
            check()
            self.check_alive(sender)
        self.service.delete(f"{self.root}/{key}")
        message, (address, number, kinds) = json.loads(found)
        try:
            return message, self.transfer.fetch(
                address, number, kinds, lambda: self.check_alive(sender)
            ) if kinds else []
        except RuntimeError as error:
            raise StoreError(f"{sender} of the store ended before its arrays were fetched ({error})") from error

    def peek(self, key: str, sender: str) -> Any:
        """Wait for a message that many read."""
        return json.loads(self.wait_for(f"{key}/value", sender))[0]

    def wait_for(self, key: str, sender: str) -> bytes:
        """Wait for a key below the root that a process sets."""
        while (found := self.service.get(f"{self.root}/{key}", _PART_OF_A_WAIT_S)) is None:
            self.check_alive(sender)
        return found

    def beat(self) -> None:
        """Give signs of life from a thread, until `over`."""

        def run() -> None:
            count = 0
            with contextlib.suppress(ProcessError):  # process 0 has ended
                while not self.over.is_set():
                    self.service.put(f"{self.root}/alive/{self.who}", str(count).encode(), overwrite=True)
                    count += 1
                    self.over.wait(BEAT_S)

        threading.Thread(target=run, name=f"autopar store, {self.who}", daemon=True).start()

    def check_alive(self, who: str) -> None:
        """Refuse to wait for a process that has stopped giving signs of life, or does not start.

        Raises:
            StoreError: it has given none for `DEAD_S`, or has not started within `START_S`.
        """
        sign, now_s = self.service.get(f"{self.root}/alive/{who}", 0.1), time.monotonic()
        before, since_s = self.seen.get(who, (None, now_s))
        sign = before if sign is None else sign  # a service that is slow to answer is no sign of life
        if sign != before or who not in self.seen:
            self.seen[who] = (sign, now_s)
        elif sign is None and now_s - since_s > START_S:
            raise StoreError(
                f"{who} of the store has not started within {START_S:g} s: start as many servers and workers as the store has"
            )
        elif sign is not None and now_s - since_s > DEAD_S:
            raise StoreError(
                f"{who} of the store has given no sign of life for {DEAD_S:g} s: its process died or hangs"
            )


def open_channel(name: str, who: str) -> Channel:
    """The channel of this process for the store of this name.

    Raises:
        StoreError: this is the only process, or `jax.distributed.initialize` was not called.
    """
    service = service_of_jax()
    if service is None:
        raise StoreError(
            "a store is served to other processes: call `jax.distributed.initialize(...)` in all of them first. In one"
            " process, call `pull` and `push` of the store itself"
        )
    transfer = start_array_transfer(own_address(coordinator_address()))
    return Channel(service, transfer, f"autopar/store/{name.encode().hex()}", who)
