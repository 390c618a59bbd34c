"""Send messages over TCP: a JSON object, and bytes that belong to it.

In: an object and bytes. Out: the same in another process. The first message of a connection carries the job's token; without it
the connection is closed, before anything else is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

from autopar.errors import ProcessError

_HEAD = struct.Struct("!4sIQ")
_MAGIC = b"apm1"
#: The longest object, and what a peer may send before its token was checked.
_MOST_JSON_BYTES, _MOST_GREETING_BYTES = 64 << 20, 1 << 16

Message = dict[str, Any]


class WireError(ProcessError):
    """What came over a connection is no message of this job."""


def _head(message: Message, size: int) -> bytes:
    text = json.dumps(message).encode()
    return _HEAD.pack(_MAGIC, len(text), size) + text


def _sizes(head: bytes, most: int) -> tuple[int, int]:
    magic, length, size = _HEAD.unpack(head)
    if magic != _MAGIC or length > most or (most == _MOST_GREETING_BYTES and size):
        raise WireError("a connection sent something that is no message of `autopar keep`: it is closed")
    return length, size


def _object(text: bytes) -> Message:
    try:
        message = json.loads(text)
    except ValueError as error:
        raise WireError(f"a message is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError("a message is no JSON object")
    return message


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
    return message if hmac.compare_digest(str(message.get("token", "")).encode(), token.encode()) else None


def write(writer: asyncio.StreamWriter, message: Message, *payload: bytes | memoryview) -> None:
    """Send a message, without waiting until it has left."""
    writer.write(_head(message, sum(map(len, payload))))
    for part in payload:
        writer.write(part)


class Connection:
    """A connection of a thread that may wait: a worker's.

    Args:
        address: `host:port`.
        greeting: its first message, with the token.
        timeout_s: seconds without progress after which a call fails.
    """

    def __init__(self, address: str, greeting: Message, timeout_s: float | None) -> None:
        host, port = split(address)
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send(greeting)

    def send(self, message: Message, parts: Sequence[Any] = ()) -> None:
        """Send a message with the bytes of `parts`, one after another.

        Raises:
            OSError: the connection is closed.
        """
        views = [memoryview(part).cast("B") for part in parts]
        self._socket.sendall(_head(message, sum(view.nbytes for view in views)))
        for view in views:
            self._socket.sendall(view)

    def receive(self) -> tuple[Message, bytearray]:
        """Wait for the next message.

        Raises:
            OSError: the connection is closed, or nothing has come within the timeout.
            WireError: it is no message.
        """
        length, size = _sizes(bytes(self._exactly(_HEAD.size)), _MOST_JSON_BYTES)
        return _object(bytes(self._exactly(length))), self._exactly(size)

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise ConnectionResetError("the other process has closed the connection")
            done += count
        return data


def split(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ProcessError: it is no `host:port`.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ProcessError(f"an address is `host:port`, as in `10.0.0.1:7077`; got {address!r}")
    return host.strip("[]"), int(port)


def address_of(host: str, port: int) -> str:
    """The address of a host and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
