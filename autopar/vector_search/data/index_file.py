"""Read and write an index file: header, arrays, and a digest of each.

    magic, header length, header digest    fixed size
    header                                 JSON: version, kind, settings; for each array its name, dtype, shape, offset
                                           and digest
    arrays                                 raw bytes in C order, one after the other

`write` writes a temporary file in the same folder and renames it, so a crash leaves the previous file. `read` verifies
every digest: a truncated file or a flipped bit is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError
from autopar.vector_search.data.inputs import DTYPES

_MAGIC = b"autopar index\n"
_VERSION, _READ = 3, (2, 3)  # version 2 has no centre
_DIGEST = 16  # bytes
_WAY_OUT = "Copy the file again, or rebuild and save the index"


@dataclass(frozen=True, slots=True)
class Saved:
    """The contents of an index file.

    Args:
        path: the file, for a kind that keeps its vectors there.
        reader: the engine that reads such a file, if the user named one.
    """

    kind: str
    settings: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]
    path: Path | None = None
    reader: str | None = None


def write(
    path: str | os.PathLike[str], kind: str, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Write an index file atomically.

    Args:
        settings: JSON-serializable settings.
        arrays: arrays by name.

    Raises:
        IndexFileError: the file cannot be written.
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
    with written_whole(target) as file:
        for part in (start, header, *parts):
            file.write(part)


def target_of(path: str | os.PathLike[str]) -> Path:
    """The file that a path names: of a symbolic link, its target, which need not exist."""
    return Path(os.path.realpath(path)) if Path(path).is_symlink() else Path(path)


@contextlib.contextmanager
def written_whole(target: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces the target when the block ends; after an error the target is as it was. Of a symbolic
    link, what it points to is replaced.

    Raises:
        IndexFileError: the file cannot be written.
    """
    unfinished: Path | None = None
    try:
        target = target_of(target)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        unfinished = Path(name)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except OSError as error:
        raise IndexFileError(
            f"{target} cannot be written: {error.strerror or error}. Give a path in a writable folder with free space"
        ) from None
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> Saved:
    """Read and verify an index file.

    Raises:
        IndexFileError: the file is missing, no index, of another version, or damaged; the text says where.
    """
    target = Path(path)
    try:
        size = target.stat().st_size
        data = np.memmap(target, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise IndexFileError(f"{target} cannot be read: {error.strerror or error}") from None
    first = len(_MAGIC) + 8 + _DIGEST
    if bytes(data[: len(_MAGIC)]) != _MAGIC[:size]:
        raise IndexFileError(f"{target} is not an autopar index: its first bytes differ. {_WAY_OUT}")
    length = int.from_bytes(bytes(data[len(_MAGIC) : len(_MAGIC) + 8]), "little")
    if size < first or size - first < length:
        raise IndexFileError(f"{target} is truncated or damaged in its header, at {size:,} bytes. {_WAY_OUT}")
    header = bytes(data[first : first + length])
    if _digest(header) != bytes(data[first - _DIGEST : first]).hex():
        raise IndexFileError(f"{target} is damaged: the digest of its header does not match. {_WAY_OUT}")
    about = _header(target, header)
    if about["version"] not in _READ:
        raise IndexFileError(
            f"{target} has version {about['version']}, and this autopar reads version {_VERSION}: load it with the autopar"
            " that saved it, or rebuild the index"
        )
    arrays: dict[str, NDArray[Any]] = {}
    for entry in about["arrays"]:
        dtype = _DTYPES[entry["dtype"]]
        begin, num_bytes = first + length + entry["offset"], dtype.itemsize * math.prod(entry["shape"])
        part = data[begin : begin + num_bytes]
        if part.nbytes != num_bytes:
            raise IndexFileError(f"{target} is truncated in `{entry['name']}`, at {size:,} bytes. {_WAY_OUT}")
        if _digest(memoryview(part)) != entry["digest"]:
            raise IndexFileError(f"{target} is damaged: `{entry['name']}` does not match its digest. {_WAY_OUT}")
        arrays[entry["name"]] = part.view(np.ndarray).view(dtype).reshape(entry["shape"])
    saved = Saved(about["kind"], about["settings"], arrays)
    why = _inconsistent(saved)
    if why:
        raise IndexFileError(f"{target} is damaged: {why}. {_WAY_OUT}")
    return saved


# -- validation: a matching digest proves that the file is unchanged, not that its author is trusted


#: Dtypes that an array may have: numbers only, no Python objects.
_DTYPES = {**DTYPES, **{name: np.dtype(name) for name in ("uint8", "uint16", "int32", "int64", "bool")}}
#: Types of the fields of the header, and of an array's entry.
_FIELDS = {"version": int, "kind": str, "settings": dict, "arrays": list}
_ENTRY = {"name": str, "dtype": str, "shape": list, "offset": int, "digest": str}
#: Upper bound of every length, offset and number in the settings.
_MOST = 2**48
#: Upper bound of the counts of lists, edges and nodes.
_MOST_COUNT = 10**7


def _header(target: Path, header: bytes) -> dict[str, Any]:
    """Parse the header and check the type of each field.

    Raises:
        IndexFileError: the invalid field, by name.
    """

    def refuse(what: str) -> IndexFileError:
        return IndexFileError(f"{target} is damaged: {what}. {_WAY_OUT}")

    try:
        about = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise refuse(f"its header is not JSON ({error})") from None
    if not isinstance(about, dict):
        raise refuse("its header is not a JSON object")
    for place, record, fields in [("", about, _FIELDS)] + [
        (f"arrays[{n}].", entry, _ENTRY) for n, entry in enumerate(_list(about.get("arrays")))
    ]:
        for name, kind in fields.items():
            if not isinstance(record, dict) or type(record.get(name)) is not kind:
                raise refuse(f"`{place}{name}` of its header is not of type {kind.__name__}")
    for entry in about["arrays"]:
        numbers = [entry["offset"], *entry["shape"]]
        if not all(type(number) is int and 0 <= number <= _MOST for number in numbers):
            raise refuse(f"`{entry['name']}` has shape {entry['shape']} at offset {entry['offset']}")
        if entry["dtype"] not in _DTYPES or math.prod(entry["shape"]) > _MOST or len(entry["shape"]) > 8:
            raise refuse(f"`{entry['name']}` is {entry['dtype']} of shape {entry['shape']}")
    if not _is_finite(about["settings"]):
        raise refuse("a setting is not finite, or out of bounds")
    return about


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_finite(value: Any) -> bool:
    """Whether all numbers of a JSON value are finite and within bounds."""
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int | float) or abs(value) <= _MOST


#: Dtypes and number of dims of the known arrays, for any index kind.
_ARRAYS = {
    "vectors": (tuple(DTYPES), 2),
    "ids": (("int64",), 1),
    "centroids": (("float32",), 2),
    "first_block": (("int32", "int64"), 1),
    "positions": (("int32", "int64"), 2),
    "codes": (("uint8",), 3),
    "codebooks": (("float32",), 3),
    "centre": (tuple(DTYPES), 1),
    "edges": (("int32", "int64"), 2),
    "entries": (("int32", "int64"), 1),
    "copies": (("int32", "int64"), 1),
    "first_copy": (("int32", "int64"), 1),
}
#: Integer settings and their lower bounds.
_COUNTS = {"num_lists": 1, "copies": 1, "refined": 0, "degree": 1, "width": 1, "effort": 1}


def _inconsistent(saved: Saved) -> str | None:
    """The first contradiction in an index of a built-in kind, as text; unknown arrays belong to a user's kind."""
    arrays, settings = saved.arrays, dict(saved.settings)
    for name, array in arrays.items():
        dtypes, num_dims = _ARRAYS.get(name, ((array.dtype.name,), array.ndim))
        if array.dtype.name not in dtypes or array.ndim != num_dims:
            return f"`{name}` is {array.dtype.name} of shape {list(array.shape)}"
    measured = settings.get("measured")
    counts = settings | (measured if isinstance(measured, dict) else {})
    for name, least in _COUNTS.items():
        if name in counts and (type(counts[name]) is not int or not least <= counts[name] <= _MOST_COUNT):
            return f"its setting `{name}` is {counts[name]!r}: expected an integer from {least} to {_MOST_COUNT:,}"
    if "vectors" not in arrays or "ids" not in arrays:
        return None  # a user's index kind
    num, dim = arrays["vectors"].shape
    if dim < 1:
        return f"`vectors` has shape {[num, dim]}"
    for name, rise in (("first_block", 0), ("first_copy", 1)):
        first = arrays.get(name)
        if first is not None and (len(first) < 1 or first[0] != 0 or (np.diff(first) < rise).any()):
            return f"`{name}` does not start at 0 and increase"
    if ("copies" in arrays) != ("first_copy" in arrays) or ("copies" in arrays and arrays["first_copy"][-1] != num):
        return f"`first_copy` does not end with the {num:,} vectors"
    nodes = len(arrays["first_copy"]) - 1 if "first_copy" in arrays else num
    shapes: dict[str, tuple[Any, ...]] = {"ids": (num,), "centre": (dim,), "copies": (num,)}
    shapes["edges"] = (nodes, settings.get("degree"))
    if "first_block" in arrays:
        shapes |= _shapes_of_lists(arrays, settings, dim)
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            return f"`{name}` has shape {list(arrays[name].shape)}, expected {list(shape)}"
    for name, least, most in (("positions", -1, num), ("edges", -1, nodes), ("entries", 0, nodes), ("copies", 0, num)):
        array = arrays.get(name)
        if array is not None and array.size and not least <= int(array.min()) <= int(array.max()) < most:
            return f"`{name}` points outside the {most:,} vectors"
    return None


def _shapes_of_lists(
    arrays: Mapping[str, NDArray[Any]], settings: Mapping[str, Any], dim: int
) -> dict[str, tuple[Any, ...]]:
    """The shapes that the arrays of inverted lists need to have."""
    num_lists, first = settings.get("num_lists"), arrays["first_block"]
    blocks = (int(first[-1]), *(arrays["positions"].shape[1:] if "positions" in arrays else ()))
    found: dict[str, tuple[Any, ...]] = {"first_block": (1 + (num_lists or 0),), "centroids": (num_lists, dim)}
    found["positions"] = blocks
    if "codebooks" in arrays:
        parts, num_codes, _ = arrays["codebooks"].shape
        found |= {"codes": (*blocks, parts), "codebooks": (parts, min(num_codes, 256), dim // max(1, parts))}
    return found


def _digest(part: Any) -> str:
    return hashlib.blake2b(part, digest_size=_DIGEST).hexdigest()
