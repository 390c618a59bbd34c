"""Talk to the head of a server's chain, whichever replica that is, and push again what a dead one had not passed on.

In: requests of one worker. Out: answers. Each request is repeated until the head has answered it; pushes are numbered by share and clock, so that
a repeated one is known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.errors import StoreError
from autopar.membership.wire import Connection, WireError
from autopar.versions.elastic.arrays import receive, send
from autopar.versions.elastic.membership import Membership
from autopar.versions.remote.wire import packed_update
from autopar.versions.server_update import Update

_RETRY_S = 0.05
#: Seconds to wait for a server that has no replica.
LOST_S = 300.0


class OverError(Exception):
    """All shares are computed, and servers end."""


class Head:
    """One worker's connection to one server.

    Attributes:
        clocks: of each share, as the server last said.
    """

    def __init__(self, members: Membership, server: int, worker: str) -> None:
        self._members, self._server, self._worker = members, server, worker
        self._connection: Connection | None = None
        self._connected_to = ""
        #: what this worker pushed and the server has not applied, by share and clock
        self._kept: dict[tuple[int, int], tuple[dict[str, Any], Sequence[Any]]] = {}
        self.clocks: list[int] = []
        self._about: dict[str, Any] = {}

    def about(self) -> dict[str, Any]:
        """What the server has."""
        self._ask({"call": "hello"})
        return self._about

    def status(self) -> list[int]:
        """For each share, the clock before which all its updates were applied or discarded."""
        return self._ask({"call": "status"})[0]["committed"]

    def pull(self, share: int, clock: int) -> tuple[int, list[np.ndarray]] | None:
        """The version and the weights for a share in a clock; None if it has to wait."""
        answer, arrays = self._ask({"call": "pull", "share": share, "clock": clock})
        return None if "wait" in answer else (int(answer["version"]), arrays)

    def push(self, share: int, clock: int, version: int, update: Update) -> None:
        """Push an update, and keep it until it is applied."""
        lines, arrays = packed_update(update)
        request = {"call": "push", "share": share, "clock": clock, "version": version, "update": lines}
        self._kept[share, clock] = request, arrays
        self._ask(request, arrays)

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    # -- helpers -----------------------------------------------------------------------------

    def _ask(self, request: dict[str, Any], arrays: Sequence[Any] = ()) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Ask until the head answers."""
        lost_s = time.monotonic()
        while True:
            self._members.check()
            if self._members.view.over:
                raise OverError
            name = self._members.view.head(self._server)
            if name:
                lost_s = time.monotonic()
                try:
                    self._connect(name)
                    answer, values = self._sent(request, arrays)
                    if "moved" not in answer:
                        return answer, values
                except (OSError, WireError):
                    pass
                self.close()
            elif time.monotonic() - lost_s > LOST_S:
                raise StoreError(
                    f"server {self._server} has had no replica for {LOST_S:g} s: restore its checkpoint in a new process, and serve it"
                )
            self._members.wait_until(lambda view, name=name: view.head(self._server) != name, _RETRY_S)

    def _connect(self, name: str) -> None:
        """Connect to the head, and push again what it does not have."""
        if self._connection is not None and self._connected_to == name:
            return
        self.close()
        self._connection, self._connected_to = self._members.connected(name), name
        about, _ = self._sent({"call": "hello"})
        if "moved" in about:
            raise ConnectionResetError(f"{name} is not the head")
        self._about = about
        for (share, clock), (request, arrays) in sorted(self._kept.items()):
            if clock >= self.clocks[share]:
                self._sent(request, arrays)

    def _sent(self, request: dict[str, Any], arrays: Sequence[Any] = ()) -> tuple[dict[str, Any], list[np.ndarray]]:
        connection, name = self._connection, self._connected_to
        assert connection is not None

        def check() -> None:
            if self._members.view.head(self._server) != name:
                raise ConnectionResetError(f"{name} is gone")

        send(connection, request, arrays, check)
        answer, values = receive(connection, check)
        if "error" in answer:
            raise StoreError(answer["error"])
        if "clocks" in answer:
            self.clocks = list(map(int, answer["clocks"]))
            done = list(map(int, answer["committed"]))
            self._kept = {key: one for key, one in self._kept.items() if key[1] >= done[key[0]]}
        return answer, values
