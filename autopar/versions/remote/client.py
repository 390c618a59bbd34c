"""Define a worker's end of a store that other processes serve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax

from autopar.errors import ProcessError, StoreError
from autopar.versions.checked_update import checked
from autopar.versions.division import Division
from autopar.versions.gather import kept_of
from autopar.versions.held import Held, added, after_iteration
from autopar.versions.keys import Keys, selected
from autopar.versions.layout_choice import Place
from autopar.versions.remote.channel import Channel, open_channel
from autopar.versions.remote.own_server import OwnServer
from autopar.versions.remote.served_keys import held_back_by, served_keys, served_terms
from autopar.versions.remote.wire import packed_keys, packed_update
from autopar.versions.server_update import Update
from autopar.versions.store_values import Pulled

if TYPE_CHECKING:
    from autopar.versions.layout.layout import Layout
    from autopar.versions.store import VersionedStore


class StoreClient:
    """One worker of a store that server processes serve by `VersionedStore.serve`; a context, as `VersionedStore.worker`.

    Args:
        worker: its number, from 0; each is one process.
        servers: the number of server processes. Each serves its own keys, or rows, and decides on its own when updates are
            applied.
        name: of the store.
        to: the worker's device or sharding, where its pulls go; None for the first device of its process.
        own: a store that this process serves to the others, as the server of the worker's number: with one in each process the
            store is decentralized. The worker calls it directly, which is no traffic. A block that ends without an error waits
            until the other workers have left it.
        layout: of `own`.

    Raises:
        StoreError: `jax.distributed.initialize` was not called, there is no such worker or it has a client,
            or two servers have the same rows.
    """

    def __init__(
        self,
        worker: int,
        *,
        servers: int = 1,
        name: str = "store",
        to: Place | None = None,
        own: VersionedStore | None = None,
        layout: Layout | None = None,
    ) -> None:
        self._worker, self._to = worker, to
        self._channel: Channel = open_channel(name, f"worker {worker}")
        self._numbers: list[Iterator[int]] = [itertools.count() for _ in range(servers)]
        self._open: Update = {}
        self._held, self._count, self._clock = Held(), 0, 0
        self._before: dict[str, tuple[jax.Array, dict[int, int]]] = {}
        self._own = None if own is None else OwnServer(own, worker, servers, name, layout)
        hellos = [self._channel.peek(f"{server}/hello", f"server {server}") for server in range(servers)]
        for hello in hellos:
            if not isinstance(worker, int) or isinstance(worker, bool) or not 0 <= worker < hello["workers"]:
                raise StoreError(
                    f"there is no worker {worker!r}: the store is served to workers 0 to {hello['workers'] - 1}"
                )
        self._policy = held_back_by([hello["held_by"] for hello in hellos])
        self._first_shard = [0, *itertools.accumulate(hello["shards"] for hello in hellos)]
        self._division: Division = served_keys([hello["kinds"] for hello in hellos])
        self._terms = served_terms([hello["takes"] for hello in hellos])
        try:
            self._channel.service.put(f"{self._channel.root}/clients/{worker}", b"")
        except ProcessError as error:
            raise StoreError(
                f"worker {worker} of the store {name!r} has, or had, a client already, or process 0 is gone: give each process"
                f" another worker ({error})"
            ) from error
        self._shapes = self._division.shapes
        self._channel.beat()

    def pull(
        self, keys: Keys = None, at_least_clock: int = 0, *, timeout_s: float | None = None, newest: bool = False
    ) -> Pulled:
        """As `VersionedStore.pull`; shards are numbered server after server.

        Args:
            newest: whether to read as no worker does, without waiting as the policy says.
        """
        chosen = selected(keys, self._shapes)
        if (
            not newest
            and self._count % self._policy.period
            and (kept := kept_of(self._before, chosen, self._to)) is not None
        ):
            return Pulled(*kept, self._clock)
        by_server = self._by_server(self._division.chosen(chosen))
        calls: dict[int, int] = {}
        for server, own in by_server.items():
            if not self._is_own(server):
                described, rows = packed_keys({self._key(name): rows for name, rows in own.items()})
                request = {"call": "pull", "keys": described, "at_least_clock": at_least_clock, "timeout_s": timeout_s}
                request |= {"newest": newest}
                calls[server] = self._request(server, request, rows)
        values: dict[str, jax.Array] = {}
        versions: dict[int, int] = {}
        clocks: list[int] = []
        for server, own in by_server.items():
            if self._own is not None and self._is_own(server):
                own_keys = {self._key(name): rows for name, rows in own.items()}
                pulled = self._own.pull(own_keys, at_least_clock, timeout_s, newest=newest)
                arrays, found, clock = [*pulled.values.values()], pulled.versions.items(), pulled.clock
            else:
                answer, arrays = self._answer(server, calls[server])
                found, clock = answer["versions"], answer["clock"]
            values |= dict(zip(own, arrays, strict=True))
            versions |= {self._first_shard[server] + shard: version for shard, version in found}
            clocks.append(clock)
        arrays_by_key = self._division.concatenated(values, chosen)
        values = {key: arrays_by_key[key] for key in chosen}
        if self._policy.period > 1 and not newest:
            self._before |= {key: (values[key], versions) for key, rows in chosen.items() if rows is None}
        return Pulled(
            values if self._to is None else jax.device_put(values, self._to), versions, min(clocks, default=0)
        )

    def push(self, keys: Keys, update: Any) -> None:
        """As `VersionedStore.push`; it is sent at `clock()`."""
        if self._terms.kinds:
            parts = checked(update, keys, selected(keys, self._terms.shapes), self._terms.kinds)
        else:
            parts = self._division.update(checked(update, keys, selected(keys, self._shapes), self._division.kinds))
        self._open = added(self._open, parts)

    def clock(self) -> int:
        """As `VersionedStore.clock`."""
        self._count += 1
        sent, self._held = after_iteration(self._policy, self._held, self._count, self._open, self._terms.at_once)
        self._open = {}
        if sent is not None:
            self._clock = self._send(sent)
        return self._clock

    def _send(self, update: Update) -> int:
        """Finish a clock with this update."""
        calls: dict[int, int] = {}
        by_server = self._by_server(update)
        for server in range(len(self._numbers)):
            if not self._is_own(server):
                lines, arrays = packed_update(self._keyed(by_server.get(server, {})))
                calls[server] = self._request(server, {"call": "clock", "update": lines}, arrays)
        clocks = [] if self._own is None else [self._own.clock(self._keyed(by_server.get(self._worker, {})))]
        return min([*clocks, *(self._answer(server, number)[0]["clock"] for server, number in calls.items())])

    def flush(self) -> None:
        """Send what the policy holds back, as one more clock."""
        held, self._held = self._held, Held()
        if held.update:
            self._clock = self._send(held.update)

    def __enter__(self) -> StoreClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.flush()
        call: dict[str, Any] = {"call": "leave"} if error is None else {"call": "fail", "error": repr(error)[:500]}
        others = [server for server in range(len(self._numbers)) if not self._is_own(server)]
        calls = {server: self._request(server, call) for server in others}
        if self._own is not None:
            self._own.leave(error)
        if error is None:
            for server, number in calls.items():
                self._answer(server, number)
            if self._own is not None:
                self._own.wait()
        self._channel.over.set()

    # -- helpers -----------------------------------------------------------------------------

    def _is_own(self, server: int) -> bool:
        return self._own is not None and server == self._worker

    def _key(self, name: str) -> str:
        return name if name in self._terms.kinds else self._division.parts[name].key

    def _keyed(self, update: Update) -> Update:
        """Parts of one server by its own keys."""
        return {self._key(name): pushed for name, pushed in update.items()}

    def _by_server(self, parts: Any) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for name, value in parts.items():
            server = 0 if name in self._terms.kinds else self._division.parts[name].shard
            found.setdefault(server, {})[name] = value
        return found

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
