"""Send messages over TCP: a JSON object, and bytes that belong to it.

In: an object and bytes. Out: the same in another process. The first message of a connection carries the job's token; without it
the connection is closed, before anything else is read. Nothing is unpickled. An end of the connection is an `OSError`, also in the midst
of a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import ProcessError

_HEAD = struct.Struct("!4sIQ")
_MAGIC = b"apm1"
#: The longest object, and what a peer may send before its token was checked.
_MOST_JSON_BYTES, _MOST_GREETING_BYTES = 64 << 20, 1 << 16
#: The longest wait of a thread before it is asked whether to go on, and to connect, in seconds.
_PART_OF_A_WAIT_S, _CONNECT_S = 0.2, 5.0

Message = dict[str, Any]


class WireError(ProcessError):
    """What came over a connection is no message of this job."""


def _head(message: Message, size: int) -> bytes:
    text = json.dumps(message).encode()
    return _HEAD.pack(_MAGIC, len(text), size) + text


def _sizes(head: bytes | bytearray, most: int) -> tuple[int, int]:
    magic, length, size = _HEAD.unpack(head)
    if magic != _MAGIC or length > most or (most == _MOST_GREETING_BYTES and size):
        raise WireError("a connection sent something that is no message of `autopar keep`: it is closed")
    return length, size


def _object(text: bytes | bytearray) -> Message:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError("a message is no JSON object")
    return message


def has_token(greeting: Message, token: str) -> bool:
    """Whether a connection's first message carries the job's token."""
    return hmac.compare_digest(str(greeting.get("token", "")).encode(), token.encode())


async def read(reader: asyncio.StreamReader, most: int = _MOST_JSON_BYTES) -> tuple[Message, bytes]:
    """The next message.

    Raises:
        WireError: it is no message.
        OSError, asyncio.IncompleteReadError: the connection is closed.
    """
    length, size = _sizes(await reader.readexactly(_HEAD.size), most)
    message = _object(await reader.readexactly(length))
    return message, await reader.readexactly(size) if size else b""


async def greeted(reader: asyncio.StreamReader, token: str) -> Message | None:
    """The first message of a connection; None if it does not carry the token."""
    message, _ = await read(reader, _MOST_GREETING_BYTES)
    return message if has_token(message, token) else None


def write(writer: asyncio.StreamWriter, message: Message, *payload: bytes | memoryview) -> None:
    """Send a message, without waiting until it has left."""
    writer.write(_head(message, sum(map(len, payload))))
    for part in payload:
        writer.write(part)


class Connection:
    """A connection of a thread that may wait.

    Args:
        timeout_s: seconds without progress after which a call fails.
    """

    def __init__(self, one: socket.socket, timeout_s: float | None = None) -> None:
        one.settimeout(_PART_OF_A_WAIT_S)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._timeout_s = one, timeout_s

    @classmethod
    def to(cls, address: str, greeting: Message, timeout_s: float | None = None) -> Connection:
        """Connect to `host:port`.

        Args:
            greeting: the first message, with the token.

        Raises:
            OSError: nobody listens there.
        """
        connection = cls(socket.create_connection(split(address), timeout_s or _CONNECT_S), timeout_s)
        connection.send(greeting)
        return connection

    def send(self, message: Message, parts: Sequence[Any] = (), check: Callable[[], None] | None = None) -> None:
        """Send a message with the bytes of `parts`, one after another.

        Args:
            check: called while the other side takes nothing; it raises to give up.

        Raises:
            OSError: the connection is closed, or nothing could be sent within the timeout.
        """
        views = [memoryview(part).cast("B") for part in parts]
        for view in (memoryview(_head(message, sum(view.nbytes for view in views))), *views):
            done = 0
            while done < len(view):
                done += self._moved(self._socket.send, view[done:], check)

    def receive(self, check: Callable[[], None] | None = None) -> tuple[Message, bytearray]:
        """Wait for the next message.

        Args:
            check: called while nothing comes; it raises to give up.

        Raises:
            OSError: the connection is closed, or nothing has come within the timeout.
            WireError: it is no message.
        """
        return self._received(check, _MOST_JSON_BYTES)

    def greeted(self, token: str, timeout_s: float) -> Message | None:
        """The first message of a connection that was accepted; None if it does not carry the token."""
        end_s = time.monotonic() + timeout_s

        def check() -> None:
            if time.monotonic() > end_s:
                raise TimeoutError("no greeting")

        message, _ = self._received(check, _MOST_GREETING_BYTES)
        return message if has_token(message, token) else None

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _received(self, check: Callable[[], None] | None, most: int) -> tuple[Message, bytearray]:
        length, size = _sizes(self._exactly(_HEAD.size, check), most)
        return _object(self._exactly(length, check)), self._exactly(size, check)

    def _exactly(self, size: int, check: Callable[[], None] | None) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._moved(self._socket.recv_into, view[done:], check)
            if not count:
                raise ConnectionResetError("the other process has closed the connection")
            done += count
        return data

    def _moved(self, move: Callable[[memoryview], int], rest: memoryview, check: Callable[[], None] | None) -> int:
        """The number of bytes that were moved, as soon as some are."""
        start_s = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                return move(rest)
            if check is not None:
                check()
            if self._timeout_s is not None and time.monotonic() - start_s > self._timeout_s:
                raise TimeoutError(f"the other process has moved no data for {self._timeout_s:g} s")


def listening(address: str) -> socket.socket:
    """A socket that accepts connections at `host:port`; port 0 takes a free one.

    Raises:
        ProcessError: it is no `host:port`.
        OSError: the address is in use, or not this host's.
    """
    host, port = split(address, least=0)
    server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(128)
    except OSError:
        server.close()
        raise
    return server


def address_of(server: socket.socket) -> str:
    """The `host:port` of a listening socket."""
    return host_and_port(*server.getsockname()[:2])


def split(address: str, least: int = 1) -> tuple[str, int]:
    """Host and port.

    Args:
        least: the smallest port.

    Raises:
        ProcessError: it is no `host:port`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not least <= int(port) < 65536:
        raise ProcessError(f"an address is `host:port`, as in `10.0.0.1:7077`; got {address!r}")
    return host.strip("[]"), int(port)


def host_and_port(host: str, port: int) -> str:
    """The address of a host and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
