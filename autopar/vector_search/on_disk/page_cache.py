"""Keep pages in memory: hot ones pinned, the others by how often they were read (W-TinyLFU, arXiv 1512.00727).

In: pages that searches want. Out: those that are here. A page that is read enters a small window; when it leaves it, it
takes the place of the page that would be evicted next only if it was read more often. The rest is a segmented LRU: a page
that is read again is protected. So one pass over all pages evicts little. A byte per page of the file counts reads; the
counts are halved after so many reads per cached page, so that a new hot set replaces an old one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.pages import PAGE_BYTES

#: Share of the window, and of the rest that is protected; reads per cached page after which counts are halved.
_WINDOW, _PROTECTED, _PERIOD = 0.01, 0.8, 40
_MOST = np.iinfo(np.uint8).max


class CacheStats(NamedTuple):
    """What a cache has done.

    Args:
        pages: pages it may hold.
        pinned: of these, pages that are never evicted.
        lookups: pages that were wanted.
        hits: of these, pages that were here.
    """

    pages: int
    pinned: int
    lookups: int
    hits: int


class PageCache:
    """Pages in memory. Not thread-safe.

    Args:
        capacity: pages, at least 1.
        num_pages: pages of the file.
        page_bytes: bytes of a page.
    """

    def __init__(self, capacity: int, num_pages: int, page_bytes: int = PAGE_BYTES) -> None:
        self._contents = np.empty((capacity, page_bytes), np.uint8)  # memory is taken when a row is written
        self._free = list(range(capacity))
        self._rows: dict[int, int] = {}
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._pinned: set[int] = set()
        self._counts = np.zeros(num_pages, np.uint8)
        self._capacity, self._reads = capacity, 0
        self._lookups, self._hits = 0, 0

    @property
    def stats(self) -> CacheStats:
        """What it has done."""
        return CacheStats(self._capacity, len(self._pinned), self._lookups, self._hits)

    @property
    def memory_bytes(self) -> int:
        """Bytes of a full cache and its counts."""
        return self._contents.nbytes + self._counts.nbytes

    def find(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each page, -1 if it is not here. Counts as a read of each."""
        self._count(pages)
        rows = np.array([self._rows.get(page, -1) for page in pages.tolist()], np.int64)
        for page in pages[rows >= 0].tolist():
            self._touch(page)
        self._lookups += len(pages)
        self._hits += int((rows >= 0).sum())
        return rows

    def contents(self, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """A copy of some rows, `[n, page_bytes]`."""
        return self._contents[rows]

    def offer(self, pages: NDArray[np.int64], contents: NDArray[np.uint8]) -> None:
        """Offer pages that were read; those that are worth it stay."""
        for page, content in zip(pages.tolist(), contents, strict=True):
            if page in self._rows:
                continue
            self._make_room(page)
            if self._free:
                row = self._free.pop()
                self._rows[page] = row
                self._contents[row] = content
                if page not in self._pinned:
                    self._window[page] = None

    def hottest(self, num: int) -> NDArray[np.int64]:
        """The pages that were read most often lately, at most `num`."""
        order = np.argsort(-self._counts.astype(np.int64), kind="stable")[:num]
        return order[self._counts[order] > 0]

    def pin(self, pages: NDArray[np.int64]) -> None:
        """Keep these pages, once they are read; others are not kept for good any more. At most half of the cache."""
        for page in self._pinned & set(self._rows):
            self._probation[page] = None
        self._pinned = set(pages[: self._capacity // 2].tolist())
        for page in self._pinned:
            for segment in (self._window, self._probation, self._protected):
                segment.pop(page, None)

    def shrink(self, capacity: int) -> None:
        """Keep at most so many pages, at least 1, and give the memory of the others back."""
        self._capacity = capacity = max(1, min(capacity, self._capacity))
        self._pinned = set(sorted(self._pinned)[: capacity // 2])
        for page in set(self._rows) - self._pinned - set(self._window) - set(self._probation) - set(self._protected):
            self._probation[page] = None  # not pinned any more
        while len(self._rows) > capacity:
            self._evict(self._window or self._probation or self._protected)
        pages = list(self._rows)
        contents = np.empty((capacity, self._contents.shape[1]), np.uint8)
        contents[: len(pages)] = self._contents[[self._rows[page] for page in pages]]
        self._contents, self._free = contents, list(range(len(pages), capacity))
        self._rows = {page: row for row, page in enumerate(pages)}

    def drop(self, pages: NDArray[np.int64], num_pages: int) -> None:
        """Forget pages whose content has changed.

        Args:
            num_pages: pages of the file, which may have grown.
        """
        if num_pages > len(self._counts):
            grown = np.zeros(num_pages, np.uint8)
            grown[: len(self._counts)] = self._counts
            self._counts = grown
        for page in pages.tolist():
            if page in self._rows:
                self._forget(page)
        self._counts[pages] = 0

    # -- private ------------------------------------------------------------------------------

    def _count(self, pages: NDArray[np.int64]) -> None:
        np.add.at(self._counts, pages[self._counts[pages] < _MOST], 1)
        self._reads += len(pages)
        if self._reads >= _PERIOD * self._capacity:
            self._counts >>= 1
            self._reads //= 2

    def _touch(self, page: int) -> None:
        if page in self._protected:
            self._protected.move_to_end(page)
        elif page in self._window:
            self._window.move_to_end(page)
        elif page in self._probation:
            del self._probation[page]
            self._protected[page] = None
            if len(self._protected) > _PROTECTED * self._evictable:
                self._probation[self._protected.popitem(last=False)[0]] = None

    @property
    def _evictable(self) -> int:
        """Rows that are not for pinned pages."""
        return self._capacity - len(self._pinned)

    def _make_room(self, page: int) -> None:
        """Free a row for a page, if it can be had: pages leave the window, or one is evicted."""
        window = max(1, int(_WINDOW * self._evictable))
        while page not in self._pinned and len(self._window) >= window:
            self._admit(self._window.popitem(last=False)[0], window)
        if not self._free:
            segment = self._probation or self._protected or self._window
            if segment:
                self._evict(segment)

    def _admit(self, page: int, window: int) -> None:
        """Keep a page that leaves the window, or the one that would be evicted next."""
        if len(self._probation) + len(self._protected) < self._evictable - window:
            self._probation[page] = None
            return
        segment = self._probation or self._protected
        victim = next(iter(segment), None)
        if victim is not None and self._counts[page] > self._counts[victim]:
            self._evict(segment)
            self._probation[page] = None
        else:
            self._forget(page)

    def _evict(self, segment: OrderedDict[int, None]) -> None:
        self._forget(next(iter(segment)))

    def _forget(self, page: int) -> None:
        for segment in (self._window, self._probation, self._protected):
            segment.pop(page, None)
        row = self._rows.pop(page, None)
        if row is not None:
            self._free.append(row)
