"""Send copies of this process's shards to agents, while the next steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api.elastic.shards import Shard, in_bytes, shards_of
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
        self._copy: Callable[[Any], Any] = jax.jit(lambda values: [jnp.copy(one) for one in values])
        self._sending: list[threading.Thread] = []
        self.num_bytes = 0

    def take(self, step: int, arrays: Mapping[str, Any]) -> None:
        """Copy the shards on their devices, which the next step then may overwrite, and send the copies in the background, without
        waiting for the steps in flight. Waits for the copy before."""
        self.wait()
        shards = self._copied(shards_of(arrays, self._place.rank == 0))
        thread = threading.Thread(target=self._send_all, args=(step, shards), name="autopar copies", daemon=True)
        thread.start()
        self._sending.append(thread)

    def _copied(self, shards: Sequence[Shard]) -> list[Shard]:
        """Copies of shards: one program for each device."""
        made = list(shards)
        on_devices: dict[Any, list[int]] = {}
        for n, one in enumerate(shards):
            if isinstance(one.data, jax.Array):
                on_devices.setdefault(next(iter(one.data.devices())), []).append(n)
            else:
                made[n] = replace(one, data=np.array(one.data))
        for numbers in on_devices.values():
            for n, data in zip(numbers, self._copy([shards[n].data for n in numbers]), strict=True):
                made[n] = replace(shards[n], data=data)
        return made

    def _send_all(self, step: int, shards: Sequence[Shard]) -> None:
        index, data = in_bytes(shards)
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
                connection = self._connections[address] = Connection.to(address, greeting, _TIMEOUT_S)
            connection.send(message, data)
            connection.receive()
        except OSError:  # that agent has died or is cut off: the keeper decides what follows
            self._connections[address] = None
