"""Read lists while they are reorganized: their entries that live, once each, kept in memory within a limit.

In: lists of a state. Out: slots and prepared vectors. Reads go through the operating system's cache, apart from the
searches' reader.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.list_reads import Entries, ListReads
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.readers import ReadCounts, Run, read_error
from autopar.vector_search.updates.list_map import ListMap
from autopar.vector_search.updates.page_store import PageStore
from autopar.vector_search.updates.slots import ALIVE


class Members(NamedTuple):
    """Entries of a list.

    Args:
        slots: int32 `[m]`.
        vectors: `[m, d]`.
    """

    slots: NDArray[np.int32]
    vectors: NDArray[Any]

    @classmethod
    def concatenated(cls, parts: Sequence[Members]) -> Members:
        """All entries of at least one part, each slot once."""
        slots = np.concatenate([part.slots for part in parts])
        vectors = np.concatenate([part.vectors for part in parts])
        first = np.sort(np.unique(slots, return_index=True)[1])
        return cls(slots[first], vectors[first]) if len(first) < len(slots) else cls(slots, vectors)

    def some(self, which: NDArray[Any]) -> Members:
        """The entries of a mask, or at some places."""
        return Members(self.slots[which], self.vectors[which])


@dataclass(frozen=True, slots=True)
class _Read:
    store: PageStore
    runs: Sequence[Run]

    def wait(self) -> NDArray[np.uint8]:
        """See `Pending.wait`."""
        parts = [np.zeros(0, np.uint8)]
        for run in self.runs:
            try:
                content = os.pread(self.store.handle, run.num_pages * PAGE_BYTES, run.first * PAGE_BYTES)
            except OSError as error:
                raise read_error(self.store.path, run, error) from None
            if len(content) != run.num_pages * PAGE_BYTES:
                raise read_error(self.store.path, run, None, len(content))
            parts.append(np.frombuffer(content, np.uint8))
        return np.concatenate(parts).reshape(-1, PAGE_BYTES)


@dataclass(slots=True)
class StoreReader:
    """A `Reader` of the file that is being changed."""

    store: PageStore
    counts: ReadCounts

    def start(self, runs: Sequence[Run]) -> _Read:
        """See `Reader.start`."""
        self.counts.add(runs)
        return _Read(self.store, runs)

    def close(self) -> None:
        """See `Reader.close`."""


class Contents:
    """The entries of lists that live.

    Args:
        died: time of death of each slot; dead entries are left out.
        max_bytes: bytes of vectors that are kept.
    """

    def __init__(self, store: PageStore, lists: ListMap, died: NDArray[np.int64], max_bytes: float) -> None:
        self._map, self._died, self._max_bytes = lists, died, max_bytes
        self._reads = ListReads(store.path, store.file_id, lists.extents, StoreReader(store, ReadCounts()))
        self._kept: OrderedDict[int, Members] = OrderedDict()
        self._bytes = 0

    def of(self, which: int) -> Members:
        """The entries of a list.

        Raises:
            IndexFileError: a page is damaged or cannot be read.
        """
        if which not in self._kept:
            self.load([which])
        self._kept.move_to_end(which)
        return self._kept[which]

    def load(self, which: Iterable[int]) -> None:
        """Read some lists that are not in memory, together."""
        missing = sorted({each for each in which if each not in self._kept})
        for each in missing:
            extents = [self.of_extent(extent) for extent in self._map.extents_of(each)]
            none = Members(np.zeros(0, np.int32), np.zeros((0, self._map.centroids.shape[1]), self._map.dtype))
            self._kept[each] = Members.concatenated([none, *extents])
            self._bytes += self._kept[each].vectors.nbytes
        while self._bytes > self._max_bytes and len(self._kept) > len(missing) + 1:
            self._bytes -= self._kept.popitem(last=False)[1].vectors.nbytes

    def of_extent(self, extent: int) -> Members:
        """The entries of one extent that live."""
        parts = [Members(each.positions, each.vectors) for each in self._reads.entries(np.array([extent]))]
        if not parts:
            return Members(np.zeros(0, np.int32), np.zeros((0, self._map.centroids.shape[1]), self._map.dtype))
        return parts[0].some(self._died[parts[0].slots] == ALIVE)

    def scan(self, extents: NDArray[np.int64] | None = None) -> Iterator[Entries]:
        """The entries of all extents, or of some, dead ones too, in waves."""
        return self._reads.entries(np.arange(len(self._map.owners)) if extents is None else extents)
