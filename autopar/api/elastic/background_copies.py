"""Send copies of this process's shards to agents, while the next steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api.elastic.shards import shards_of
from autopar.membership.records import Place
from autopar.membership.wire import Connection

_TIMEOUT_S = 30.0


class BackgroundCopies:
    """The sender of one worker.

    Attributes:
        num_bytes: sent so far, to all agents together.
    """

    def __init__(self, place: Place, token: str) -> None:
        self._place, self._token = place, token
        self._connections: dict[str, Connection | None] = dict.fromkeys(place.partners)
        self._copy: Callable[[Any], Any] | None = None
        self._sending: list[threading.Thread] = []
        self.num_bytes = 0

    def take(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Copy the state on the devices, which the next step then may overwrite, and send the copy in the background, without waiting
        for the steps in flight. Waits for the copy before."""
        self.wait()
        copied = {path: array for path, array in arrays.items() if isinstance(array, jax.Array)}
        if self._copy is None:
            self._copy = jax.jit(
                lambda values: [jnp.copy(one) for one in values],
                out_shardings=[one.sharding for one in copied.values()],
            )
        taken = {**arrays, **dict(zip(copied, self._copy(list(copied.values())), strict=True))}
        thread = threading.Thread(target=self._send_all, args=(step, taken), name="autopar copies", daemon=True)
        thread.start()
        self._sending.append(thread)

    def _send_all(self, step: int, arrays: Mapping[str, Any]) -> None:
        index, data = shards_of(arrays, self._place.rank == 0)
        place = self._place
        message = {"call": "put", "copy": [place.generation, step, place.rank, place.count], "index": index}
        for address in self._connections:  # one thread each: an agent that is frozen holds up no other
            thread = threading.Thread(
                target=self._send, args=(address, message, data), name="autopar copies", daemon=True
            )
            thread.start()
            self._sending.append(thread)
        self.num_bytes += sum(part.nbytes for part in data) * len(self._connections)

    def wait(self) -> None:
        """Wait until the last copy has been sent."""
        while self._sending:
            self._sending.pop().join()

    def _send(self, address: str, message: dict[str, Any], data: Sequence[np.ndarray]) -> None:
        try:
            connection = self._connections[address]
            if connection is None:
                greeting = {"token": self._token, "call": "copies"}
                connection = self._connections[address] = Connection(address, greeting, _TIMEOUT_S)
            connection.send(message, data)
            connection.receive()
        except OSError:  # that agent has died or is cut off: the keeper decides what follows
            self._connections[address] = None
