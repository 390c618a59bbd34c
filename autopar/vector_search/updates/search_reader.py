"""Read the pages of a file that changes: one reader for all searches, with a cache that drops pages that were written again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from autopar.vector_search.on_disk.cached_reader import CachedReader
from autopar.vector_search.on_disk.index import Reads
from autopar.vector_search.on_disk.page_cache import PageCache
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.reader_table import open_reader
from autopar.vector_search.on_disk.readers import ReadCounts, Reader
from autopar.vector_search.updates.page_store import PageStore

#: The engine whose view of a file has the size that it had when it was opened.
_OF_FIXED_SIZE = "mmap"


@dataclass(slots=True)
class SearchReader:
    """The reader of the searches of one index. Its lock is held while a search reads.

    Args:
        engine: name of the engine.
        cache: pages in memory; None: no cache.
        used_bytes: bytes of the lists that searches have probed.
    """

    store: PageStore
    engine: str
    reader: Reader
    cache: PageCache | None = None
    used_bytes: int = 0
    is_open: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    _before: ReadCounts = field(default_factory=ReadCounts)

    @classmethod
    def of(cls, store: PageStore, engine: str, cache_pages: int) -> SearchReader:
        """Open a file.

        Args:
            cache_pages: pages of the cache; 0: no cache.

        Raises:
            IndexFileError, SearchError: as `open_reader`.
        """
        name, reader = open_reader(engine, store.path)
        if not cache_pages:
            return cls(store, name, reader)
        cache = PageCache(cache_pages, store.state.num_pages)
        return cls(store, name, CachedReader(reader, cache, store.file_id), cache)

    def refresh(self, cache_pages: int) -> None:
        """Follow a change of the file, before a search uses it.

        Args:
            cache_pages: pages that the cache may have; it does not grow.
        """
        with self.lock:
            if not self.is_open:
                return
            if self.cache is not None:
                if cache_pages < self.cache.stats.pages:
                    self.cache.shrink(cache_pages)
                self.cache.drop(self.store.written_pages, self.store.state.num_pages)
            if self.engine != _OF_FIXED_SIZE:
                return
            old, (_, reader) = self.reader, open_reader(self.engine, self.store.path)
            self._before.requests += old.counts.requests
            self._before.pages += old.counts.pages
            self.reader = reader if self.cache is None else CachedReader(reader, self.cache, self.store.file_id)
            old.close()

    def reads(self) -> Reads:
        """What was read from the file since the index was opened."""
        counts, before = self.reader.counts, self._before
        pages = counts.pages + before.pages
        return Reads(counts.requests + before.requests, pages, pages * PAGE_BYTES, self.used_bytes)

    def close(self) -> None:
        """Close the file, once."""
        if self.is_open:
            self.is_open = False
            self.reader.close()
