"""Take part in a store with a keeper: give signs of life, and know the newest view.

In: the keeper's address. Out: `Membership`, whose `view` is the newest; it connects again when the connection breaks.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from autopar.errors import StoreError
from autopar.versions.elastic.frames import connected, receive, send
from autopar.versions.elastic.view import View

#: Seconds between two signs of life, between two attempts to connect, and to wait for the first view.
BEAT_S, _RETRY_S, START_S = 0.5, 0.2, 60.0


class Membership:
    """One process's membership.

    Args:
        keeper: its `host:port`.
        hello: what the keeper is told: the name, and of a server its number and address.

    Raises:
        StoreError: no keeper answers, or it refuses the member.
    """

    def __init__(self, keeper: str, token: str, hello: Callable[[], dict[str, Any]]) -> None:
        self._keeper, self.token, self._hello = keeper, token, hello
        self._view: View | None = None
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._sending = threading.Lock()
        self._over, self._refused = False, ""
        self._unsent: list[dict[str, Any]] = []
        threading.Thread(target=self._run, name="autopar store member", daemon=True).start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._view is not None or self._refused, START_S):
                self._over = True
                raise StoreError(f"no keeper answers at {keeper} for {START_S:g} s: start `autopar.StoreKeeper` there")
        self.check()

    @property
    def view(self) -> View:
        """The newest view."""
        assert self._view is not None, "the constructor waits for it"
        return self._view

    def check(self) -> None:
        """Refuse to go on if the keeper counts this process as dead.

        Raises:
            StoreError: with the keeper's reason.
        """
        if self._refused:
            raise StoreError(f"the keeper at {self._keeper} refuses this process: {self._refused}")

    def wait_until(self, holds: Callable[[View], bool], timeout_s: float) -> bool:
        """Wait for a view. Returns whether it came."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._refused) or holds(self.view), timeout_s)

    def report(self, message: dict[str, Any]) -> None:
        """Tell the keeper, once it can be reached."""
        with self._sending:
            self._unsent.append(message)
            self._flush()

    def connected(self, name: str) -> socket.socket:
        """A connection to a replica, which has been shown the token.

        Raises:
            OSError: it is gone.
        """
        address = self.view.addresses.get(name)
        if address is None:
            raise ConnectionResetError(f"{name} is gone")
        connection = connected(address, 5.0)
        send(connection, {"token": self.token})
        return connection

    def leave(self) -> None:
        """End the membership."""
        self.report({"leaves": True})
        self._over = True

    # -- helpers -----------------------------------------------------------------------------

    def _flush(self) -> None:
        connection = self._connection
        while self._unsent and connection is not None:
            try:
                send(connection, self._unsent[0])
            except OSError:
                return
            self._unsent.pop(0)

    def _run(self) -> None:
        while not self._over and not self._refused:
            with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
                self._talk()
            self._connection = None
            time.sleep(_RETRY_S)

    def _talk(self) -> None:
        connection = connected(self._keeper, 5.0)
        try:
            known = {} if self._view is None else {"view": self._view.to_json()}
            send(connection, {"token": self.token, **self._hello(), **known})
            with self._sending:
                self._connection = connection
                self._flush()
            beat_s = 0.0
            while not self._over:
                if time.monotonic() - beat_s > BEAT_S:
                    beat_s = time.monotonic()
                    with self._sending:
                        send(connection, {"beat": True})
                if select.select([connection], [], [], BEAT_S / 2)[0]:
                    self._take(receive(connection)[0])
        finally:
            connection.close()

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            if "refused" in message:
                self._refused = str(message["refused"])
            elif (view := View.from_json(message["view"])).epoch >= (-1 if self._view is None else self._view.epoch):
                self._view = view
            self._changed.notify_all()
