"""Run checkpoints: when they are due, in a thread or at once, and give back what older states used.

In: the newest state. Out: checkpoints. While one is being written, updates and searches go on; operations wait only when
the delta has become twice as large as it should be.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError
from autopar.vector_search.updates import log as logs
from autopar.vector_search.updates.checkpoint import Frozen, Written
from autopar.vector_search.updates.commit import CommitQueue
from autopar.vector_search.updates.contents import Members
from autopar.vector_search.updates.files import why
from autopar.vector_search.updates.folder import Opened
from autopar.vector_search.updates.page_store import PageStore
from autopar.vector_search.updates.snapshot import Snapshot
from autopar.vector_search.updates.stored_kinds import kind_of
from autopar.vector_search.updates.writer_state import WriterState

#: Changes that count as one vector of the delta.
_CHANGES = 4


class _Retired(NamedTuple):
    """What only snapshots before a number use."""

    number: int
    pages: NDArray[np.int64]
    slots: NDArray[np.int64]


class Maintenance:
    """Checkpoints of one index.

    Args:
        grown: called when the file may have grown.
        background: whether a thread runs them.
    """

    def __init__(
        self,
        state: WriterState,
        store: PageStore,
        commits: CommitQueue,
        found: Opened,
        grown: Callable[[], None],
        background: bool,
    ) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter(dict.fromkeys(("checkpoints", *kind_of(state.stored).counts), 0))
        self._state, self._store, self._commits, self._grown = state, store, commits, grown
        self._settings, self._queries, self._background = found.settings, found.queries, background
        self._dead, self._num_changes = found.dead, found.num_changes
        self._retired: list[_Retired] = []
        self._known_free: set[int] = (
            set()
        )  # slots that are free, or will be, without the checkpoint that is being written
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def make_room(self) -> None:
        """Wait for a checkpoint if the delta is twice as large as it should be, or if one has failed otherwise than by the
        disk.

        Raises:
            IndexFileError: the checkpoint cannot be written.
        """
        if self._due() >= 2 or self._failure is not None:
            with self.lock:  # a checkpoint that is running ends
                is_due = self._due() >= 2 or self._failure is not None
            if is_due:
                self.run()

    def after_commit(self) -> None:
        """Start a checkpoint if it is due. The operation is in the log: what fails here is not its failure, and `make_room`
        of the next one reports it."""
        if self._due() < 1 or self._is_stopped:
            return
        if not self._background:
            self._run_quietly()
        elif self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run_quietly, name="autopar-checkpoint", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                self._failure = error
            else:
                self._thread = thread

    def stop(self) -> None:
        """Wait for a checkpoint that is running; no other starts."""
        self._is_stopped = True
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        """Write a checkpoint.

        Raises:
            IndexFileError: it cannot be written; the state before is intact.
        """
        with self.lock:
            self._failure = None
            self._release()
            try:
                frozen, old_log, size = self._frozen()
                write = kind_of(frozen.stored).checkpoint
                written = write(self._store, frozen, self._settings, self._queries)
                self._adopt(written, len(frozen.delta.slots), size)
            except (Exception, KeyboardInterrupt) as error:
                if self._store.is_ahead:
                    self._state.broken = error if isinstance(error, IndexFileError) else self._ahead(error)
                if isinstance(error, OSError):
                    raise IndexFileError(
                        f"{self._store.path} cannot be written ({why(error)}): nothing is lost, and the operations stay"
                        " in the log. Free space or check the disk"
                    ) from error
                raise
            with suppress(OSError, MemoryError):  # else it is removed when the index is opened again
                self._store.files.remove(old_log)

    def items(self, snapshot: Snapshot) -> Iterator[tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]]:
        """Ids, vectors and metadata of the vectors of a snapshot, each once."""
        is_seen = np.zeros(snapshot.num_slots, np.bool_)
        delta = snapshot.delta
        parts = kind_of(snapshot.stored).members(self._store, snapshot.stored, snapshot.num_slots)
        for part in (Members(delta.slots[: delta.count], delta.vectors[: delta.count]), *parts):
            part = Members.concatenated([part.some(snapshot.is_live(part.slots) & ~is_seen[part.slots])])
            is_seen[part.slots] = True
            yield snapshot.ids[part.slots], part.vectors.copy(), snapshot.metadata[part.slots]

    # -- private ------------------------------------------------------------------------------

    def _due(self) -> float:
        """How full the delta is, of what makes a checkpoint due. Vectors that were deleted take less memory and log."""
        settings, state = self._settings, self._state
        limit = max(settings.delta_vectors, int(settings.delta_share * state.slots.num_live))
        return max(state.delta.count, state.num_changes / _CHANGES) / limit

    def _run_quietly(self) -> None:
        try:
            self.run()
        except IndexFileError:
            return  # the delta grows until `make_room` reports it
        except Exception as error:
            self._failure = error

    def _ahead(self, error: BaseException) -> IndexFileError:
        """Why nothing can be written any more."""
        broken = IndexFileError(
            f"a checkpoint of {self._store.path} is on the device, and cannot be used ({why(error)}): nothing is lost."
            " Open the index again"
        )
        broken.__cause__ = error
        return broken

    def _frozen(self) -> tuple[Frozen, Path, int]:
        """Start the next log, and copy what the checkpoint writes; the log that it makes superfluous; changes in it."""
        state, generation = self._state, self._store.state.generation + 1
        with self._commits.lock:
            if state.broken:
                raise state.broken
            old = state.log
            if old.path != logs.path_of(old.path.parent, generation):
                state.log = logs.created(old.path.parent, old.files, old.file_id, generation, old.next_sequence)
                state.logged_bytes += state.log.size
                old.close()
            slots, delta, num = state.slots, state.delta, state.slots.count
            frozen = Frozen(
                state.sequence,
                state.stored,
                Members(delta.slots[: delta.count], delta.vectors[: delta.count]),
                slots.ids[:num].copy(),
                slots.metadata[:num].copy(),
                slots.died[:num].copy(),
                self._num_changes + state.num_changes,
                self._dead,
                state.tuned,
            )
            self._known_free = {*slots.free, *(slot for each in self._retired for slot in each.slots.tolist())}
            return frozen, logs.path_of(old.path.parent, generation - 1), state.num_changes

    def _adopt(self, written: Written, num_stored: int, num_changes: int) -> None:
        """Let updates and searches go on with a state that is on the device."""
        state = self._state
        pages = self._store.adopt(written.state, written.stored.data_pages)
        self._grown()
        with self._commits.lock:
            delta = state.delta.without_first(num_stored)
            state.stored, state.tuned, state.delta = written.stored, written.tuned, delta
            state.num_changes -= num_changes
            state.slots.index_ids()
            state.publish()
            assert state.readers.newest is not None
            free = np.zeros(0, np.int64) if written.free is None else written.free
            free = free[[slot not in self._known_free for slot in free.tolist()]]  # those may be in use by now
            self._retired.append(_Retired(state.readers.newest.number, pages, free))
        self._dead = written.dead
        self._num_changes = 0 if written.is_measured else self._num_changes + num_changes
        self._store.is_ahead = False
        self.counts.update(written.counts | {"checkpoints": 1})

    def _release(self) -> None:
        """Give back what no snapshot that is being read uses."""
        oldest = self._state.readers.oldest()
        while self._retired and self._retired[0].number <= oldest:
            _, pages, free = self._retired.pop(0)
            self._store.release(pages)
            with self._commits.lock:
                self._state.slots.free += free.tolist()
