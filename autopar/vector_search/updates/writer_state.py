"""Apply operations to the newest state: the slots, the delta, and the log.

In: groups of operations. Out: a log that is on the device, then the changed state, then a new snapshot. An operation is
checked against the state and the operations before it in its group; if the log cannot be written, none is applied. Memory
is allocated before the log is written. If an operation of the log can still not be applied, its group is taken out of the
log, and no further operation is accepted, as the state may contain a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.on_disk.probe_tuning import Tuned
from autopar.vector_search.updates.commit import Ticket
from autopar.vector_search.updates.files import why
from autopar.vector_search.updates.log import Log
from autopar.vector_search.updates.records import Delete, Put, Record, encoded
from autopar.vector_search.updates.slots import Slots
from autopar.vector_search.updates.snapshot import Delta, Readers, Snapshot, Stored


@dataclass(frozen=True, slots=True)
class Operation:
    """What a user asks for.

    Args:
        record: what is logged.
        is_insert: whether ids that exist are refused.
    """

    record: Record
    is_insert: bool = False


@dataclass(slots=True)
class WriterState:
    """The newest state.

    Args:
        sequence: the last operation.
        stored: the lists, or the graph, of the last checkpoint.
        delta: the vectors since.
        num_changes: vectors inserted or deleted since the last checkpoint.
        logged_bytes: bytes written to logs since the index was opened.
        broken: why no operation is accepted any more.
    """

    log: Log
    slots: Slots
    delta: Delta
    stored: Stored
    tuned: Tuned
    sequence: int
    readers: Readers = field(default_factory=Readers)
    num_changes: int = 0
    logged_bytes: int = 0
    inserted_bytes: int = 0
    broken: IndexFileError | None = None
    _number: int = 0

    def commit(self, tickets: Sequence[Ticket]) -> None:
        """Log and apply a group of operations; see `CommitQueue`."""
        accepted: list[Ticket] = []
        changed: dict[int, bool] = {}
        for ticket in tickets:
            ticket.error = self.broken or self._refusal(ticket.operation, changed)
            if ticket.error is None:
                self._note(ticket.operation, changed)
                accepted.append(ticket)
        if not accepted:
            return
        before = self.log.size
        try:
            self._make_room([ticket.operation.record for ticket in accepted])
            last = self.log.append([encoded(ticket.operation.record) for ticket in accepted])
        except (OSError, IndexFileError) as error:
            if isinstance(error, IndexFileError):
                self.broken = error
            refusal = error if isinstance(error, IndexFileError) else _refused(self.log, error)
            for ticket in accepted:
                ticket.error = refusal
            return
        self.logged_bytes += self.log.size - before
        try:
            for sequence, ticket in enumerate(accepted, last + 1 - len(accepted)):
                ticket.result = self.apply(ticket.operation.record, sequence)
            self.publish()
        except (Exception, KeyboardInterrupt) as error:
            self.broken = self._taken_back(before, len(accepted), error)
            for ticket in accepted:
                ticket.error = self.broken
            if not isinstance(error, Exception):
                raise

    def apply(self, record: Record, sequence: int) -> int:
        """Change the state by an operation that is in the log. Return the number of vectors deleted or replaced."""
        slots = self.slots
        found = slots.find(record.ids)
        dead = found[found != NO_ID]
        slots.kill(dead, sequence)
        self.num_changes += len(dead)
        if isinstance(record, Put):
            self.delta = self.delta.with_more(slots.add(record.ids, record.metadata), record.vectors)
            self.num_changes += len(record.ids)
            self.inserted_bytes += record.vectors.nbytes
        self.sequence = sequence
        return len(dead)

    def publish(self) -> None:
        """Let searches see the state."""
        self._number += 1
        slots, (measured, pruning) = self.slots, self.tuned
        self.readers.publish(
            Snapshot(
                self._number,
                self.sequence,
                self.stored,
                self.delta,
                slots.ids,
                slots.metadata,
                slots.died,
                slots.count,
                slots.num_live,
                measured,
                pruning,
            )
        )

    def _make_room(self, records: Sequence[Record]) -> None:
        """Allocate what `apply` needs."""
        num = sum(len(record.ids) for record in records if isinstance(record, Put))
        self.slots.make_room(num)
        self.delta = self.delta.with_room(num)

    def _taken_back(self, size: int, num_records: int, error: BaseException) -> IndexFileError:
        """Take the last group out of the log; what the callers of its operations get."""
        try:
            self.log.take_back(size, num_records, error)
        except IndexFileError as second:
            return second
        refusal = IndexFileError(
            f"operations on the index of {self.log.path.parent} cannot be applied ({why(error)}): they have no effect, and"
            " nothing is lost. Open the index again"
        )
        refusal.__cause__ = error
        return refusal

    def _refusal(self, operation: Operation, changed: dict[int, bool]) -> SearchError | None:
        if not operation.is_insert:
            return None
        ids = operation.record.ids
        is_there = self.slots.find(ids) != NO_ID
        for at, each in enumerate(ids.tolist()) if changed else ():
            is_there[at] = changed.get(each, is_there[at])
        if not is_there.any():
            return None
        return SearchError(
            f"`ids` has {ids[np.argmax(is_there)]}, and the index has a vector of that id: replace it with `upsert`, or"
            " delete it first"
        )

    def _note(self, operation: Operation, changed: dict[int, bool]) -> None:
        """Note which ids an operation of the group makes exist."""
        changed.update(dict.fromkeys(operation.record.ids.tolist(), isinstance(operation.record, Put)))


def _refused(log: Log, error: OSError) -> IndexFileError:
    return IndexFileError(
        f"{log.path} cannot be written ({why(error)}): the operation has no effect, and nothing is lost. Free"
        " space or check the disk, and repeat it"
    )


def put_of(ids: NDArray[np.int64], vectors: NDArray[Any], metadata: NDArray[Any]) -> Put:
    """A `Put` of copies: the user may change the arrays."""
    return Put(ids.copy(), vectors.copy(), metadata.copy())


def delete_of(ids: NDArray[np.int64]) -> Delete:
    """A `Delete` of a copy."""
    return Delete(ids.copy())
