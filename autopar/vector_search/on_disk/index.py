"""Search inverted lists on disk: the index `ivfdisk`.

In: a page file. Out: an `Index` that keeps centroids in memory and reads the lists that queries probe. The effort of a
search is the number of lists. Scores are compiled by XLA, on one device.
"""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.index import Found, IndexStats, padded
from autopar.vector_search.data.index_file import written_whole
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.recall_tuning import Measured
from autopar.vector_search.on_disk.cached_reader import CachedReader, runs_of
from autopar.vector_search.on_disk.list_reads import ListReads, working_bytes
from autopar.vector_search.on_disk.list_search import ListSearch
from autopar.vector_search.on_disk.memory_division import InMemory, divided
from autopar.vector_search.on_disk.page_cache import PageCache
from autopar.vector_search.on_disk.page_file import PageFile, damaged
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.reader_table import open_reader
from autopar.vector_search.on_disk.readers import Run
from autopar.vector_search.on_disk.stored_lists import FIRST_PAGE, StoredLists, loaded

KIND = "ivfdisk"

#: Maximum queries whose lists are read together.
AT_ONCE = 256


class Reads(NamedTuple):
    """What searches have read since the index was opened.

    Args:
        requests: reads of consecutive pages.
        pages: pages of 4,096 bytes.
        num_bytes: bytes of these pages.
        used_bytes: bytes of the lists that were probed, each counted once per batch.
    """

    requests: int
    pages: int
    num_bytes: int
    used_bytes: int


class DiskIndex:
    """Inverted lists in a page file. Use it as a context, or `close` it.

    Its `searches`, which are not thread-safe, are used with its `lock`.

    Args:
        pages: an open page file of this kind.
        reader: an engine of `reader_table.READERS`, or `"auto"`.
        memory_budget_bytes: host memory for the index, searches, and a cache of pages; None: no cache.
        batch: expected number of queries per search, for the memory that it works with.

    Raises:
        IndexFileError: the file is damaged, or cannot be opened by this engine.
        SearchError: this machine does not have the engine, or the budget is too small.
    """

    def __init__(
        self,
        pages: PageFile,
        reader: str = "auto",
        memory_budget_bytes: float | None = None,
        batch: int = AT_ONCE,
    ) -> None:
        self.path = pages.path
        self._pages = pages
        try:
            self._lists = loaded(pages)
            measured = Measured.loaded(pages.settings["measured"])
            pruning = pages.settings["pruning"]
            pruning = None if pruning is None else float(pruning)
            self._why = str(pages.settings["why"])
            if type(measured.effort) is not int or not 1 <= measured.effort <= self._lists.num_lists:
                raise ValueError(f"effort {measured.effort!r}")
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise damaged(self.path, f"its settings are invalid ({error!r})") from error
        self.measured = measured
        self._pruning = pruning
        self._engine, self._reader = open_reader(reader, self.path)
        self._cache: PageCache | None = None
        if memory_budget_bytes is not None:
            stored = InMemory("the index", self._lists.memory_bytes)
            try:
                working = working_bytes(self._lists, min(batch, AT_ONCE))
                division = divided(memory_budget_bytes, [stored], working, pages.num_pages)
            except SearchError:
                self._reader.close()
                raise
            if division.cache_pages:
                self._cache = PageCache(division.cache_pages, pages.num_pages)
                self._reader = CachedReader(self._reader, self._cache, pages.file_id)
        reads = ListReads(self.path, pages.file_id, self._lists, self._reader)
        whole_counts = pages.arrays.get("whole_counts", self._lists.counts)
        self.searches = ListSearch(self._lists, reads, measured.effort, pruning, whole_counts)
        self.lock = threading.Lock()
        self._is_open = True
        self._release = weakref.finalize(self, self._reader.close)  # also if the user does not close it

    def search(
        self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None, effort: int | None = None
    ) -> Found:
        """See `Index.search`. With an `effort`, that many lists are probed; without, the lists in which `build` has
        learned to expect neighbours. Searches of several threads run one after the other.

        Raises:
            IndexFileError: a page that the search needs is damaged or cannot be read.
        """
        lists = self._lists
        checked = inputs.checked_queries(queries, lists.dim, lists.dtype)
        k, allowed = inputs.checked_count("k", k), inputs.checked_filter(filter, lists.num_vectors)
        effort = None if effort is None else inputs.checked_count("effort", effort)
        num_allowed = lists.num_vectors if allowed is None else int(np.count_nonzero(allowed))
        kept = min(k, lists.num_vectors)
        with self.lock:
            self._check_open()
            parts = [
                self.searches.search(checked[start : start + AT_ONCE], kept, allowed, num_allowed, effort)
                for start in range(0, max(1, len(checked)), AT_ONCE)
            ]
        distances, positions = (np.concatenate(each) for each in zip(*parts, strict=True))
        ids = np.full(positions.shape, NO_ID, np.int64)
        ids[positions != NO_ID] = lists.ids_of(positions[positions != NO_ID])
        found = padded(Found(ids, distances), k, lists.metric)
        return found.of_one() if np.ndim(queries) == 1 else found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Copy the file to another path, atomically."""
        target = Path(path)
        if target.exists() and target.samefile(self.path):
            return
        with written_whole(target) as file, self.path.open("rb") as own:
            shutil.copyfileobj(own, file, 2**20)

    def verify(self) -> None:
        """Read the whole file and check every page; a search checks the pages that it reads.

        Raises:
            IndexFileError: a page is damaged or cannot be read.
        """
        with self.lock:
            self.searches.reads.check(FIRST_PAGE, self._pages.num_pages - FIRST_PAGE)

    def pin(self, queries: ArrayLike) -> int:
        """Keep the pages that most of these queries read in memory from now on: those that more than one reads, in at most
        half of the cache. Return how many.

        Args:
            queries: `[num_queries, d]`, a few hundred of your queries.

        Raises:
            SearchError: invalid queries, or no cache.
            IndexFileError: a page cannot be read.
        """
        if self._cache is None:
            raise SearchError("the index has no cache: load it with `memory_budget_bytes=`")
        lists, reads = self._lists, np.zeros(self._pages.num_pages, np.int64)
        checked = inputs.checked_queries(queries, lists.dim, lists.dtype)
        for start in range(0, len(checked), AT_ONCE):
            reads += self.searches.page_reads(checked[start : start + AT_ONCE], len(reads))
        hot = np.argsort(-reads, kind="stable")
        hot = hot[reads[hot] > 1][: self._cache.stats.pages // 2]
        with self.lock:
            self._check_open()
            self._cache.pin(hot)
            self._reader.start(runs_of(np.sort(hot))).wait()
        return len(hot)

    def reads(self) -> Reads:
        """What searches and `verify` have read."""
        counts = self._reader.counts
        return Reads(counts.requests, counts.pages, counts.num_bytes, self.searches.used_bytes)

    def stats(self) -> IndexStats:
        """See `Index.stats`. `device_bytes` are the bytes of the arrays that are in memory between searches."""
        lists, reads = self._lists, self.reads()
        details: dict[str, Any] = dict(self.measured.details)
        details |= {"pruning": self._pruning, "num_lists": lists.num_lists, "copies": lists.copies}
        details |= {"space": float(lists.counts.sum()) / lists.num_vectors}
        details |= {"file_bytes": self._pages.num_pages * PAGE_BYTES, "reader": self._engine, "reads": reads}
        details |= {"cache": self._cache.stats if self._cache else None}
        return IndexStats(
            kind=KIND,
            metric=lists.metric,
            dtype=lists.dtype.name,
            num_vectors=lists.num_vectors,
            dim=lists.dim,
            num_devices=1,
            device_bytes=lists.memory_bytes + (self._cache.memory_bytes if self._cache else 0),
            layouts=(),
            searches={},
            details=details | ({"why": self._why} if self._why else {}),
            reached=self.measured.reached,
        )

    @property
    def lists(self) -> StoredLists:
        """What is in memory of the lists."""
        return self._lists

    @property
    def pruning(self) -> float | None:
        """The measured pruning, as in `Probing`."""
        return self._pruning

    @property
    def num_data_pages(self) -> int:
        """Pages from page 1 on that have lists."""
        return self._pages.num_data_pages

    def payloads_of(self, run: Run) -> NDArray[np.uint8]:
        """The payloads of some pages.

        Raises:
            IndexFileError: a page is damaged or cannot be read.
        """
        with self.lock:
            return self.searches.reads.payloads_of(run)

    def close(self) -> None:
        """Close the file. A closed index cannot be searched."""
        with self.lock:
            if self._is_open:
                self._is_open = False
                self._release()

    def _check_open(self) -> None:
        if not self._is_open:
            raise SearchError(f"the index of {self.path} is closed: load it again")

    def __enter__(self) -> DiskIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
