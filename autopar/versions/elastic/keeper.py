"""Know who is alive, and decide who does what: the keeper.

In: connections of servers and workers, with a sign of life from each several times per timeout. Out: `View`s. It computes nothing and holds no weights.
If it dies, members go on as they are, and tell the next keeper at the same address the newest view that they know.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import StoreError
from autopar.versions.elastic.frames import address_of, listening, receive, send
from autopar.versions.elastic.view import View, ended, with_copy, with_replica, with_worker, without

#: Seconds within which a member whose connection broke may come back.
CLOSED_S = 1.0
_LOOK_S = 0.05


@dataclass(slots=True)
class _Member:
    """One connected process."""

    connection: socket.socket
    hello: dict[str, Any]
    heard_s: float
    closed_s: float | None = None


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
        host, _, port = address.rpartition(":")
        try:
            self._socket = listening(host.strip("[]"), int(port))
        except (OSError, ValueError) as error:
            raise StoreError(f"the keeper cannot listen on {address!r}: {error}") from error
        self.token = secrets.token_hex(16) if token is None else token
        self.address = address_of(self._socket)
        self._timeout_s, self._started_s = timeout_s, time.monotonic()
        self._view, self._members = View.of(servers, shares), dict[str, _Member]()
        self._changed = threading.Condition()
        self._closing = False
        self.events: list[tuple[float, str]] = []
        for run in (self._accept, self._watch):
            threading.Thread(target=run, name="autopar store keeper", daemon=True).start()

    @property
    def view(self) -> View:
        """Who does what now."""
        return self._view

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all shares have done what was to be done. Returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._view.over, timeout_s)

    def close(self) -> None:
        """Stop: members go on without a keeper, and look for the next one at this address."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._changed:
            for member in self._members.values():
                with contextlib.suppress(OSError):
                    member.connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> StoreKeeper:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- helpers -----------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        name = ""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            started_s = time.monotonic()

            def check() -> None:
                if not name and time.monotonic() - started_s > self._timeout_s:
                    raise TimeoutError("no greeting")

            hello, _ = receive(connection, check)
            if not secrets.compare_digest(str(hello["token"]), self.token):
                send(connection, {"refused": "another `token` than the keeper's"})
                return
            name = str(hello["name"])
            refusal = self._admitted(name, hello, connection)
            if refusal:
                send(connection, {"refused": refusal})
                return
            while not self._closing:
                message, _ = receive(connection)
                self._heard(name, connection, message)
        except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError):
            pass
        finally:
            connection.close()
            with self._changed:
                member = self._members.get(name)
                if member is not None and member.connection is connection:
                    member.closed_s = time.monotonic()

    def _admitted(self, name: str, hello: dict[str, Any], connection: socket.socket) -> str:
        """Take a member in, or say why not."""
        with self._changed:
            known, view = hello.get("view"), self._view
            newest = view if known is None else _newest(view, View.from_json(known))
            if newest is not view:  # of an earlier keeper, which may not have known who has come since
                for other, member in self._members.items():
                    newest = _with_member(newest, other, member.hello)
            server, shares = hello.get("server"), hello.get("shares", len(view.shares))
            if server is not None and not 0 <= int(server) < len(view.chains):
                return f"server {server}: the store has servers 0 to {len(view.chains) - 1}"
            if int(shares) != len(view.shares):
                return (
                    f"the store has {int(shares)} shares of the batch (`workers=`), and the keeper {len(view.shares)}"
                    " (`shares=`): give both the same"
                )
            newest = _with_member(newest, name, hello)
            if server is not None and newest.lost[int(server)]:
                return (
                    f"all replicas of server {server} have died: restore it from a checkpoint"
                    " (`StoreCheckpoints.restore(store)`) before it serves"
                )
            self._members[name] = _Member(connection, hello, time.monotonic())
            self._becomes(newest, f"{name} has come")
            self._send(self._members[name])
        return ""

    def _heard(self, name: str, connection: socket.socket, message: dict[str, Any]) -> None:
        with self._changed:
            member = self._members.get(name)
            if member is None or member.connection is not connection:
                raise ConnectionResetError("it counts as dead")
            member.heard_s = time.monotonic()
            if "copied" in message:
                self._becomes(
                    with_copy(self._view, int(message["server"]), str(message["copied"])), "a replica has copied"
                )
            if message.get("leaves"):
                self._members.pop(name)
                self._becomes(without(self._view, name), f"{name} has left")
                raise ConnectionResetError("it has left")
            if message.get("over"):
                self._becomes(ended(self._view), f"{name} says that all is done")

    def _watch(self) -> None:
        """Declare members dead."""
        while not self._closing:
            time.sleep(_LOOK_S)
            now_s = time.monotonic()
            with self._changed:
                for name, member in list(self._members.items()):
                    is_closed = member.closed_s is not None and now_s - member.closed_s > CLOSED_S
                    if is_closed or now_s - member.heard_s > self._timeout_s:
                        self._members.pop(name)
                        self._becomes(without(self._view, name), f"{name} is gone")
                        with contextlib.suppress(OSError):
                            member.connection.shutdown(socket.SHUT_RDWR)
                if now_s - self._started_s > self._timeout_s:  # members of an earlier keeper had time to come
                    view = self._view
                    expected = {*view.workers, *(one for chain in (*view.chains, *view.waiting) for one in chain)}
                    for name in sorted(expected - self._members.keys()):
                        self._becomes(without(self._view, name), f"{name} has not come back")

    def _becomes(self, view: View, event: str) -> None:
        if view.epoch == self._view.epoch:
            self._view = view
            return
        self._view = view
        self.events.append((time.time(), event))
        self._changed.notify_all()
        for member in self._members.values():
            self._send(member)

    def _send(self, member: _Member) -> None:
        """A member that does not read is one that is dead soon."""

        def check() -> None:
            raise TimeoutError("it does not read")

        with contextlib.suppress(OSError):
            send(member.connection, {"view": self._view.to_json()}, (), check)


def _newest(own: View, other: View) -> View:
    """The newer of two views; one from an earlier keeper with a higher epoch than anyone has seen."""
    if (len(own.chains), len(own.shares)) != (len(other.chains), len(other.shares)) or other.epoch <= own.epoch:
        return own
    return replace(other, epoch=other.epoch + 1)


def _with_member(view: View, name: str, hello: dict[str, Any]) -> View:
    if hello.get("server") is None:
        return with_worker(view, name)
    return with_replica(view, int(hello["server"]), name, str(hello["address"]), bool(hello["has_state"]))
