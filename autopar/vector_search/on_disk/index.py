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
from autopar.vector_search.data.index import Found, IndexStats, found_at
from autopar.vector_search.data.index_file import written_whole
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.recall_tuning import Measured
from autopar.vector_search.on_disk.list_reads import ListReads
from autopar.vector_search.on_disk.list_scores import ListScores
from autopar.vector_search.on_disk.page_file import PageFile, damaged
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.probing import Probing, nearest_lists, prepared, probed
from autopar.vector_search.on_disk.reader_table import open_reader
from autopar.vector_search.on_disk.stored_lists import FIRST_PAGE, loaded

KIND = "ivfdisk"

#: Maximum queries whose lists are read together.
AT_ONCE = 256
#: Minimum vectors in the probed lists, per neighbour.
_PER_NEIGHBOUR = 4


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

    Args:
        pages: an open page file of this kind.
        reader: an engine of `reader_table.READERS`, or `"auto"`.

    Raises:
        IndexFileError: the file is damaged, or cannot be opened by this engine.
        SearchError: this machine does not have the engine.
    """

    def __init__(self, pages: PageFile, reader: str = "auto") -> None:
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
        self._reads = ListReads(self.path, pages.file_id, self._lists, self._reader)
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._is_open = True
        self._release = weakref.finalize(self, self._reader.close)  # also if the user does not close it

    def search(
        self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None, effort: int | None = None
    ) -> Found:
        """See `Index.search`. With an `effort`, that many lists are probed; without, lists are also pruned by their
        distance, as `build` found it to reach the recall target. Searches of several threads run one after the other.

        Raises:
            IndexFileError: a page that the search needs is damaged or cannot be read.
        """
        lists = self._lists
        checked = inputs.checked_queries(queries, lists.dim, lists.dtype)
        k, allowed = inputs.checked_count("k", k), inputs.checked_filter(filter, lists.num_vectors)
        effort = None if effort is None else inputs.checked_count("effort", effort)
        num_allowed = lists.num_vectors if allowed is None else int(np.count_nonzero(allowed))
        kept = min(k, lists.num_vectors)
        with self._lock:
            if not self._is_open:
                raise SearchError(f"the index of {self.path} is closed: load it again")
            parts = [
                self._searched(checked[start : start + AT_ONCE], kept, allowed, num_allowed, effort)
                for start in range(0, max(1, len(checked)), AT_ONCE)
            ]
        distances, positions = (np.concatenate(each) for each in zip(*parts, strict=True))
        ids = np.full(positions.shape, NO_ID, np.int64)
        ids[positions != NO_ID] = lists.ids_of(positions[positions != NO_ID])
        found = _padded(Found(ids, distances), k, lists.metric)
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
        with self._lock:
            self._reads.check(FIRST_PAGE, self._pages.num_pages - FIRST_PAGE)

    def reads(self) -> Reads:
        """What searches and `verify` have read."""
        counts = self._reader.counts
        return Reads(counts.requests, counts.pages, counts.num_bytes, self._used_bytes)

    def stats(self) -> IndexStats:
        """See `Index.stats`. `device_bytes` are the bytes of the arrays that are in memory between searches."""
        lists, reads = self._lists, self.reads()
        details: dict[str, Any] = dict(self.measured.details)
        details |= {"pruning": self._pruning, "num_lists": lists.num_lists, "copies": lists.copies}
        details |= {"space": float(lists.counts.sum()) / lists.num_vectors}
        details |= {"file_bytes": self._pages.num_pages * PAGE_BYTES, "reader": self._engine, "reads": reads}
        return IndexStats(
            kind=KIND,
            metric=lists.metric,
            dtype=lists.dtype.name,
            num_vectors=lists.num_vectors,
            dim=lists.dim,
            num_devices=1,
            device_bytes=lists.memory_bytes,
            layouts=(),
            searches={},
            details=details | ({"why": self._why} if self._why else {}),
            reached=self.measured.reached,
        )

    def close(self) -> None:
        """Close the file. A closed index cannot be searched."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._release()

    def __enter__(self) -> DiskIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- private ------------------------------------------------------------------------------

    def _searched(
        self, queries: NDArray[Any], k: int, allowed: NDArray[np.bool_] | None, num_allowed: int, effort: int | None
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and positions, `[num_queries, k]`. Queries that find too few probe twice as many lists, until all."""
        probing = self._probing(effort, k, num_allowed)
        distances, positions = self._run(queries, k, allowed, probing)
        while probing.effort < self._lists.num_lists and num_allowed:
            short = np.flatnonzero(positions[:, min(k, num_allowed) - 1] == NO_ID)
            if not short.size:
                break
            probing = Probing(min(2 * probing.effort, self._lists.num_lists))
            distances, positions = distances.copy(), positions.copy()
            distances[short], positions[short] = self._run(queries[short], k, allowed, probing)
        return distances, positions

    def _probing(self, effort: int | None, k: int, num_allowed: int) -> Probing:
        """The lists to probe: enough for k vectors, and more for a filter, doubled until they make up for it."""
        lists = self._lists
        mean = max(1.0, float(lists.counts.sum()) / lists.num_lists)
        enough = min(lists.num_lists, -int(-_PER_NEIGHBOUR * min(k, num_allowed) // mean))
        wanted, share = max(effort or self.measured.effort, enough), max(1, num_allowed) / lists.num_vectors
        pruning = self._pruning if effort is None and share == 1 else None
        while share < 1:
            wanted, share = 2 * wanted, 2 * share
        return Probing(min(wanted, lists.num_lists), pruning, max(1, enough))

    def _run(
        self, queries: NDArray[Any], k: int, allowed: NDArray[np.bool_] | None, probing: Probing
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        lists = self._lists
        compared = prepared(queries, lists.metric, lists.centre)
        nearest = nearest_lists(compared, lists.centroids, lists.metric, probing.effort)
        is_probed = probed(nearest, probing, lists.num_lists)
        scored = ListScores(queries, k, lists.metric, lists.centre, lists.copies)
        for entries in self._reads.entries(np.flatnonzero(is_probed.any(axis=0))):
            self._used_bytes += int(entries.counts.sum()) * lists.entry_bytes
            is_compared = np.repeat(is_probed[:, entries.lists], entries.counts, axis=1)
            if allowed is not None:
                is_compared &= allowed[entries.positions]
            scored.add(entries.vectors, entries.positions, is_compared)
        return scored.best()


def _padded(found: Found, k: int, metric: Any) -> Found:
    """Pad results to k columns."""
    positions = np.where(found.ids == NO_ID, NO_ID, 0)
    if found.ids.shape[1] == k:
        return found
    padded = found_at(positions, found.distances, np.zeros(1, np.int64), k, metric)
    ids = np.full(padded.ids.shape, NO_ID, np.int64)
    ids[:, : found.ids.shape[1]] = found.ids
    return Found(ids, padded.distances)
