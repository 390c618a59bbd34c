"""Send what a replica has applied to the next one of the chain, and wait until it has it.

In: entries, in order. Out: nothing; when `send` returns, every replica after this one has the entry, or counts as dead.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from autopar.errors import StoreError
from autopar.membership.wire import Connection, WireError
from autopar.versions.elastic.arrays import receive, send

if TYPE_CHECKING:
    from autopar.versions.elastic.replica_state import Entry
    from autopar.versions.elastic.server import Replica

_RETRY_S = 0.05
#: Seconds after which a replica that has copied the state and is in no chain is forgotten.
_COPIED_S = 10.0


class FencedError(Exception):
    """This replica counts as dead, and the next one has taken over: it must not answer."""


class Successor:
    """The next replica of a chain, as seen from one."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._connection: Connection | None = None
        self._connected_to = ""
        self._copied, self._copied_s = "", 0.0
        self._last: Entry | None = None

    def add(self, name: str) -> None:
        """A replica has got the state, and will be in the chain soon."""
        self._copied, self._copied_s = name, time.monotonic()

    def send(self, entry: Entry) -> None:
        """Send an entry. The caller holds the lock of the store.

        Raises:
            FencedError: this replica counts as dead.
            StoreError: the next replica cannot apply it.
        """
        while True:
            if self._replica.name not in self._replica.members.view.chains[self._replica.server]:
                raise FencedError
            name = self._name()
            if not name:
                self._last = entry
                return
            try:
                answer = self._sent(name, entry)
                if "behind" in answer and self._last is not None and int(answer["behind"]) == self._last.position:
                    self._sent(name, self._last)
                    answer = self._sent(name, entry)
            except (OSError, WireError):
                self._close()
                if name == self._copied:
                    self._copied = ""  # it is in no chain: it copies again
                    continue
                # until the keeper says so, it may have died or not
                self._replica.members.wait_until(lambda view, name=name: self._name() != name, _RETRY_S)
                self._replica.members.check()
                continue
            if "fenced" in answer:
                raise FencedError
            if "position" in answer:
                self._last = entry
                return
            why = answer.get("error", "it lacks updates that were applied")
            raise StoreError(f"{name} cannot follow: {why}. End it, and start another one")

    def _name(self) -> str:
        """The next replica: that of the view, or one that has just copied the state."""
        view, server = self._replica.members.view, self._replica.server
        following = view.next_of(server, self._replica.name)
        if following:
            self._copied = "" if following == self._copied else self._copied
            return following
        if self._copied and time.monotonic() - self._copied_s > _COPIED_S:
            self._copied = ""
        return self._copied if self._copied in view.waiting[server] else ""

    def _sent(self, name: str, entry: Entry) -> dict[str, Any]:
        if self._connection is None or self._connected_to != name:
            self._close()
            self._connection, self._connected_to = self._replica.members.connected(name), name

        def check() -> None:
            if self._name() != name:
                raise ConnectionResetError(f"{name} is gone")

        message, arrays = entry.packed()
        send(self._connection, {"call": "append", "name": self._replica.name, **message}, arrays, check)
        return receive(self._connection, check)[0]

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
