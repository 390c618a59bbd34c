"""Read pages through a memory map: the engine that every system and file system has.

The operating system caches the pages, so the counts are those of the pages that were used, whether or not the device
was read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.readers import ReadCounts, Run, read_error, requests_of

#: Pages that may be mapped, and so count as memory of the process; and those around a request that Linux maps with it,
#: if its cache has them.
_MAX_MAPPED, _MAPPED_AROUND = 4096, 64


class MappedEngine:
    """An entry of `reader_table.READERS`."""

    def why_not(self) -> str:
        """See `Engine.why_not`."""
        return ""

    def open(self, path: Path) -> MappedReader:
        """See `Engine.open`."""
        return MappedReader(path)


class MappedReader:
    """A `Reader` that copies pages out of a memory map."""

    def __init__(self, path: Path) -> None:
        self.counts = ReadCounts()
        self._path = path
        with path.open("rb") as file:
            self._size = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)  # no read-ahead beyond the requested pages
        self._num_mapped = 0

    def start(self, runs: Sequence[Run]) -> _Mapped:
        """See `Reader.start`."""
        requests = requests_of(runs)
        self.counts.add(requests)
        for first, count in requests if mmap.PAGESIZE == PAGE_BYTES else ():
            begin = min(first * PAGE_BYTES, self._size - PAGE_BYTES)
            self._map.madvise(mmap.MADV_WILLNEED, begin, min(count * PAGE_BYTES, self._size - begin))
        return _Mapped(self, requests)

    def copy(self, requests: Sequence[Run]) -> NDArray[np.uint8]:
        """The pages of some requests."""
        pages = np.empty((sum(run.num_pages for run in requests), PAGE_BYTES), np.uint8)
        at = 0
        for run in requests:
            begin, num_bytes = run.first * PAGE_BYTES, run.num_pages * PAGE_BYTES
            # a map of a file that was truncated since would end the process with SIGBUS
            if self._path.stat().st_size < begin + num_bytes or begin + num_bytes > self._size:
                raise read_error(self._path, run, None, max(0, self._size - begin))
            part = np.frombuffer(self._map, np.uint8, num_bytes, begin)
            pages[at : at + run.num_pages] = part.reshape(run.num_pages, PAGE_BYTES)
            at += run.num_pages
            self._num_mapped += run.num_pages + _MAPPED_AROUND
            if self._num_mapped > _MAX_MAPPED:
                self._map.madvise(mmap.MADV_DONTNEED)  # the system's cache keeps them
                self._num_mapped = 0
        return pages

    def close(self) -> None:
        """See `Reader.close`."""
        self._map.close()


@dataclass(frozen=True, slots=True)
class _Mapped:
    reader: MappedReader
    requests: Sequence[Run]

    def wait(self) -> NDArray[np.uint8]:
        """See `Pending.wait`."""
        return self.reader.copy(self.requests)
