"""Keep pages that are never changed in place: new content goes to free pages, and a superblock makes it the state.

    pages 0, 1    superblocks: magic, version, generation, last operation, place of the directory; written in turn
    other pages   lists or blocks of a graph, arrays, directory, or free

The state is that of the superblock with the larger generation that matches its checksum. A superblock is written when
all pages that it refers to are on the device, and pages of the state before are reused only when it is. So a crash
leaves one state whole. Pages of arrays that did not change are shared with the state before.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError
from autopar.vector_search.on_disk.page_file import damaged
from autopar.vector_search.on_disk.pages import (
    ID_BYTES,
    PAGE_BYTES,
    PAYLOAD_BYTES,
    first_damaged,
    num_pages_of,
    payloads,
    sealed,
)
from autopar.vector_search.updates.files import Files, why
from autopar.vector_search.updates.free_pages import FreePages

MAGIC = b"autopar updates\n"
#: The version of a file of lists, and of one that holds something else, which older versions of autopar refuse.
VERSION, VERSION_OF_OTHERS = 1, 2
#: Magic, version, page bytes, file id, generation, sequence number of the last operation in it, number of pages, first
#: page and bytes of the directory.
_SUPERBLOCK = struct.Struct(f"<{len(MAGIC)}sII{ID_BYTES}sQQQQQ")
#: Pages that are superblocks.
FIRST_DATA_PAGE = 2
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class PagedArray:
    """An array, and its pages.

    Args:
        pages: int64 `[m]`, page of each part of 4,092 bytes.
        digests: hash of each part.
    """

    array: NDArray[Any]
    pages: NDArray[np.int64]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class State:
    """What a superblock refers to.

    Args:
        sequence: the last operation that it contains.
        directory: pages of the directory.
    """

    generation: int
    sequence: int
    num_pages: int
    settings: Mapping[str, Any]
    arrays: Mapping[str, PagedArray]
    directory: NDArray[np.int64]


@dataclass(slots=True)
class PageStore:
    """A file of pages. One thread at a time changes it.

    Args:
        state: the state that is on the device.
        is_used: bool `[num_pages]`, the pages of `state`, and those dropped since that readers may still read.
        written_bytes: bytes that were written since the file was opened.
        written_pages: pages whose content the last adopted state has changed.
        is_ahead: whether the device may have a newer superblock than that of `state`. Then nothing may be written, as
            pages that are free here may be in use there.
    """

    path: Path
    files: Files
    file_id: bytes
    handle: int
    state: State
    is_used: NDArray[np.bool_] = field(default_factory=lambda: np.ones(FIRST_DATA_PAGE, np.bool_))
    version: int = VERSION
    written_bytes: int = 0
    is_ahead: bool = False
    written_pages: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)

    def writer(self) -> PageWriter:
        """Start a new state. `is_ahead` from the moment its superblock is written until somebody has adopted it, and says
        so."""
        return PageWriter(self, FreePages(self.is_used))

    def adopt(self, state: State, data_pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Make a state that is on the device the current one.

        Args:
            data_pages: the pages of its lists.

        Returns:
            The pages that only older states use; `release` them when nobody reads them.
        """
        is_needed = np.zeros(state.num_pages, np.bool_)
        is_needed[:FIRST_DATA_PAGE] = True
        for pages in (data_pages, state.directory, *(each.pages for each in state.arrays.values())):
            is_needed[pages] = True
        old = np.zeros(state.num_pages, np.bool_)
        old[: len(self.is_used)] = self.is_used[: state.num_pages]
        self.state, self.is_used = state, old | is_needed
        self.written_pages = np.flatnonzero(is_needed & ~old)
        return np.flatnonzero(old & ~is_needed)

    def release(self, pages: NDArray[np.int64]) -> None:
        """Allow the reuse of pages."""
        self.is_used[pages] = False


class PageWriter:
    """Writes a new state into free pages. Nothing refers to them until `commit`."""

    def __init__(self, store: PageStore, free: FreePages) -> None:
        self._store, self._free = store, free

    def write_groups(self, stream: NDArray[np.uint8], sizes: Sequence[int]) -> NDArray[np.int64]:
        """Write the payloads of groups of consecutive pages, and return the first page of each group.

        Args:
            stream: the payloads, of 4,092 bytes per page.
            sizes: pages of each group.

        Raises:
            OSError: they cannot be written.
        """
        firsts = self._free.take(sizes)
        at = 0
        for page, size in _runs_of(firsts, sizes):
            self._write(stream[at * PAYLOAD_BYTES : (at + size) * PAYLOAD_BYTES], page)
            at += size
        return firsts

    def commit(self, sequence: int, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> State:
        """Write arrays, directory and superblock, each when what it refers to is on the device. Return the state.

        Raises:
            OSError: they cannot be written; the state before is the state still.
        """
        store, old = self._store, self._store.state
        paged = {name: self._paged(array, old.arrays.get(name)) for name, array in arrays.items()}
        directory = json.dumps(
            {"settings": dict(settings), "arrays": [_entry(n, a) for n, a in paged.items()]}
        ).encode()
        stream = np.frombuffer(directory, np.uint8)
        first = int(self.write_groups(stream, [num_pages_of(len(directory))])[0])
        state = State(
            old.generation + 1,
            sequence,
            self._free.num_pages,
            dict(settings),
            paged,
            np.arange(first, first + num_pages_of(len(directory))),
        )
        fields = (MAGIC, store.version, PAGE_BYTES, store.file_id, state.generation, sequence)
        block = _SUPERBLOCK.pack(*fields, state.num_pages, first, len(directory))
        store.files.sync(store.handle)
        place = state.generation % FIRST_DATA_PAGE
        store.is_ahead = True
        try:
            self._write(np.frombuffer(block, np.uint8), place)
            store.files.sync(store.handle)
        except (Exception, KeyboardInterrupt) as error:
            self._withdraw(place, error)
            raise
        return state

    # -- private ------------------------------------------------------------------------------

    def _withdraw(self, place: int, error: BaseException) -> None:
        """Remove a superblock that may or may not be on the device: its pages are going to be written again."""
        store = self._store
        try:
            store.files.write(store.handle, bytes(PAGE_BYTES), place * PAGE_BYTES)
            store.files.sync(store.handle)
        except Exception as second:
            raise IndexFileError(
                f"{store.path} cannot be written ({why(error)}), and the superblock that may be there cannot be removed"
                f" ({why(second)}): nothing is lost. Check the disk, and open the index again"
            ) from error
        store.is_ahead = False

    def _paged(self, array: NDArray[Any], old: PagedArray | None) -> PagedArray:
        stream = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts = [stream[at : at + PAYLOAD_BYTES] for at in range(0, stream.size, PAYLOAD_BYTES)]
        digests = tuple(hashlib.blake2b(part, digest_size=16).digest() for part in parts)
        known = old.digests if old else ()
        changed = [at for at, digest in enumerate(digests) if at >= len(known) or known[at] != digest]
        pages = np.zeros(len(parts), np.int64)
        pages[: len(known)] = old.pages[: len(parts)] if old else ()
        if changed:
            padded = np.zeros((len(changed), PAYLOAD_BYTES), np.uint8)
            for row, at in enumerate(changed):
                padded[row, : parts[at].size] = parts[at]
            pages[changed] = self.write_groups(padded.reshape(-1), [1] * len(changed))
        return PagedArray(array, pages, digests)

    def _write(self, stream: NDArray[np.uint8], page: int) -> None:
        store = self._store
        for at in range(0, max(1, num_pages_of(stream.size)), _AT_ONCE):
            part = sealed(stream[at * PAYLOAD_BYTES : (at + _AT_ONCE) * PAYLOAD_BYTES], store.file_id, page + at)
            store.files.write(store.handle, memoryview(part.reshape(-1)), (page + at) * PAGE_BYTES)
            store.written_bytes += part.nbytes


def created_store(path: Path, files: Files, version: int) -> PageStore:
    """Create a file without a state.

    Raises:
        OSError: it cannot be written.
    """
    handle = files.open(path)
    try:
        files.truncate(handle, 0)
    except OSError:
        os.close(handle)
        raise
    none = State(0, 0, 0, {}, {}, np.zeros(0, np.int64))
    return PageStore(path, files, os.urandom(ID_BYTES), handle, none, version=version)


def opened_store(path: Path, files: Files) -> PageStore:
    """Open a file at its last state. `adopt` its lists' pages before a new state is written.

    Raises:
        IndexFileError: it is damaged, no such file, or of another version.
        OSError: it cannot be read.
    """
    handle = files.open(path)
    try:
        blocks = [block for page in range(FIRST_DATA_PAGE) if (block := _superblock(handle, page)) is not None]
        if not blocks:
            raise damaged(path, "none of its two superblocks matches its checksum")
        magic, version, page_bytes, file_id, generation, sequence, num_pages, first, length = max(
            blocks, key=lambda block: block[4]
        )
        if magic != MAGIC or version not in (VERSION, VERSION_OF_OTHERS) or page_bytes != PAGE_BYTES:
            raise IndexFileError(
                f"{path} has version {version}, and this autopar reads versions {VERSION} and {VERSION_OF_OTHERS}: open it with the autopar that"
                " wrote it"
            )
        pages = np.arange(first, first + num_pages_of(length))
        size = os.fstat(handle).st_size
        if size < num_pages * PAGE_BYTES or not FIRST_DATA_PAGE <= first <= num_pages - len(pages):
            raise damaged(path, f"it has {size:,} bytes, and its superblock says {num_pages * PAGE_BYTES:,}")
        try:
            directory = json.loads(bytes(_read(path, handle, file_id, pages)[:length]))
            arrays = {entry["name"]: _array(path, handle, file_id, entry, num_pages) for entry in directory["arrays"]}
            state = State(generation, sequence, num_pages, dict(directory["settings"]), arrays, pages)
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            if isinstance(error, IndexFileError):
                raise
            raise damaged(path, f"its directory is invalid ({error!r})") from None
    except BaseException:
        os.close(handle)
        raise
    return PageStore(path, files, file_id, handle, state, version=version)


def _runs_of(firsts: NDArray[np.int64], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First page and number of pages of each run of adjacent groups."""
    begin, count = 0, 0
    for first, size in zip(firsts.tolist(), sizes, strict=True):
        if count and first == begin + count:
            count += size
            continue
        if count:
            yield begin, count
        begin, count = first, size
    if count:
        yield begin, count


def _entry(name: str, paged: PagedArray) -> dict[str, Any]:
    runs = list(_runs_of(paged.pages, [1] * len(paged.pages)))
    descr = np.lib.format.dtype_to_descr(paged.array.dtype) if paged.array.dtype.names else paged.array.dtype.name
    return {"name": name, "dtype": descr, "shape": paged.array.shape, "runs": runs}


def _array(path: Path, handle: int, file_id: bytes, entry: Mapping[str, Any], num_pages: int) -> PagedArray:
    given = entry["dtype"]
    named = [tuple(tuple(part) if isinstance(part, list) else part for part in one) for one in given]
    dtype = np.dtype(given) if isinstance(given, str) else np.dtype(named)  # pyright: ignore[reportArgumentType]
    shape = [int(each) for each in entry["shape"]]
    runs = [np.arange(int(first), int(first) + int(count)) for first, count in entry["runs"]]
    pages = np.concatenate([np.zeros(0, np.int64), *runs])
    num_bytes = dtype.itemsize * int(np.prod(shape, dtype=object))
    if min(shape, default=0) < 0 or len(pages) != num_pages_of(num_bytes) or dtype.hasobject:
        raise ValueError(f"`{entry['name']}` of shape {shape} in {len(pages)} pages")
    if len(pages) and not (pages.min() >= FIRST_DATA_PAGE and pages.max() < num_pages):
        raise ValueError(f"`{entry['name']}` lies outside the file")
    stream = _read(path, handle, file_id, pages)[:num_bytes]
    parts = [stream[at : at + PAYLOAD_BYTES] for at in range(0, num_bytes, PAYLOAD_BYTES)]
    digests = tuple(hashlib.blake2b(part, digest_size=16).digest() for part in parts)
    return PagedArray(stream.view(dtype).reshape(shape), pages, digests)


def _read(path: Path, handle: int, file_id: bytes, pages: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The payloads of some pages as one stream."""
    out = [np.zeros(0, np.uint8)]
    for first, count in _runs_of(pages, [1] * len(pages)):
        content = np.frombuffer(os.pread(handle, count * PAGE_BYTES, first * PAGE_BYTES), np.uint8)
        if content.size != count * PAGE_BYTES:
            raise damaged(path, f"it is truncated before page {first + count}")
        content = content.reshape(count, PAGE_BYTES)
        wrong = first_damaged(content, file_id, np.arange(first, first + count))
        if wrong is not None:
            raise damaged(path, f"page {wrong} does not match its checksum")
        out.append(payloads(content))
    return np.concatenate(out)


def _superblock(handle: int, page: int) -> tuple[Any, ...] | None:
    """The fields of an intact superblock."""
    content = np.frombuffer(os.pread(handle, PAGE_BYTES, page * PAGE_BYTES), np.uint8)
    if content.size != PAGE_BYTES:
        return None
    fields = _SUPERBLOCK.unpack_from(content)
    is_intact = first_damaged(content[None], fields[3], np.array([page])) is None
    return fields if is_intact and fields[0] == MAGIC else None
