"""Take part in a store with a keeper: give signs of life, and know the newest view.

In: the keeper's address. Out: `Membership`, whose `view` is the newest. It is a `Link` in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from autopar.errors import StoreError
from autopar.membership.link import Link, RefusedError
from autopar.membership.wire import Connection, Message, WireError
from autopar.versions.elastic.view import View

#: Seconds to wait for the first view, for a last report, and without a sign of life from the keeper until the link is made again.
START_S, _LAST_S, _TIMEOUT_S = 60.0, 1.0, 3.0


class Membership:
    """One process's membership.

    Args:
        keeper: its `host:port`.
        about: what the keeper is told: of a server its number and address, and what else it reports.

    Raises:
        StoreError: no keeper answers, or it refuses the member.
    """

    def __init__(self, keeper: str, token: str, name: str, about: Callable[[], dict[str, Any]]) -> None:
        self._keeper, self.token, self._about = keeper, token, about
        self._view: View | None = None
        self._changed = threading.Condition()
        self._refused = ""
        self._said: dict[str, bool] = {}
        self._link = Link(keeper, token, name, self._report, self._take, lambda: _TIMEOUT_S, float("inf"))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="autopar store member", daemon=True)
        self._thread.start()
        with self._changed:
            if not self._changed.wait_for(lambda: self._view is not None or self._refused, START_S):
                self._end()
                raise StoreError(f"no keeper answers at {keeper} for {START_S:g} s: start `autopar.StoreKeeper` there")
        self.check()

    @property
    def view(self) -> View:
        """The newest view."""
        assert self._view is not None, "the constructor waits for it"
        return self._view

    def check(self) -> None:
        """Refuse to go on if the keeper refuses this process.

        Raises:
            StoreError: with the keeper's reason.
        """
        if self._refused:
            raise StoreError(f"the keeper at {self._keeper} refuses this process: {self._refused}")

    def wait_until(self, holds: Callable[[View], bool], timeout_s: float) -> bool:
        """Wait for a view. Returns whether it came."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._refused) or holds(self.view), timeout_s)

    def say(self, **what: bool) -> None:
        """Report something from now on."""
        self._said |= what
        self._wake(self._link.changed.set)

    def connected(self, name: str) -> Connection:
        """A connection to a replica, which has been shown the token.

        Raises:
            OSError: it is gone.
        """
        address = self.view.addresses.get(name)
        if address is None:
            raise ConnectionResetError(f"{name} is gone")
        return Connection.to(address, {"token": self.token})

    def leave(self) -> None:
        """End the membership."""
        self._said["leaves"] = True
        self._end()
        self._thread.join(_LAST_S)

    # -- helpers -----------------------------------------------------------------------------

    def _end(self) -> None:
        def end() -> None:
            self._link.is_last = True
            self._link.changed.set()

        self._wake(end)

    def _wake(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call)

    def _run(self) -> None:
        while not self._link.is_last and not self._refused:
            try:
                self._loop.run_until_complete(self._link.run())
            except RefusedError as error:
                self._refuse(error.why)
        self._loop.close()

    def _report(self) -> Message:
        known = {} if self._view is None else {"view": self._view.to_json()}
        return {**self._about(), **self._said, **known}

    def _take(self, answer: Message) -> None:
        if "no" in answer:
            self._refuse(str(answer["no"]))
            return
        try:
            view = View.from_json(answer["view"])
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"the keeper sent a view that cannot be read: {error}") from error
        with self._changed:
            if view.epoch >= (-1 if self._view is None else self._view.epoch):
                self._view = view
            self._changed.notify_all()

    def _refuse(self, why: str) -> None:
        self._link.is_last = True
        with self._changed:
            self._refused = why
            self._changed.notify_all()
