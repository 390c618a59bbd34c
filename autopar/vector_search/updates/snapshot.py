"""Hold one state of an updatable index for searches, and know which states are being read.

In: lists or a graph, a delta in memory, slots. Out: immutable `Snapshot`s. A search takes the newest one and keeps it; what only
older snapshots use is given back when no search reads them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.frame.recall_tuning import Measured
from autopar.vector_search.updates.graph.graph_map import GraphMap
from autopar.vector_search.updates.list_map import ListMap

#: What is on disk: lists, or a graph.
Stored = ListMap | GraphMap


@dataclass(frozen=True, slots=True)
class Delta:
    """Vectors that are not on disk yet, in growing arrays of which a snapshot sees the first `count`.

    Args:
        slots: int32 `[capacity]`.
        vectors: `[capacity, d]`.
    """

    slots: NDArray[np.int32]
    vectors: NDArray[Any]
    count: int = 0

    @classmethod
    def empty(cls, dim: int, dtype: np.dtype[Any]) -> Delta:
        """No vectors."""
        return cls(np.zeros(0, np.int32), np.zeros((0, dim), dtype))

    def with_more(self, slots: NDArray[np.int32], vectors: NDArray[Any]) -> Delta:
        """The delta with more vectors. Only the newest delta may be extended."""
        room, end = self.with_room(len(slots)), self.count + len(slots)
        room.slots[self.count : end], room.vectors[self.count : end] = slots, vectors
        return Delta(room.slots, room.vectors, end)

    def with_room(self, num: int) -> Delta:
        """The delta in arrays that have room for some more vectors."""
        end = self.count + num
        if end <= len(self.slots):
            return self
        own, held = np.zeros(2 * end, np.int32), np.zeros((2 * end, self.vectors.shape[1]), self.vectors.dtype)
        own[: self.count], held[: self.count] = self.slots[: self.count], self.vectors[: self.count]
        return Delta(own, held, self.count)

    def without_first(self, num: int) -> Delta:
        """The delta without its oldest vectors."""
        return Delta(self.slots[num : self.count].copy(), self.vectors[num : self.count].copy(), self.count - num)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One state.

    Args:
        number: increases with each snapshot.
        sequence: the last operation that it contains; a slot lives if it died later.
        ids, metadata, died: of each slot, as in `Slots`.
        num_slots: slots are below.
        num_live: vectors that live.
    """

    number: int
    sequence: int
    stored: Stored
    delta: Delta
    ids: NDArray[np.int64]
    metadata: NDArray[Any]
    died: NDArray[np.int64]
    num_slots: int
    num_live: int
    measured: Measured
    pruning: float | None

    def is_live(self, slots: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether the vectors of slots live in this state."""
        return self.died[slots] > self.sequence


@dataclass(slots=True)
class Readers:
    """The snapshots that are being read."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: Counter[int] = field(default_factory=Counter)
    newest: Snapshot | None = None

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """The newest snapshot; it stays readable within the context."""
        with self._lock:
            snapshot = self.newest
            assert snapshot is not None
            self._numbers[snapshot.number] += 1
        try:
            yield snapshot
        finally:
            with self._lock:
                self._numbers[snapshot.number] -= 1
                if not self._numbers[snapshot.number]:
                    del self._numbers[snapshot.number]

    def publish(self, snapshot: Snapshot) -> None:
        """Make a snapshot the newest one."""
        with self._lock:
            self.newest = snapshot

    def oldest(self) -> int:
        """The number of the oldest snapshot that is read, or can be."""
        with self._lock:
            assert self.newest is not None
            return min(self._numbers, default=self.newest.number)
