"""Read runs of pages from a page file by one of several engines, and count what was read.

In: runs of consecutive pages. Out: their bytes. `reader_table.py` has the engines. A read has two steps: `start` issues
all requests, and `wait` returns when all have arrived, so the caller can compute in between. A request is one run, or a
part of at most `MAX_REQUEST_PAGES` of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError
from autopar.vector_search.on_disk.pages import PAGE_BYTES

#: Maximum pages of one request: 1 MiB.
MAX_REQUEST_PAGES = 256


class Run(NamedTuple):
    """Consecutive pages: the number of the first, and how many."""

    first: int
    num_pages: int


@dataclass(slots=True)
class ReadCounts:
    """What a reader has read since it was opened.

    Args:
        requests: reads that were issued.
        pages: pages that were read; repeated reads count again.
    """

    requests: int = 0
    pages: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that were read."""
        return self.pages * PAGE_BYTES

    def add(self, runs: Sequence[Run]) -> None:
        """Count the reads of these runs."""
        self.requests += len(runs)
        self.pages += sum(run.num_pages for run in runs)


class Pending(Protocol):
    """A read that was started."""

    def wait(self) -> NDArray[np.uint8]:
        """The pages of all runs in their order, `[num_pages, PAGE_BYTES]`.

        Raises:
            IndexFileError: the device reports an error, or the file ends before a page.
        """
        ...


class Reader(Protocol):
    """An engine that reads pages of one file. Not thread-safe.

    Args:
        counts: what it has read.
    """

    counts: ReadCounts

    def start(self, runs: Sequence[Run]) -> Pending:
        """Issue the reads of some runs."""
        ...

    def close(self) -> None:
        """Release the file; no read is pending."""
        ...


class Engine(Protocol):
    """An entry of `reader_table.READERS`: opens a file, or says why it cannot."""

    def why_not(self) -> str:
        """Why this machine does not have the engine, with the way out; empty if it has it."""
        ...

    def open(self, path: Path) -> Reader:
        """Open a file.

        Raises:
            OSError: the file cannot be opened in this way, for example on a file system without O_DIRECT.
        """
        ...


def requests_of(runs: Sequence[Run]) -> list[Run]:
    """The runs, cut at `MAX_REQUEST_PAGES`."""
    cut: list[Run] = []
    for first, count in runs:
        for at in range(0, count, MAX_REQUEST_PAGES):
            cut.append(Run(first + at, min(MAX_REQUEST_PAGES, count - at)))
    return cut


def read_error(path: Path, run: Run, error: OSError | None, received: int = 0) -> IndexFileError:
    """The error of a request that failed, or that ended early."""
    what = f"{error.strerror or error}" if error else f"the file ends after {received:,} bytes of them"
    return IndexFileError(
        f"{path} cannot be read at pages {run.first} to {run.first + run.num_pages - 1}: {what}. Check the disk, copy the file"
        " again, or rebuild the index"
    )
