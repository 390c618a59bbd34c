"""Serve a store as one replica of a chain: answer workers as its head, and apply what the replica before sends.

In: a `VersionedStore` of this process, the keeper's address. Out: answers; the store with all updates when the keeper says that all is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from autopar.errors import AutoparError, StoreError
from autopar.membership import wire
from autopar.runtime.distributed.cpu_transport import own_address
from autopar.versions.checked_update import checked
from autopar.versions.elastic.arrays import receive, send
from autopar.versions.elastic.membership import Membership
from autopar.versions.elastic.replica_state import Entry, applied, committed, is_new, pushed
from autopar.versions.elastic.successor import FencedError, Successor
from autopar.versions.elastic.transfer import packed_snapshot, unpacked_snapshot
from autopar.versions.held import added
from autopar.versions.keys import selected
from autopar.versions.remote.server import rows_of
from autopar.versions.remote.wire import unpacked_update
from autopar.versions.server_update import Update, Weights
from autopar.versions.terms import TermsUpdate

if TYPE_CHECKING:
    from autopar.versions.layout.layout import Layout
    from autopar.versions.store import VersionedStore

#: Seconds for which a pull waits before it is answered that it has to, a replica for the newest view, and for a greeting.
_WAIT_S, _VIEW_S, _GREETING_S = 0.1, 1.0, 5.0


class Replica:
    """One replica of one server.

    Attributes:
        position: the number of entries applied.
        name: as others know it.
    """

    def __init__(
        self, store: VersionedStore, keeper: str, server: int, token: str, layout: Layout | None, log: Path | None
    ) -> None:
        _check(store)
        self.store, self.server = store, server
        self.name = f"server {server}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.position = 0
        self._rows = rows_of(store, server, layout)
        self._log = None if log is None else log.open("a", encoding="utf-8")
        self._lock = store._changed
        #: of the clock before the last one, for shares whose updates did not reach all servers
        self._before: tuple[int, Weights] | None = None
        self._has_state = store._state.board.clocks.version > 0
        self._socket = wire.listening(wire.host_and_port(own_address(keeper), 0))
        self._address, self._has_copied = wire.address_of(self._socket), False
        self.members = Membership(keeper, token, self.name, self._report)
        self._successor = Successor(self)
        threading.Thread(target=self._accept, name="autopar store replica", daemon=True).start()

    def run(self) -> None:
        """Serve until the keeper says that all is done.

        Raises:
            StoreError: the keeper refuses this process.
        """
        try:
            while not self.members.view.over:
                self.members.check()
                if self.name in self.members.view.waiting[self.server]:
                    with contextlib.suppress(OSError, wire.WireError):
                        self._copy()
                self.members.wait_until(lambda view: view.over or self.name in view.waiting[self.server], 0.2)
        finally:
            self._socket.close()
            self.members.leave()
            if self._log is not None:
                self._log.close()

    @property
    def is_head(self) -> bool:
        """Whether this replica answers workers."""
        return self.members.view.head(self.server) == self.name

    # -- requests ----------------------------------------------------------------------------

    def _report(self) -> dict[str, Any]:
        about = {"server": self.server, "address": self._address, "copied": self._has_copied}
        members: Membership | None = getattr(self, "members", None)  # None in the first report
        was_in_chain = members is not None and self.name in members.view.chains[self.server]
        return about | {"shares": self.store.num_workers, "has_state": self._has_state or was_in_chain}

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        """Answer the requests of one process."""
        with contextlib.suppress(OSError, wire.WireError), contextlib.closing(wire.Connection(accepted)) as connection:
            if connection.greeted(self.members.token, _GREETING_S) is None:
                return
            while True:
                request, arrays = receive(connection)
                try:
                    answer, values = self._answered(request, arrays)
                except FencedError:
                    answer, values = {"moved": True}, []
                except AutoparError as error:
                    answer, values = {"error": str(error)}, []
                except OSError:
                    raise
                except Exception as error:  # of a user's update function
                    answer, values = {"error": f"server {self.server}: {type(error).__name__}: {error}"}, []
                send(connection, answer, values)

    def _answered(self, request: dict[str, Any], arrays: Sequence[np.ndarray]) -> tuple[dict[str, Any], Sequence[Any]]:
        call = request["call"]
        if call == "append":
            return self._append(request, arrays), []
        if call == "copy":
            return self._copied_by(request["name"])
        if not self.is_head and not self.members.wait_until(lambda view: view.head(self.server) == self.name, _VIEW_S):
            return {"moved": True}, []
        if call == "hello":
            return self._about(), []
        if call == "status":
            with self._lock:
                return self._clocks(), []
        if call == "pull":
            return self._pulled(int(request["share"]), int(request["clock"]))
        return self._pushed(request, arrays), []

    def _about(self) -> dict[str, Any]:
        """What workers have to know of the keys and clocks."""
        kinds = self.store.kinds
        keys = {key: [list(shape), str(dtype), *self._rows[key]] for key, (shape, dtype) in kinds.items()}
        with self._lock:
            return {"kinds": keys, "shards": self.store.num_shards, **self._clocks()}

    def _clocks(self) -> dict[str, Any]:
        board = self.store._state.board
        return {"clocks": list(board.clocks.vector), "committed": list(committed(board))}

    def _pulled(self, share: int, clock: int) -> tuple[dict[str, Any], Sequence[Any]]:
        """The weights for a share's clock. A share that is further ahead here than on another server gets those of its clock."""
        with self._lock:
            deadline_s = time.monotonic() + _WAIT_S
            board = self.store._state.board

            def must_wait() -> bool:
                own = board.clocks.of(share)
                return (board.must_wait(share) and clock >= own) or (clock > own and not board.policy.catches_up)

            while must_wait():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return {"wait": True, **self._clocks()}, []
                self._lock.wait(left_s)
                board = self.store._state.board
            read = board.read(share)
            if read.clocks != board.clocks:  # a late share that skips clocks
                self.store._state = replace(self.store._state, board=read)
            weights = self.store._state.shards[0].weights
            is_synchronous = board.policy.slack == 0 and not board.policy.catches_up
            if (
                is_synchronous
                and board.clocks.applied > clock
                and self._before is not None
                and self._before[0] == clock
            ):
                weights = self._before[1]
            return {"version": read.clocks.version, **self._clocks()}, list(weights.values())

    def _pushed(self, request: dict[str, Any], arrays: Sequence[np.ndarray]) -> dict[str, Any]:
        share, clock = int(request["share"]), int(request["clock"])
        kinds = self.store.kinds
        shapes = {key: shape for key, (shape, _) in kinds.items()}
        update: Update = {}
        for keys, value in unpacked_update(request["update"], [jax.numpy.asarray(one) for one in arrays]):
            update = added(update, checked(value, keys, selected(keys, shapes), kinds))
        with self._lock:
            state = self.store._state
            if is_new(state, share, clock):
                after, entry = pushed(state, share, clock, int(request["version"]), update, self.position)
                self._commit(after, entry)
            return self._clocks()

    def _commit(self, after: Any, entry: Entry | None) -> None:
        """Replicate an entry, and let readers see the state after it."""
        if entry is not None:
            before = self.store._state
            self._successor.send(entry)
            self.position += 1
            self._note(entry)
            self._before = before.board.clocks.applied, before.shards[0].weights
            self._has_state = True
        self.store._state = after
        self._lock.notify_all()

    def _note(self, entry: Entry) -> None:
        if self._log is not None:
            for group in entry.groups:
                self._log.write(json.dumps({"position": entry.position, "time": time.time(), "applied": group}) + "\n")
            self._log.flush()

    # -- replicas ----------------------------------------------------------------------------

    def _append(self, request: dict[str, Any], arrays: Sequence[np.ndarray]) -> dict[str, Any]:
        """Apply an entry of the replica before."""
        view, sender = self.members.view, request["name"]
        if self.is_head or (self.name in view.chains[self.server] and view.before(self.server, self.name) != sender):
            self.members.wait_until(lambda view: view.before(self.server, self.name) == sender, _VIEW_S)
            if self.members.view.before(self.server, self.name) != sender:
                return {"fenced": True}  # the sender counts as dead
        entry = Entry.unpacked(request, arrays)
        with self._lock:
            if entry.position < self.position:
                return {"position": self.position}
            if entry.position > self.position:
                return {"behind": self.position}
            self._commit(applied(self.store._state, entry), entry)
            return {"position": self.position}

    def _copied_by(self, name: str) -> tuple[dict[str, Any], Sequence[Any]]:
        """Send the state to a replica that waits; from now on it gets every entry."""
        chain = self.members.view.chains[self.server]
        if not chain or chain[-1] != self.name:
            return {"moved": True}, []
        with self._lock:
            message, arrays = packed_snapshot(self.store.snapshot(), self._before)
            self._successor.add(name)
            return {"position": self.position, **message}, arrays

    def _copy(self) -> None:
        """Get the state from the last replica of the chain, and tell the keeper."""
        view = self.members.view
        chain = view.chains[self.server]
        if not chain:
            return
        with contextlib.closing(self.members.connected(chain[-1])) as connection, self._lock:
            send(connection, {"call": "copy", "name": self.name})

            def check() -> None:
                if self.members.view.chains[self.server] != chain:
                    raise ConnectionResetError("the replica that sends the state is gone")

            message, arrays = receive(connection, check)
            if "position" not in message:
                return
            snapshot, self._before = unpacked_snapshot(message, arrays, self.store)
            self.store.load(snapshot)
            self.position, self._has_state = int(message["position"]), True
        self._has_copied = True
        self.members.say()
        self.members.wait_until(lambda view: self.name not in view.waiting[self.server], _VIEW_S)
        self._has_copied = False  # what comes after it is not in this copy


def serve_replica(
    store: VersionedStore,
    keeper: str,
    *,
    token: str,
    server: int = 0,
    layout: Layout | None = None,
    log: str | Path | None = None,
) -> None:
    """Serve a store to `ElasticWorker`s, as one replica of a server, until all shares are computed. It takes over if the replicas
    before it die. The store has all updates afterwards.

    Args:
        store: made with the same arguments in all replicas; its `workers` are the shares of a batch.
        keeper, token: the address of the `StoreKeeper`, and its token.
        server: the number of the server, from 0; each has other keys, or other rows of them by the `layout`.
        log: a file to which each applied update is appended, as JSON.

    Raises:
        StoreError: the keeper refuses this process, or the store cannot be replicated.
    """
    Replica(store, keeper, server, token, layout, None if log is None else Path(log)).run()


def _check(store: VersionedStore) -> None:
    """Refuse stores that cannot be replicated.

    Raises:
        StoreError: several shards, terms, or a policy that holds updates back in the worker.
    """
    policy = store.policy
    if policy.period != 1 or policy.send is not None:
        raise StoreError(
            f"the policy {policy.name!r} holds updates back in a worker, which may die with them: serve one of bsp, ssp, async, discard,"
            " backup or partial with a keeper"
        )
    if store.num_shards != 1:
        raise StoreError(
            f"the store has {store.num_shards} shards: with a keeper each server serves one; give each server a store of its keys"
        )
    if isinstance(store._state.shards[0].update, TermsUpdate):
        raise StoreError(
            "a store whose update is from terms cannot be served with a keeper yet: give it updates of its arrays"
        )
