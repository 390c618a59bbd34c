"""Define a worker's end of a store that other processes serve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
import numpy as np

from autopar.errors import ProcessError, StoreError
from autopar.versions.checked_update import checked
from autopar.versions.keys import Keys, selected
from autopar.versions.layout_choice import Place
from autopar.versions.remote.channel import Channel, open_channel
from autopar.versions.remote.wire import packed_keys, packed_update
from autopar.versions.server_update import Update
from autopar.versions.store_state import added
from autopar.versions.store_values import Pulled


class StoreClient:
    """One worker of a store that server processes serve by `VersionedStore.serve`; a context, as `VersionedStore.worker`.

    Args:
        worker: its number, from 0; each is one process.
        servers: the number of server processes. Each serves its own keys, and decides on its own when updates are applied.
        name: of the store.
        to: the worker's device or sharding, where its pulls go; None for the first device of its process.

    Raises:
        StoreError: `jax.distributed.initialize` was not called, there is no such worker or it has a client,
            or two servers have a key.
    """

    def __init__(self, worker: int, *, servers: int = 1, name: str = "store", to: Place | None = None) -> None:
        self._worker, self._to = worker, to
        self._channel: Channel = open_channel(name, f"worker {worker}")
        self._numbers: list[Iterator[int]] = [itertools.count() for _ in range(servers)]
        self._open: Update = {}
        self._kinds: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        self._server_of: dict[str, int] = {}
        self._first_shard = [0]
        for server in range(servers):
            hello = self._channel.peek(f"{server}/hello", f"server {server}")
            if not isinstance(worker, int) or isinstance(worker, bool) or not 0 <= worker < hello["workers"]:
                raise StoreError(
                    f"there is no worker {worker!r}: the store is served to workers 0 to {hello['workers'] - 1}"
                )
            self._first_shard.append(self._first_shard[-1] + hello["shards"])
            for key, (shape, dtype) in hello["kinds"].items():
                if key in self._server_of:
                    raise StoreError(f"servers {self._server_of[key]} and {server} both have the key {key!r:.80}")
                self._server_of[key] = server
                self._kinds[key] = (tuple(shape), jax.numpy.dtype(dtype))
        try:
            self._channel.service.put(f"{self._channel.root}/clients/{worker}", b"")
        except ProcessError as error:
            raise StoreError(
                f"worker {worker} of the store {name!r} has, or had, a client already, or process 0 is gone: give each process"
                f" another worker ({error})"
            ) from error
        self._kinds = dict(sorted(self._kinds.items()))
        self._shapes = {key: shape for key, (shape, _) in self._kinds.items()}
        self._channel.beat()

    def pull(self, keys: Keys = None, at_least_clock: int = 0, *, timeout_s: float | None = None) -> Pulled:
        """As `VersionedStore.pull`; shards are numbered server after server."""
        chosen = selected(keys, self._shapes)
        calls: dict[int, int] = {}
        for server in {self._server_of[key]: None for key in chosen}:
            described, rows = packed_keys({key: r for key, r in chosen.items() if self._server_of[key] == server})
            request = {"call": "pull", "keys": described, "at_least_clock": at_least_clock, "timeout_s": timeout_s}
            calls[server] = self._request(server, request, rows)
        values: dict[str, jax.Array] = {}
        versions: dict[int, int] = {}
        clocks: list[int] = []
        for server, number in calls.items():
            answer, arrays = self._answer(server, number)
            values |= dict(zip(answer["keys"], arrays, strict=True))
            versions |= {self._first_shard[server] + shard: version for shard, version in answer["versions"]}
            clocks.append(answer["clock"])
        values = {key: values[key] for key in chosen}
        return Pulled(
            values if self._to is None else jax.device_put(values, self._to), versions, min(clocks, default=0)
        )

    def push(self, keys: Keys, update: Any) -> None:
        """As `VersionedStore.push`; it is sent at `clock()`."""
        self._open = added(self._open, checked(update, keys, selected(keys, self._shapes), self._kinds))

    def clock(self) -> int:
        """As `VersionedStore.clock`."""
        update, self._open = self._open, {}
        calls: dict[int, int] = {}
        for server in range(len(self._numbers)):
            own = {key: pushed for key, pushed in update.items() if self._server_of[key] == server}
            lines, arrays = packed_update(own)
            calls[server] = self._request(server, {"call": "clock", "update": lines}, arrays)
        return min(self._answer(server, number)[0]["clock"] for server, number in calls.items())

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        call: dict[str, Any] = {"call": "leave"} if error is None else {"call": "fail", "error": repr(error)[:500]}
        numbers = [self._request(server, call) for server in range(len(self._numbers))]
        if error is None:
            for server, number in enumerate(numbers):
                self._answer(server, number)
        self._channel.over.set()

    def _request(self, server: int, request: dict[str, Any], arrays: Any = ()) -> int:
        number = next(self._numbers[server])
        self._channel.send(f"{server}/{self._worker}/request/{number}", request, arrays)
        return number

    def _answer(self, server: int, number: int) -> tuple[dict[str, Any], list[jax.Array]]:
        """Wait for a server's answer; an error there is one here."""
        key = f"{server}/{self._worker}/answer/{number}"
        answer, arrays = self._channel.receive(key, f"server {server}")
        if "error" in answer:
            raise StoreError(answer["error"])
        return answer, arrays
