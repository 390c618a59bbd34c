"""Number the vectors of an updatable index by slots, and find the slot of an id.

A slot is a position in the sense of lists on disk. A vector keeps its slot until it is deleted or replaced; the slot is
used again when no list has entries of it. A slot is dead from the sequence number of the operation that deleted it, so a
search of an older snapshot still sees the vector. One thread at a time changes slots; searches read without a lock,
because an array is replaced when it grows, and a slot that a snapshot can see changes only its time of death.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID

#: The time of death of a vector that lives.
ALIVE = np.iinfo(np.int64).max
#: Minimum slots of the arrays.
_MIN_CAPACITY = 1024


@dataclass(slots=True)
class Slots:
    """The id, metadata and time of death of each slot.

    Args:
        ids: int64 `[capacity]`; `NO_ID` for a slot without a vector.
        metadata: `[capacity]`.
        died: int64 `[capacity]`, sequence number; `ALIVE` for a vector that lives, 0 for a slot without a vector.
        count: slots in use are below.
        free: slots below `count` that may be used again, the last first.
        num_live: vectors that live.
        by_id, sorted_ids: int32 and int64, slots in the order of their ids and these ids, at the last `index_ids`.
        recent: slot by id of what changed since; `NO_ID` for a deleted one.
    """

    ids: NDArray[np.int64]
    metadata: NDArray[Any]
    died: NDArray[np.int64]
    count: int = 0
    free: list[int] = field(default_factory=list)
    num_live: int = 0
    by_id: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    sorted_ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    recent: dict[int, int] = field(default_factory=dict)

    @classmethod
    def empty(cls, metadata: np.dtype[Any]) -> Slots:
        """No slots."""
        return cls(np.zeros(0, np.int64), np.zeros(0, metadata), np.zeros(0, np.int64))

    @classmethod
    def of(cls, ids: NDArray[np.int64], metadata: NDArray[Any], is_live: NDArray[np.bool_]) -> Slots:
        """The slots of these vectors."""
        died = np.where(is_live, ALIVE, 0)
        slots = cls(ids, metadata, died, len(ids), num_live=int(is_live.sum()))
        slots.index_ids()
        return slots

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.ids, self.metadata, self.died, self.by_id, self.sorted_ids)
        return sum(array.nbytes for array in arrays)

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32 `[n]`, the slot of each id; `NO_ID` if no vector that lives has it."""
        found = np.full(len(ids), NO_ID, np.int32)
        if len(self.by_id) and len(ids):
            place = np.searchsorted(self.sorted_ids, ids)
            slots = self.by_id[np.minimum(place, len(self.by_id) - 1)]
            is_found = (self.ids[slots] == ids) & (self.died[slots] == ALIVE)
            found[is_found] = slots[is_found]
        for at, each in enumerate(ids.tolist()) if self.recent else ():
            found[at] = self.recent.get(each, found[at])
        return found

    def add(self, ids: NDArray[np.int64], metadata: NDArray[Any]) -> NDArray[np.int32]:
        """Give slots to vectors whose ids are not in use."""
        self.make_room(len(ids))
        reused = min(len(ids), len(self.free))
        fresh = len(ids) - reused
        taken = [self.free.pop() for _ in range(reused)]
        slots = np.array([*taken, *range(self.count, self.count + fresh)], np.int32)
        self.count += fresh
        self.ids[slots], self.metadata[slots], self.died[slots] = ids, metadata, ALIVE
        self.num_live += len(ids)
        self.recent.update(zip(ids.tolist(), slots.tolist(), strict=True))
        return slots

    def kill(self, slots: NDArray[np.int32], sequence: int) -> None:
        """Delete the vectors of slots that live."""
        self.died[slots] = sequence
        self.num_live -= len(slots)
        self.recent.update(dict.fromkeys(self.ids[slots].tolist(), NO_ID))

    def index_ids(self) -> None:
        """Sort the ids of the vectors that live. Only slots that are dead then may become free."""
        live = np.flatnonzero(self.died[: self.count] == ALIVE)
        self.by_id = live[np.argsort(self.ids[live], kind="stable")].astype(np.int32)
        self.sorted_ids = self.ids[self.by_id]
        self.recent = {}

    def make_room(self, num: int) -> None:
        """Let the arrays have slots for so many vectors more."""
        count = self.count + max(0, num - len(self.free))
        if count <= len(self.ids):
            return
        capacity, grown = max(_MIN_CAPACITY, count + count // 4), []
        for old in (self.ids, self.metadata, self.died):
            new = np.zeros(capacity, old.dtype)
            new[: len(old)] = old
            grown.append(new)
        grown[0][len(self.ids) :] = NO_ID
        self.ids, self.metadata, self.died = grown
