"""Write reorganized lists: as a whole, or as one more extent with what was added.

In: a `Rebalance`. Out: the new `ListMap`; its pages are written, but no superblock refers to them. What is written is
packed in the order in which the lists lay before, so near lists stay adjacent. A list with several extents is written as
a whole when what was added has become large; until then its added extents are merged. So a vector is written a few times
altogether.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.hit_rule import HitRule
from autopar.vector_search.on_disk.layout import packed
from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES
from autopar.vector_search.on_disk.stored_lists import FIRST_PAGE
from autopar.vector_search.updates.contents import Members
from autopar.vector_search.updates.list_map import ListMap
from autopar.vector_search.updates.page_store import PageWriter
from autopar.vector_search.updates.rebalance import Rebalance

#: Maximum extents of a list. With so many, it is written as a whole if added entries are this share of it.
MAX_EXTENTS, ADDED_SHARE = 3, 0.3
#: A list is written as a whole if this share of its entries is known to be dead.
DEAD_SHARE = 0.3


class _Extent(NamedTuple):
    """An extent of the new map: an old one that stays, or entries to write."""

    owner: int
    kept: int | None
    written: Members | None


@dataclass(frozen=True, slots=True)
class ListWriter:
    """Writes the lists of a `Rebalance`.

    Args:
        dead: int64 `[num_lists]`, entries of each old list that are known to be dead.
    """

    work: Rebalance
    dead: NDArray[np.int64]

    def due(self) -> list[int]:
        """Lists that have to be written as a whole: many entries are dead, or many were added."""
        old, found = self.work.old, []
        for which in range(old.num_lists):
            if which in self.work.dropped or which in self.work.whole:
                continue
            extents = old.extents_of(which)
            more = sum(len(part.slots) for part in self.work.added.get(which, ()))
            tail = more + int(old.counts[extents.start + 1 : extents.stop].sum())
            is_large = more and len(extents) >= MAX_EXTENTS and tail >= ADDED_SHARE * old.lengths[which]
            if is_large or self.dead[which] > DEAD_SHARE * old.lengths[which]:
                found.append(which)
        return found

    def write(self, writer: PageWriter, num_slots: int, centre: NDArray[np.float32] | None) -> ListMap:
        """Write what has changed.

        Raises:
            OSError: it cannot be written.
        """
        work, old = self.work, self.work.old
        left = work.left()
        extents = [extent for owner, which in enumerate(left) for extent in self._extents(owner, which)]
        starts, counts = np.zeros(len(extents), np.int64), np.zeros(len(extents), np.int64)
        written = [place for place, extent in enumerate(extents) if extent.written is not None]
        for place, extent in enumerate(extents):
            if extent.kept is not None:
                starts[place], counts[place] = old.starts[extent.kept], old.counts[extent.kept]
        parts = [extents[place].written or Members(np.zeros(0, np.int32), np.zeros(0)) for place in written]
        counts[written] = [len(part.slots) for part in parts]
        places = [self._place(left[extents[place].owner]) for place in written]
        starts[written] = self._written(writer, parts, np.argsort(places, kind="stable"))
        owners = np.array([extent.owner for extent in extents], np.int32)
        return ListMap(
            work.centroids[left], centre, owners, starts, counts, old.dtype, old.metric, num_slots, self._rule(left)
        )

    # -- private ------------------------------------------------------------------------------

    def _rule(self, left: list[int]) -> HitRule | None:
        """The rule of the old map, with the radii of lists that are written as a whole as they are now."""
        rule = self.work.old.rule
        if rule is None or not left:
            return None
        radii = [self.work.radius(which) if which in self.work.whole else rule.radii[which] for which in left]
        return replace(rule, radii=np.array(radii, np.float32), width=min(rule.width, len(left)))

    def _extents(self, owner: int, which: int) -> list[_Extent]:
        work, old = self.work, self.work.old
        if which in work.whole:
            members = Members.concatenated([work.whole[which], *work.added.get(which, ())])
            return [_Extent(owner, None, members)] if len(members.slots) else []
        extents = list(old.extents_of(which)) if which < old.num_lists else []
        added = work.added.get(which, [])
        if not added:
            return [_Extent(owner, each, None) for each in extents]
        keep = extents if len(extents) < MAX_EXTENTS else extents[:1]
        merged = [work.contents.of_extent(each) for each in extents[len(keep) :]]
        written = _Extent(owner, None, Members.concatenated([*merged, *added]))
        return [*(_Extent(owner, each, None) for each in keep), written]

    def _place(self, which: int) -> int:
        """Where the list, or the one that it was split from, lay before."""
        old = self.work.old
        while which >= old.num_lists and self.work.parents[which] != which:
            which = self.work.parents[which]
        extents = old.extents_of(which) if which < old.num_lists else range(0)
        return int(old.starts[extents.start]) if len(extents) else 0

    def _written(self, writer: PageWriter, parts: list[Members], order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write entries as extents, and return where each starts."""
        one = self.work.old.extents.entry_bytes
        sizes = np.array([one * len(part.slots) for part in parts], np.int64)
        virtual, end = packed(sizes, order)
        num_pages = -(-end // PAYLOAD_BYTES)
        stream = np.zeros(num_pages * PAYLOAD_BYTES, np.uint8)
        for begin, part in zip(virtual.tolist(), parts, strict=True):
            middle = begin + part.slots.nbytes
            stream[begin:middle] = part.slots.astype("<i4").view(np.uint8)
            vectors = np.ascontiguousarray(part.vectors).reshape(-1).view(np.uint8)
            stream[middle : middle + vectors.size] = vectors
        is_cut = np.ones(num_pages + 1, np.bool_)  # whether no extent crosses the boundary before a page
        for begin, size in zip(virtual.tolist(), sizes.tolist(), strict=True):
            is_cut[begin // PAYLOAD_BYTES + 1 : (begin + size - 1) // PAYLOAD_BYTES + 1] = False
        cuts = np.flatnonzero(is_cut)
        firsts = writer.write_groups(stream, np.diff(cuts).tolist())
        group = np.searchsorted(cuts, virtual // PAYLOAD_BYTES, side="right") - 1
        if not len(parts):
            return virtual
        pages = firsts[group] + virtual // PAYLOAD_BYTES - cuts[group]
        return (pages - FIRST_PAGE) * PAYLOAD_BYTES + virtual % PAYLOAD_BYTES
