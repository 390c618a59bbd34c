"""One file for an index: what kind it is, its settings, its arrays, and digests of all these.

    magic, length of the header, digest of the header    fixed
    header                                               JSON: version, kind, settings, and of each array its name,
                                                         dtype, shape, offset and digest
    arrays                                               as they lie in memory, one after the other

A file is written beside its name and then renamed, so that under the name there is a whole one or what was there before.
Whatever is read is held against its digest: a file that was cut short or in which a bit has flipped is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError
from autopar.vector_search.inputs import DTYPES

_MAGIC = b"autopar index\n"
_VERSION = 2
_DIGEST = 16  # bytes
_WAY_OUT = "Copy it again from where it came from, or build and save the index anew"


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file holds."""

    kind: str
    settings: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]


def write(
    path: str | os.PathLike[str], kind: str, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Write a file, whole or not at all.

    Args:
        settings: what JSON takes. arrays: by name.

    Raises:
        IndexFileError: it cannot be written.
    """
    target = Path(path)
    entries, parts, offset = [], [], 0
    for name, array in arrays.items():
        part = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        about = {"name": name, "dtype": array.dtype.name, "shape": array.shape}
        entries.append({**about, "offset": offset, "digest": _digest(part)})
        parts.append(part)
        offset += part.nbytes
    header = json.dumps({"version": _VERSION, "kind": kind, "settings": dict(settings), "arrays": entries}).encode()
    start = _MAGIC + len(header).to_bytes(8, "little") + bytes.fromhex(_digest(header))
    unfinished: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        unfinished = Path(name)
        with os.fdopen(handle, "wb") as file:
            for part in (start, header, *parts):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        Path(unfinished).replace(target)
    except OSError as error:
        raise IndexFileError(
            f"{target} cannot be written: {error.strerror or error}. Give a path in a folder with room"
        ) from None
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> Saved:
    """Read a file.

    Raises:
        IndexFileError: it is not there, is no index, is of another version, or is damaged; it says where.
    """
    target = Path(path)
    try:
        size = target.stat().st_size
        data = np.memmap(target, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise IndexFileError(f"{target} cannot be read: {error.strerror or error}") from None
    first = len(_MAGIC) + 8 + _DIGEST
    if bytes(data[: len(_MAGIC)]) != _MAGIC[:size]:
        raise IndexFileError(f"{target} is no index that autopar has saved: it begins otherwise. {_WAY_OUT}")
    length = int.from_bytes(bytes(data[len(_MAGIC) : len(_MAGIC) + 8]), "little")
    if size < first or size - first < length:
        raise IndexFileError(f"{target} is cut short or damaged within its header, at {size:,} bytes. {_WAY_OUT}")
    header = bytes(data[first : first + length])
    if _digest(header) != bytes(data[first - _DIGEST : first]).hex():
        raise IndexFileError(f"{target} is damaged: its header is not what was written. {_WAY_OUT}")
    about = json.loads(header)
    if about["version"] != _VERSION:
        raise IndexFileError(
            f"{target} is of version {about['version']}, and this autopar reads {_VERSION}: load it with the one that"
            " saved it, or build the index anew"
        )
    arrays = {}
    for entry in about["arrays"]:
        dtype = DTYPES.get(entry["dtype"]) or np.dtype(entry["dtype"])
        begin = first + length + entry["offset"]
        part = data[begin : begin + dtype.itemsize * int(np.prod(entry["shape"], dtype=np.int64))]
        if part.nbytes != dtype.itemsize * int(np.prod(entry["shape"], dtype=np.int64)):
            raise IndexFileError(f"{target} is cut short within `{entry['name']}`, at {size:,} bytes. {_WAY_OUT}")
        if _digest(memoryview(part)) != entry["digest"]:
            raise IndexFileError(f"{target} is damaged: `{entry['name']}` is not what was written. {_WAY_OUT}")
        arrays[entry["name"]] = part.view(np.ndarray).view(dtype).reshape(entry["shape"])
    return Saved(about["kind"], about["settings"], arrays)


def _digest(part: Any) -> str:
    return hashlib.blake2b(part, digest_size=_DIGEST).hexdigest()
