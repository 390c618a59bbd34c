"""Read pages through a cache: what is in memory is copied, and only the rest is read.

In: a reader of any engine, and a cache. Out: a `Reader` of the same pages. Pages enter the cache when they match their
checksum. The counts stay those of the reader: what was read from the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.page_cache import PageCache
from autopar.vector_search.on_disk.pages import first_damaged
from autopar.vector_search.on_disk.readers import Pending, ReadCounts, Reader, Run


class CachedReader:
    """A `Reader` with a cache.

    Args:
        file_id: the random id that the checksums of pages contain.
    """

    def __init__(self, reader: Reader, cache: PageCache, file_id: bytes) -> None:
        self.reader, self.cache, self.file_id = reader, cache, file_id
        self.counts: ReadCounts = reader.counts  # what was read from the file

    def start(self, runs: Sequence[Run]) -> _Reads:
        """See `Reader.start`."""
        numbers = pages_of(runs)
        rows = self.cache.find(numbers)
        is_here = rows >= 0
        here = self.cache.contents(rows[is_here])
        missing = runs_of(numbers[~is_here])
        return _Reads(self, numbers, is_here, here, self.reader.start(missing))

    def close(self) -> None:
        """See `Reader.close`."""
        self.reader.close()


@dataclass(frozen=True, slots=True)
class _Reads:
    reader: CachedReader
    numbers: NDArray[np.int64]
    is_here: NDArray[np.bool_]
    here: NDArray[np.uint8]
    pending: Pending

    def wait(self) -> NDArray[np.uint8]:
        """See `Pending.wait`."""
        read = self.pending.wait()
        numbers = self.numbers[~self.is_here]
        if not len(self.here):
            pages = read
        else:
            pages = np.empty((len(self.numbers), self.here.shape[1]), np.uint8)
            pages[self.is_here] = self.here
            pages[~self.is_here] = read
        if first_damaged(read, self.reader.file_id, numbers) is None:  # else the caller finds it
            self.reader.cache.offer(numbers, read)
        return pages


def pages_of(runs: Sequence[Run]) -> NDArray[np.int64]:
    """The pages of some runs, in their order."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(run.first, run.first + run.num_pages) for run in runs)])


def runs_of(pages: NDArray[Any]) -> list[Run]:
    """Runs of consecutive pages, in the order of the pages."""
    edges = np.flatnonzero(np.diff(pages) != 1) + 1
    return [Run(int(part[0]), len(part)) for part in np.split(pages, edges) if len(part)]
