"""Send messages with arrays over a connection, and read them back, checked.

In: a message, arrays. Out: the same: shapes and dtypes are in the message, the data is its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.membership.wire import Connection, Message, WireError


def send(
    connection: Connection, message: Message, arrays: Sequence[Any] = (), check: Callable[[], None] | None = None
) -> None:
    """Send a message with arrays; see `Connection.send`."""
    kinds = [[list(np.shape(one)), str(one.dtype)] for one in arrays]
    buffers = [np.ascontiguousarray(np.asarray(one)).reshape(-1).view(np.uint8) for one in arrays]
    connection.send({**message, "arrays": kinds}, buffers, check)


def receive(connection: Connection, check: Callable[[], None] | None = None) -> tuple[Message, list[np.ndarray]]:
    """Wait for a message with arrays; see `Connection.receive`.

    Raises:
        WireError: it is no such message.
    """
    message, data = connection.receive(check)
    try:
        kinds = [(tuple(map(int, shape)), jnp.dtype(dtype)) for shape, dtype in message.pop("arrays")]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        if any(dtype.hasobject or min(shape, default=0) < 0 for shape, dtype in kinds) or sum(sizes) != len(data):
            raise ValueError(f"{len(data)} bytes are not the arrays {kinds}")
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a message has no arrays that can be read: {error}") from error
    arrays, start = [], 0
    for (shape, dtype), size in zip(kinds, sizes, strict=True):
        arrays.append(np.frombuffer(memoryview(data)[start : start + size], dtype).reshape(shape))
        start += size
    return message, arrays
