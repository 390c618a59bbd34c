"""Provide the index that is searched and changed at the same time: `UpdatableIndex`."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.index import Found, IndexStats, found_at
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.on_disk.index import Reads
from autopar.vector_search.on_disk.memory_division import InMemory, divided
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.reader_table import AUTO, checked_reader
from autopar.vector_search.updates import folder as folders
from autopar.vector_search.updates import log as logs
from autopar.vector_search.updates.checked_updates import checked_metadata, checked_new, checked_rows
from autopar.vector_search.updates.commit import CommitQueue
from autopar.vector_search.updates.files import FILES, Files
from autopar.vector_search.updates.filters import Filter, allowed_slots
from autopar.vector_search.updates.index_stats import stats_of
from autopar.vector_search.updates.maintenance import Maintenance
from autopar.vector_search.updates.page_store import PageStore
from autopar.vector_search.updates.search_reader import SearchReader
from autopar.vector_search.updates.settings import Settings
from autopar.vector_search.updates.snapshot import Delta
from autopar.vector_search.updates.stored_kinds import kind_of
from autopar.vector_search.updates.writer_state import Operation, WriterState, delete_of, put_of

KIND = "updatable"

#: Maximum queries whose lists are read together.
AT_ONCE = 256


class UpdatableIndex:
    """Inverted lists or a graph in a folder, which can be changed. Use it as a context, or `close` it.

    An operation that has returned is on the device, and each later search sees it. A search sees one state.

    Args:
        path: the folder.
        reader: an engine of `reader_table.READERS`, or `"auto"`.
        files: the operations on files.
        background: whether a thread moves vectors to disk; else the operation that makes it due does.
        memory_budget_bytes: host memory for the index, searches, and a cache of pages; None: no cache.
        batch: expected number of queries per search, for the memory that it works with.

    Raises:
        IndexFileError: the folder is damaged, no index, or open in another process.
        SearchError: this machine does not have the engine, or the budget is too small.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        reader: str = AUTO,
        files: Files = FILES,
        background: bool = True,
        memory_budget_bytes: float | None = None,
        batch: int = AT_ONCE,
    ) -> None:
        self.path = Path(path)
        checked_reader(reader)
        found = folders.opened(self.path, files)
        self.settings = found.settings
        layout = found.settings.layout
        self._state = WriterState(
            found.log,
            found.slots,
            Delta.empty(layout.dim, layout.dtype),
            found.stored,
            found.tuned,
            found.store.state.sequence,
        )
        for sequence, record in found.records:
            self._state.apply(record, sequence)
        self._state.inserted_bytes = 0
        self._state.publish()
        self._store = found.store
        try:
            left = partial(_cache_pages, self._state, self._store, self.settings, memory_budget_bytes, batch)
            self._reader = search_reader = SearchReader.of(self._store, reader, left())
        except BaseException:
            _closed(self._store, self._state, None)
            raise
        self._commits = CommitQueue(self._state.commit)

        def grown() -> None:
            try:
                pages = left()
            except SearchError:  # what cannot be less is more than the budget: at the next `load` it is refused
                pages = 1
            search_reader.refresh(pages)

        self._maintenance = Maintenance(self._state, self._store, self._commits, found, grown, background)
        self._release = weakref.finalize(self, _closed, self._store, self._state, self._reader)

    # -- changes ------------------------------------------------------------------------------

    def insert(self, ids: ArrayLike, vectors: ArrayLike, metadata: ArrayLike | None = None) -> None:
        """Add vectors: all of them, or none.

        Args:
            ids: 64-bit integers, `[n]`, that no vector of the index has.
            vectors: `[n, d]`, in the index's dtype, or numbers that convert to it.
            metadata: `[n]`, of the index's metadata dtype.

        Raises:
            SearchError: an invalid argument, or an id that exists; nothing has changed.
            IndexFileError: the log cannot be written; nothing has changed.
        """
        self._put(ids, vectors, metadata, is_insert=True)

    def upsert(self, ids: ArrayLike, vectors: ArrayLike, metadata: ArrayLike | None = None) -> int:
        """Add vectors, and replace those whose ids exist. Return the number replaced. Else as `insert`."""
        return self._put(ids, vectors, metadata, is_insert=False)

    def delete(self, ids: ArrayLike) -> int:
        """Delete the vectors of some ids, and return how many there were. Ids that do not exist are ignored.

        Raises:
            SearchError: an invalid argument.
            IndexFileError: the log cannot be written; nothing has changed.
        """
        checked = inputs.checked_ids(np.atleast_1d(np.asarray(ids)), int(np.size(ids)))
        return self._submit(Operation(delete_of(checked)), checked.nbytes) if len(checked) else 0

    def checkpoint(self) -> None:
        """Move vectors that are in memory to the lists or the graph on disk, and drop the log. Usually this happens by itself.

        Raises:
            IndexFileError: it cannot be written; the state before is intact.
        """
        self._check_open()
        self._maintenance.run()

    # -- searches -----------------------------------------------------------------------------

    def search(self, queries: ArrayLike, k: int, *, filter: Filter | None = None, effort: int | None = None) -> Found:
        """See `Index.search`.

        Args:
            filter: the vectors that may be returned: their ids, or a function that gets the metadata of all, `[n]`, and
                returns bool `[n]`.

        Raises:
            IndexFileError: a page that the search needs is damaged or cannot be read.
        """
        layout = self.settings.layout
        checked = inputs.checked_queries(queries, layout.dim, layout.dtype)
        k = inputs.checked_count("k", k)
        effort = None if effort is None else inputs.checked_count("effort", effort)
        with self._state.readers.reading() as snapshot:
            allowed = None if filter is None else allowed_slots(snapshot, filter)
            num_allowed = snapshot.num_live if allowed is None else int(allowed.sum())
            kept = max(1, min(k, snapshot.num_live))
            with self._reader.lock:
                self._check_open()
                search = kind_of(snapshot.stored).search(snapshot, self._reader, allowed, num_allowed, effort)
                parts = [search.run(checked[at : at + AT_ONCE], kept) for at in range(0, max(1, len(checked)), AT_ONCE)]
            distances, slots = (np.concatenate(each) for each in zip(*parts, strict=True))
            found = found_at(slots, distances, snapshot.ids, k, self.settings.metric)
        return found.of_one() if np.ndim(queries) == 1 else found

    def metadata(self, ids: ArrayLike) -> NDArray[Any]:
        """The metadata of some ids, `[n]`.

        Raises:
            SearchError: no vector has one of the ids.
            IndexFileError: the index has to be opened again.
        """
        wanted = np.atleast_1d(np.asarray(ids, np.int64))
        with self._commits.lock:
            if self._state.broken is not None:  # slots may have a part of an operation
                raise self._state.broken
            slots = self._state.slots.find(wanted)
            if (slots == NO_ID).any():
                raise SearchError(f"`ids` has {wanted[np.argmin(slots)]}, and no vector of the index has that id")
            return self._state.slots.metadata[slots]

    def items(self) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]]:
        """Ids, vectors and metadata of all vectors of one state, in chunks, each vector once.

        Raises:
            IndexFileError: a page is damaged or cannot be read.
        """
        self._check_open()
        with self._state.readers.reading() as snapshot:
            yield from self._maintenance.items(snapshot)

    def __len__(self) -> int:
        newest = self._state.readers.newest
        assert newest is not None
        return newest.num_live

    # -- the whole ----------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Copy the index to another folder, which appears when it is complete.

        Raises:
            IndexFileError: it exists, or cannot be written.
        """
        self.checkpoint()

        def fill(folder: Path) -> None:
            with self._maintenance.lock:  # pages do not change meanwhile; a log only grows
                with self._commits.lock:
                    for each in logs.all_in(self.path):
                        shutil.copyfile(each, folder / each.name)
                shutil.copyfile(self.path / folders.PAGES, folder / folders.PAGES)

        folders.complete(Path(path), fill, FILES)

    def verify(self) -> None:
        """Read all lists, or the graph, and check each page.

        Raises:
            IndexFileError: a page is damaged or cannot be read.
        """
        for _ in self.items():
            pass

    def reads(self) -> Reads:
        """What searches have read since the index was opened."""
        return self._reader.reads()

    def stats(self) -> IndexStats:
        """See `Index.stats`. `details` has what is in memory, and what was written since the index was opened."""
        written = {**self._maintenance.counts, "reader": self._reader.engine, "reads": self.reads()}
        written |= {"cache": self._reader.cache.stats if self._reader.cache else None}
        return stats_of(KIND, self._state, self._store, self.settings, written)

    def close(self) -> None:
        """Close the files. A closed index cannot be used; its log has what is only in memory."""
        if not self._reader.is_open:
            return
        self._maintenance.stop()
        with self._maintenance.lock, self._commits.lock, self._reader.lock:
            self._state.broken = IndexFileError(f"the index of {self.path} is closed: load it again")
            self._release()

    def __enter__(self) -> UpdatableIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- private ------------------------------------------------------------------------------

    def _put(self, ids: ArrayLike, vectors: ArrayLike, metadata: ArrayLike | None, is_insert: bool) -> int:
        layout = self.settings.layout
        rows = checked_new(vectors, layout)
        own_ids = inputs.checked_ids(np.asarray(ids), len(rows))
        items = checked_metadata(metadata, len(rows), layout.metadata)
        if not len(rows):
            return 0
        checked_rows(rows, layout)
        return self._submit(Operation(put_of(own_ids, rows, items), is_insert), rows.nbytes + 8 * len(rows))

    def _submit(self, operation: Operation, num_bytes: int) -> int:
        self._check_open()
        self._maintenance.make_room()
        result = self._commits.submit(operation, num_bytes)
        self._maintenance.after_commit()
        return result

    def _check_open(self) -> None:
        if not self._reader.is_open:
            raise SearchError(f"the index of {self.path} is closed: load it again")


def _cache_pages(
    state: WriterState, store: PageStore, settings: Settings, budget_bytes: float | None, batch: int
) -> int:
    """Pages of a cache within a budget; 0 without a budget.

    Raises:
        SearchError: the budget is too small.
    """
    if budget_bytes is None:
        return 0
    layout, num_live = settings.layout, state.slots.num_live
    delta = 2 * max(settings.delta_vectors, int(settings.delta_share * num_live)) * layout.dim * layout.dtype.itemsize
    stored = InMemory("the index", state.slots.memory_bytes + state.stored.memory_bytes + delta)
    working = kind_of(state.stored).working_bytes(state.stored, min(batch, AT_ONCE))
    most = max(2**20, int(budget_bytes // PAGE_BYTES))  # the file may grow
    return divided(budget_bytes, [stored], working, max(store.state.num_pages, most)).cache_pages


def _closed(store: PageStore, state: WriterState, reader: SearchReader | None) -> None:
    if reader is not None:
        reader.close()
    state.log.close()
    store.close()
