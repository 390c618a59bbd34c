"""Write and open a page file: a superblock, data pages, arrays, and a directory.

    page 0        superblock: magic, version, number of pages, place and length of the directory, file id
    data pages    the caller's bytes
    arrays        each from the start of a page
    directory     JSON: kind, settings, and for each array its name, dtype, shape and first page

`PageFileWriter` writes an unnamed file and links it when it is complete, so a killed process leaves nothing. `PageFile`
checks the superblock, the directory and the arrays when it is opened; data pages are checked when they are read.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError
from autopar.vector_search.data.index_file import target_of
from autopar.vector_search.data.inputs import DTYPES
from autopar.vector_search.on_disk.pages import (
    ID_BYTES,
    PAGE_BYTES,
    PAYLOAD_BYTES,
    first_damaged,
    num_pages_of,
    payloads,
    sealed,
)

MAGIC = b"autopar pages\n\0\0"
VERSION = 1
#: Magic, version, page bytes, number of pages, first page and bytes of the directory, file id.
_SUPERBLOCK = struct.Struct(f"<{len(MAGIC)}sIIQQQ{ID_BYTES}s")
_WAY_OUT = "Copy the file again, or rebuild the index"
_DTYPES = {**DTYPES, **{name: np.dtype(name) for name in ("int64", "float64", "int32", "uint8")}}
#: Pages that are sealed and written at a time.
_AT_ONCE = 1024


class PageFileWriter:
    """A page file that is being written. Use it as a context; only `finish` makes it visible at its path. If the path is a
    symbolic link, its target is written.

    Raises:
        IndexFileError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = target_of(path)
        self.num_pages = 1
        self.file_id = os.urandom(ID_BYTES)
        self._name: Path | None = None
        try:
            self._file = self._opened()
            self._file.write(bytes(PAGE_BYTES))
        except OSError as error:
            raise self._refused(error) from None

    def append(self, stream: NDArray[np.uint8]) -> int:
        """Write bytes as whole pages; the last is padded. Return the number of the first page."""
        first = self.num_pages
        try:
            for start in range(0, stream.size, _AT_ONCE * PAYLOAD_BYTES):
                pages = sealed(stream[start : start + _AT_ONCE * PAYLOAD_BYTES], self.file_id, self.num_pages)
                self._file.write(memoryview(pages.reshape(-1)))
                self.num_pages += len(pages)
        except OSError as error:
            raise self._refused(error) from None
        return first

    def readable(self) -> Path:
        """A path by which the pages that were appended can be read before the file has its name."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._refused(error) from None
        return self._name or Path(f"/proc/self/fd/{self._file.fileno()}")

    def finish(self, kind: str, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the arrays, the directory and the superblock, and give the file its name, replacing an older one."""
        entries = []
        for name, array in arrays.items():
            first = self.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            entries.append({"name": name, "dtype": array.dtype.name, "shape": array.shape, "first_page": first})
        directory = json.dumps({"kind": kind, "settings": dict(settings), "arrays": entries}).encode()
        first = self.append(np.frombuffer(directory, np.uint8))
        fields = (MAGIC, VERSION, PAGE_BYTES, self.num_pages, first, len(directory), self.file_id)
        superblock = sealed(np.frombuffer(_SUPERBLOCK.pack(*fields), np.uint8), self.file_id, 0)
        try:
            self._file.seek(0)
            self._file.write(memoryview(superblock.reshape(-1)))
            self._file.flush()
            os.fsync(self._file.fileno())
            self._publish()
        except OSError as error:
            raise self._refused(error) from None

    def __enter__(self) -> PageFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # of a full disk, which `append` or `finish` has reported
            self._file.close()
        if self._name is not None:
            self._name.unlink(missing_ok=True)

    # -- private ------------------------------------------------------------------------------

    def _opened(self) -> Any:
        """An unnamed file in the folder of the path; one with a temporary name if the file system has no such files."""
        try:
            handle = open_unnamed(self.path.parent)
        except (OSError, AttributeError):
            handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            self._name = Path(name)
        return os.fdopen(handle, "w+b")

    def _publish(self) -> None:
        if self._name is None:
            name = self.path.parent / f".{self.path.name}.{self.file_id.hex()}"
            # a directory descriptor, which an absolute path ignores, makes Python follow the link of /proc
            source = f"/proc/self/fd/{self._file.fileno()}"
            os.link(source, name, src_dir_fd=self._file.fileno(), follow_symlinks=True)
            self._name = name
        self._name.replace(self.path)
        self._name = None
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _refused(self, error: OSError) -> IndexFileError:
        return IndexFileError(
            f"{self.path} cannot be written: {error.strerror or error}. Give a path in a writable folder with free space"
        )


def open_unnamed(folder: Path) -> int:
    """Create a file without a name, which disappears with the process.

    Raises:
        OSError, AttributeError: the file system, or the operating system, has no such files.
    """
    return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o644)


@dataclass(frozen=True, slots=True)
class PageFile:
    """A page file whose superblock, directory and arrays are intact.

    Args:
        file_id: the random id that its checksums contain.
        num_data_pages: the pages from page 1 on that hold the caller's bytes.
    """

    path: Path
    file_id: bytes
    num_pages: int
    num_data_pages: int
    kind: str
    settings: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]


def is_page_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file starts as a page file does; False if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_page_file(path: str | os.PathLike[str]) -> PageFile:
    """Open a page file and check all but its data pages.

    Raises:
        IndexFileError: the file is missing, no page file, of another version, truncated or damaged.
    """
    target = Path(path)
    try:
        with target.open("rb") as file:
            return _opened(target, file)
    except OSError as error:
        raise IndexFileError(f"{target} cannot be read: {error.strerror or error}") from None


def kind_of(path: str | os.PathLike[str]) -> str:
    """The kind of the index in a page file, which is not checked further.

    Raises:
        IndexFileError: the file is missing, no page file, of another version, truncated, or its directory is damaged.
    """
    target = Path(path)
    try:
        with target.open("rb") as file:
            return str(_directory(target, file)[0]["kind"])
    except OSError as error:
        raise IndexFileError(f"{target} cannot be read: {error.strerror or error}") from None
    except (LookupError, TypeError) as error:
        raise damaged(target, f"its directory is invalid ({error!r})") from None


def damaged(path: Path, what: str) -> IndexFileError:
    """The error of a damaged file."""
    return IndexFileError(f"{path} is damaged: {what}. {_WAY_OUT}")


def _directory(target: Path, file: Any) -> tuple[dict[str, Any], bytes, int, int]:
    """The directory, the file id, the number of pages, and the first page of the directory."""
    size = os.fstat(file.fileno()).st_size
    page = np.frombuffer(file.read(PAGE_BYTES), np.uint8)
    if bytes(page[: len(MAGIC)]) != MAGIC:
        raise IndexFileError(f"{target} is not a page file of autopar: its first bytes differ. {_WAY_OUT}")
    if page.size < PAGE_BYTES:
        raise damaged(target, f"it is truncated, at {size:,} bytes")
    fields = _SUPERBLOCK.unpack_from(page)
    _, version, page_bytes, num_pages, first, length, file_id = fields
    if first_damaged(page[None], file_id, np.zeros(1, np.int64)) is not None:
        raise damaged(target, "its superblock does not match its checksum")
    if version != VERSION or page_bytes != PAGE_BYTES:
        raise IndexFileError(
            f"{target} has version {version} and pages of {page_bytes} bytes, and this autopar reads version {VERSION} with"
            f" pages of {PAGE_BYTES} bytes: load it with the autopar that saved it, or rebuild the index"
        )
    if size != num_pages * PAGE_BYTES:
        raise damaged(target, f"it has {size:,} bytes, and its superblock says {num_pages * PAGE_BYTES:,}")
    try:
        directory = json.loads(bytes(_stream(target, file, file_id, num_pages, first, length)))
        if not isinstance(directory, dict):
            raise TypeError("no object")
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        # a matching checksum proves that the page is unchanged, not that its author is trusted
        raise damaged(target, f"its directory is invalid ({error!r})") from None
    return directory, file_id, num_pages, first


def _opened(target: Path, file: Any) -> PageFile:
    directory, file_id, num_pages, first = _directory(target, file)
    try:
        arrays = {entry["name"]: _array(target, file, file_id, num_pages, entry) for entry in directory["arrays"]}
        kind, settings = str(directory["kind"]), dict(directory["settings"])
        firsts = [int(entry["first_page"]) for entry in directory["arrays"]]
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise damaged(target, f"its directory is invalid ({error!r})") from None
    return PageFile(target, file_id, num_pages, min([*firsts, first]) - 1, kind, settings, arrays)


def _array(target: Path, file: Any, file_id: bytes, num_pages: int, entry: Mapping[str, Any]) -> NDArray[Any]:
    dtype, shape = _DTYPES[entry["dtype"]], [int(each) for each in entry["shape"]]
    if len(shape) > 8 or any(each < 0 for each in shape):
        raise ValueError(f"an array of shape {shape}")
    num_bytes = dtype.itemsize * math.prod(shape)
    stream = _stream(target, file, file_id, num_pages, int(entry["first_page"]), num_bytes)
    return stream.view(dtype).reshape(shape)


def _stream(target: Path, file: Any, file_id: bytes, num_pages: int, first: int, length: int) -> NDArray[np.uint8]:
    """`length` bytes of payload from the start of page `first`."""
    count = num_pages_of(length)
    if first < 1 or length < 0 or first + count > num_pages:
        raise damaged(target, f"it refers to pages {first} to {first + count}, and it has {num_pages}")
    stream = np.empty(count * PAYLOAD_BYTES, np.uint8)
    file.seek(first * PAGE_BYTES)
    for at in range(0, count, _AT_ONCE):
        some = min(_AT_ONCE, count - at)
        pages = np.frombuffer(file.read(some * PAGE_BYTES), np.uint8).reshape(some, PAGE_BYTES)
        wrong = first_damaged(pages, file_id, np.arange(first + at, first + at + some))
        if wrong is not None:
            raise damaged(target, f"page {wrong} does not match its checksum")
        stream[at * PAYLOAD_BYTES : (at + some) * PAYLOAD_BYTES] = payloads(pages)
    return stream[:length]
