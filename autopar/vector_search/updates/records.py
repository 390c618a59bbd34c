"""Encode the operations of the log: one record per call of the user, which is applied as a whole or not at all.

In: ids with vectors and metadata, or ids. Out: bytes, and back. docs/vector-search-updates.md has the format.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Operation and number of ids.
_HEAD = struct.Struct("<II")
_PUT, _DELETE = 1, 2


@dataclass(frozen=True, slots=True)
class Layout:
    """What a vector of an index is.

    Args:
        dim: elements per vector.
        dtype: dtype of the vectors.
        metadata: dtype of a row of metadata; of no bytes if there is none.
    """

    dim: int
    dtype: np.dtype[Any]
    metadata: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Put:
    """Insert or replace vectors.

    Args:
        ids: int64 `[n]`.
        vectors: `[n, d]`.
        metadata: `[n]`.
    """

    ids: NDArray[np.int64]
    vectors: NDArray[Any]
    metadata: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the vectors of these ids, int64 `[n]`."""

    ids: NDArray[np.int64]


Record = Put | Delete


def encoded(record: Record) -> bytes:
    """The bytes of a record."""
    operation = _PUT if isinstance(record, Put) else _DELETE
    parts: list[NDArray[Any]] = [record.ids.astype("<i8")]
    if isinstance(record, Put):
        parts += [record.vectors, record.metadata]
    return _HEAD.pack(operation, len(record.ids)) + b"".join(np.ascontiguousarray(part).tobytes() for part in parts)


def decoded(body: bytes, layout: Layout) -> Record:
    """The record of some bytes.

    Raises:
        ValueError: no record of this layout.
    """
    if len(body) < _HEAD.size:
        raise ValueError(f"a record of {len(body)} bytes")
    operation, count = _HEAD.unpack_from(body)
    row_bytes, item_bytes = layout.dim * layout.dtype.itemsize, layout.metadata.itemsize
    per_id = 8 + (row_bytes + item_bytes if operation == _PUT else 0)
    if operation not in (_PUT, _DELETE) or len(body) != _HEAD.size + count * per_id:
        raise ValueError(f"operation {operation} of {count} ids in {len(body)} bytes")
    at = _HEAD.size
    ids = np.frombuffer(body, "<i8", count, at).astype(np.int64)
    if operation == _DELETE:
        return Delete(ids)
    at += 8 * count
    vectors = np.frombuffer(body, np.uint8, count * row_bytes, at).view(layout.dtype).reshape(count, layout.dim)
    at += count * row_bytes
    if not item_bytes:
        return Put(ids, vectors, np.zeros(count, layout.metadata))
    return Put(ids, vectors, np.frombuffer(body, np.uint8, count * item_bytes, at).view(layout.metadata))
