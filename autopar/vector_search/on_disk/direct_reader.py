"""Read pages with O_DIRECT by a pool of threads: the page cache is neither read nor filled.

Each request is one `preadv` into page-aligned memory; a thread per request in flight.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.readers import ReadCounts, Run, read_error, requests_of

#: Requests in flight.
_NUM_THREADS = 8


class DirectEngine:
    """An entry of `reader_table.READERS`."""

    def why_not(self) -> str:
        """See `Engine.why_not`."""
        has = hasattr(os, "O_DIRECT") and hasattr(os, "preadv")
        return "" if has else "this operating system has no O_DIRECT: use reader='mmap'"

    def open(self, path: Path) -> DirectReader:
        """See `Engine.open`."""
        return DirectReader(path)


class DirectReader:
    """A `Reader` of O_DIRECT reads by threads."""

    def __init__(self, path: Path) -> None:
        self.counts = ReadCounts()
        self._path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="autopar-read")

    def start(self, runs: Sequence[Run]) -> _Reads:
        """See `Reader.start`."""
        requests = requests_of(runs)
        self.counts.add(requests)
        num_pages = sum(run.num_pages for run in requests)
        buffer = mmap.mmap(-1, max(1, num_pages) * PAGE_BYTES)  # page-aligned, as O_DIRECT demands
        view, at, reads = memoryview(buffer), 0, []
        for run in requests:
            part = view[at * PAGE_BYTES : (at + run.num_pages) * PAGE_BYTES]
            reads.append(self._threads.submit(self._read, run, part))
            at += run.num_pages
        return _Reads(view, num_pages, reads)

    def close(self) -> None:
        """See `Reader.close`."""
        self._threads.shutdown()
        os.close(self._handle)

    def _read(self, run: Run, part: memoryview) -> None:
        try:
            received = os.preadv(self._handle, [part], run.first * PAGE_BYTES)
        except OSError as error:
            raise read_error(self._path, run, error) from None
        if received != len(part):
            raise read_error(self._path, run, None, received)


@dataclass(frozen=True, slots=True)
class _Reads:
    view: memoryview
    num_pages: int
    reads: Sequence[Future[None]]

    def wait(self) -> NDArray[np.uint8]:
        """See `Pending.wait`."""
        errors = [read.exception() for read in self.reads]  # of all: the threads write into the buffer
        for error in errors:
            if error is not None:
                raise error
        pages = np.frombuffer(self.view, np.uint8)
        return pages[: self.num_pages * PAGE_BYTES].reshape(self.num_pages, PAGE_BYTES)
