"""Send JSON and arrays over a TCP connection, and read them back, checked.

In: a message of JSON types, arrays. Out: bytes: the length of the header, the header with message, shapes and dtypes, the arrays. Nothing is
unpickled. An end of the connection is an `OSError`, also in the midst of a frame.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

#: The longest header, in bytes, and the longest wait before the caller is asked whether to go on, in seconds.
_MOST_HEADER_BYTES, _PART_OF_A_WAIT_S = 1 << 26, 0.2


class FrameError(OSError):
    """The other side does not speak this protocol."""


def connected(address: str, timeout_s: float) -> socket.socket:
    """A connection to `host:port`.

    Raises:
        OSError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    connection.settimeout(None)  # it would be for all data of a call together; `check` says when to give up
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def send(
    connection: socket.socket, message: Any, arrays: Sequence[Any] = (), check: Callable[[], None] = lambda: None
) -> None:
    """Write a frame.

    Args:
        check: called while the other side takes nothing; it raises to give up.

    Raises:
        OSError: the connection has ended.
    """
    buffers = [np.ascontiguousarray(np.asarray(array)) for array in arrays]
    header = json.dumps([message, [[list(np.shape(one)), str(one.dtype)] for one in arrays]]).encode()
    _write(connection, struct.pack(">I", len(header)) + header, check)
    for buffer in buffers:
        if buffer.size:
            _write(connection, memoryview(buffer.reshape(-1).view(np.uint8)), check)


def receive(connection: socket.socket, check: Callable[[], None] = lambda: None) -> tuple[Any, list[np.ndarray]]:
    """Wait for a frame.

    Args:
        check: called while nothing comes; it raises to give up.

    Raises:
        OSError: the connection has ended, or what comes is no frame.
    """
    (size,) = struct.unpack(">I", _read(connection, 4, check))
    if size > _MOST_HEADER_BYTES:
        raise FrameError(f"a header of {size} bytes")
    try:
        message, kinds = json.loads(_read(connection, size, check))
        shapes = [(tuple(map(int, shape)), jnp.dtype(dtype)) for shape, dtype in kinds]
        if any(dtype.hasobject or min(shape, default=0) < 0 for shape, dtype in shapes):
            raise ValueError("no array of numbers")
    except (ValueError, TypeError) as error:
        raise FrameError(f"a header that cannot be read: {error}") from error
    arrays = []
    for shape, dtype in shapes:
        data = _read(connection, math.prod(shape) * dtype.itemsize, check)
        arrays.append(np.frombuffer(data, dtype).reshape(shape))
    return message, arrays


def _read(connection: socket.socket, count: int, check: Callable[[], None]) -> bytearray:
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        if not _ready(connection, to_write=False):
            check()
            continue
        read = connection.recv_into(view[done:])
        if not read:
            raise ConnectionResetError("the connection has ended")
        done += read
    return buffer


def _write(connection: socket.socket, data: bytes | memoryview, check: Callable[[], None]) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        if not _ready(connection, to_write=True):
            check()
            continue
        with contextlib.suppress(BlockingIOError):
            done += connection.send(view[done:], socket.MSG_DONTWAIT)


def _ready(connection: socket.socket, *, to_write: bool) -> bool:
    """Whether data can be moved now, or soon."""
    if connection.fileno() < 0:
        raise ConnectionResetError("the connection was closed here")
    own = [connection]
    return any(select.select([] if to_write else own, own if to_write else [], [], _PART_OF_A_WAIT_S))


def listening(host: str, port: int = 0) -> socket.socket:
    """A socket that accepts connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, port))
    server.listen(128)
    return server


def address_of(server: socket.socket) -> str:
    """The `host:port` of a listening socket."""
    host, port = server.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
