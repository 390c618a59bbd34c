"""Hear members, decide by rules, and send each what it is to know: the loop of every keeper.

In: `Rules`, a listening socket. Out: answers to members. All messages are whole states, so a lost message, a broken connection or a new
keeper needs no protocol of its own. The rules have no sockets, clock or threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Protocol

from autopar.membership import wire
from autopar.version import __version__

_TICK_S = 0.05
#: Seconds that a keeper waits for members to take their last answer.
_LAST_S = 3.0
#: Seconds for which a refused connection stays open, so that it can read why.
_REFUSED_S = 1.0


class Rules(Protocol):
    """What a keeper decides."""

    @property
    def is_over(self) -> bool:
        """Whether the keeper is to end."""
        ...

    def heard(self, name: str, report: wire.Message, now_s: float) -> None:
        """A member reports.

        Raises:
            WireError: the report cannot be read.
        """
        ...

    def closed(self, name: str, now_s: float) -> None:
        """The connection of a member broke."""
        ...

    def tick(self, now_s: float) -> None:
        """Decide what follows. What must outlive the keeper is on disk when this returns."""
        ...

    def answer(self, name: str) -> wire.Message:
        """What a member is to know."""
        ...


class Keeper:
    """The keeper of one job.

    Args:
        token: what every connection has to give.
        timeout_s: seconds for a greeting.
        show: shows what is refused, a text.
    """

    def __init__(self, rules: Rules, token: str, timeout_s: float, show: Callable[[str], None]) -> None:
        self._rules, self._token, self._timeout_s, self._show = rules, token, timeout_s, show
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._sent: dict[str, wire.Message] = {}

    async def serve(self, server: socket.socket, last_s: float = _LAST_S) -> None:
        """Serve until the rules say that all is over.

        Args:
            last_s: seconds to wait then for members to take their last answer.
        """
        serving = await asyncio.start_server(self._accept, sock=server, limit=1 << 22)
        try:
            while not self._rules.is_over:
                self._decide()
                await asyncio.sleep(_TICK_S)
            self._decide()
            end_s = time.monotonic() + last_s
            while self._writers and time.monotonic() < end_s:
                await asyncio.sleep(_TICK_S)
        finally:
            serving.close()
            for writer in self._writers.values():
                writer.close()

    def _decide(self) -> None:
        self._rules.tick(time.monotonic())
        for name in list(self._writers):
            if self._rules.answer(name) != self._sent.get(name):
                self._send(name)

    def _send(self, name: str) -> None:
        self._sent[name] = self._rules.answer(name)
        with contextlib.suppress(OSError, RuntimeError):
            wire.write(self._writers[name], self._sent[name])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one member until its connection closes."""
        name = ""
        try:
            greeting = await asyncio.wait_for(wire.greeted(reader, self._token), self._timeout_s)
            refusal = _refusal(greeting)
            if greeting is None or refusal:
                self._show(f"a connection from {writer.get_extra_info('peername')} was refused: {refusal}")
                wire.write(writer, {"refused": refusal})
                await asyncio.wait_for(reader.read(), _REFUSED_S)  # closing with unread data would drop the answer
                return
            while True:
                report, _ = await wire.read(reader)
                self._rules.heard(str(greeting["name"]), report, time.monotonic())
                name = str(greeting["name"])
                self._writers[name] = writer
                self._send(name)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        except wire.WireError as error:
            self._show(str(error))
        finally:
            if name and self._writers.get(name) is writer:
                del self._writers[name]
                self._rules.closed(name, time.monotonic())
            writer.close()


def _refusal(greeting: wire.Message | None) -> str:
    """Why a connection is refused; empty if it is not."""
    if greeting is None:
        return "it does not give this job's token"
    if greeting.get("version") != __version__:
        return f"it has version {greeting.get('version')} of autopar, and the keeper {__version__}: all need the same"
    return "" if isinstance(greeting.get("name"), str) and greeting["name"] else "it gives no name"
