"""Keep a store whose workers and servers may die: `Members` as the rules of a keeper, in a thread.

It computes nothing and holds no weights. If it dies, members go on as they are, and tell the next keeper at the same address the newest
view that they know.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time

from autopar.errors import ProcessError, StoreError
from autopar.membership.keeper import Keeper
from autopar.membership.wire import address_of, listening
from autopar.versions.elastic.members import Members
from autopar.versions.elastic.view import View

_LOOK_S, _LAST_S = 0.02, 5.0
_log = logging.getLogger("autopar")


class StoreKeeper:
    """The keeper of a store whose workers and servers may die; a context. Run it in a process that computes nothing else.

        with autopar.StoreKeeper("0.0.0.0:4000", servers=2, shares=8) as keeper:
            keeper.wait()

    Args:
        address: `host:port` to listen on; port 0 takes a free one (`keeper.address`).
        servers: the number of servers, each with keys of its own.
        shares: the number of parts of every batch. It does not change; workers have several or none.
        timeout_s: seconds without a sign of life after which a member counts as dead. A process that ends is noticed in one second.
        token: a secret that all members give; None makes one (`keeper.token`).

    Raises:
        StoreError: a number below 1, or an address that cannot be listened on.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        servers: int = 1,
        shares: int = 1,
        timeout_s: float = 5.0,
        token: str | None = None,
    ) -> None:
        for name, value in (("servers", servers), ("shares", shares)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise StoreError(f"`{name}` is {value!r}: give a whole number of at least 1")
        try:
            server = listening(address)
        except (OSError, ProcessError) as error:
            raise StoreError(f"the keeper cannot listen on {address!r}: {error}") from error
        self.token = secrets.token_hex(16) if token is None else token
        self.address = address_of(server)
        self._members = Members(servers, shares, timeout_s, time.monotonic())
        keeper = Keeper(self._members, self.token, timeout_s, _log.warning)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(keeper.serve(server, last_s=0)), name="autopar store keeper", daemon=True
        )
        self._thread.start()

    @property
    def view(self) -> View:
        """Who does what now."""
        return self._members.view

    @property
    def events(self) -> list[tuple[float, str]]:
        """What happened, with the time (`time.monotonic`)."""
        return self._members.events

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all shares have done what was to be done. Returns whether they have."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.view.over and (end_s is None or time.monotonic() < end_s):
            time.sleep(_LOOK_S)
        return self.view.over

    def close(self) -> None:
        """Stop: members go on without a keeper, and look for the next one at this address."""
        self._members.is_over = True
        self._thread.join(_LAST_S)

    def __enter__(self) -> StoreKeeper:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
