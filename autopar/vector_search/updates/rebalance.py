"""Keep lists short and vectors near their lists: split long lists, merge short ones, and reassign (SPFresh's LIRE).

In: lists, and vectors to add. Out: the changes: new centroids, the lists that are written as a whole, and what is added
to the others. Nothing is written here.

After a split, two kinds of vectors may be nearer to another list (arXiv 2410.14452, section 3.3): those of the split list
that were nearer to its old centroid than to both new ones, and those of lists around it that are nearer to a new
centroid than they were to the old one. Each is compared with all centroids. An entry leaves a list only for a nearer
one that holds the vector, so no vector is lost.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, Metric
from autopar.vector_search.on_disk.probing import prepared
from autopar.vector_search.updates.assign import closure, halves, nearest, squared_distances
from autopar.vector_search.updates.contents import Contents, Members
from autopar.vector_search.updates.list_map import ListMap

#: A list is split if it is longer than so many means, and merged into others if it is shorter than so many.
LONGEST, SHORTEST = 1.7, 0.2
#: If the mean is below this share of the target, lists shorter than so many means are merged too.
_FEWEST, _FEW = 0.75, 0.6
#: A centroid is moved if its squared distance from the mean of the vectors that are nearest to it is more than this share of
#: their mean squared distance; of all vectors of the list, if fewer than this share are nearest to it.
_MOVED, _OWN = 0.05, 0.25
#: Lists around a split whose vectors are checked.
_AROUND = 64


@dataclass(frozen=True, slots=True)
class Copies:
    """How many lists a vector is in.

    Args:
        most: maximum lists per vector.
        reach: maximum distance of a further centroid, relative to the nearest one.
    """

    most: int
    reach: float


@dataclass(slots=True)
class Rebalance:
    """Lists that are being reorganized.

    Args:
        lengths: entries of each list, with what is added.
        whole: lists that are written as a whole, and their entries.
        added: entries that are added to other lists.
        parents: for each list, the one of the old map that it lies near; its own number for an old list.
        dropped: lists that are no more.
        num_splits, num_merges, num_moved: what was done.
    """

    old: ListMap
    contents: Contents
    copies: Copies
    centroids: NDArray[np.float32]
    lengths: NDArray[np.int64]
    whole: dict[int, Members] = field(default_factory=dict)
    added: defaultdict[int, list[Members]] = field(default_factory=lambda: defaultdict(list))
    parents: list[int] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    num_splits: int = 0
    num_merges: int = 0
    num_moved: int = 0

    @classmethod
    def of(cls, old: ListMap, contents: Contents, copies: Copies, dead: NDArray[np.int64]) -> Rebalance:
        """Start with the lists as they are.

        Args:
            dead: int64 `[num_lists]`, entries that are known to be dead.
        """
        centroids, lengths = old.centroids, np.maximum(old.lengths - dead, 0)
        return cls(old, contents, copies, centroids, lengths, parents=list(range(old.num_lists)))

    @property
    def mean(self) -> float:
        """Mean entries of a list."""
        return float(self.lengths.sum()) / max(1, len(self.lengths) - len(self.dropped))

    def add(self, members: Members) -> None:
        """Assign vectors to lists."""
        if not len(members.slots):
            return
        compared = self._prepared(members)
        if not len(self.centroids):
            self.centroids, self.lengths = compared.mean(axis=0, keepdims=True), np.zeros(1, np.int64)
            self.parents.append(0)
            self.whole[0] = members.some(np.zeros(0, np.int64))
        lists = closure(compared, self._comparable(), min(self.copies.most, len(self.centroids)), self.copies.reach)
        rows = np.broadcast_to(np.arange(len(lists))[:, None], lists.shape)[lists != NO_ID]
        owners = lists[lists != NO_ID]
        order = np.argsort(owners, kind="stable")
        edges = np.flatnonzero(np.diff(owners[order])) + 1
        for some in np.split(order, edges) if len(order) else ():
            self._append(int(owners[some[0]]), members.some(rows[some]))

    def balance(self, target: float, longest: int) -> None:
        """Merge the shortest lists, then split until no list is too long.

        Args:
            target: mean entries that lists should have.
            longest: lists of at most so many entries are never split.
        """
        order = np.argsort(self.lengths, kind="stable").tolist()
        for which in order:
            is_short = self.lengths[which] < SHORTEST * self.mean
            is_one_of_many = self.mean < _FEWEST * target and self.lengths[which] < _FEW * self.mean
            if not (is_short or is_one_of_many) or len(self.lengths) - len(self.dropped) < 2:
                break
            self._merge(which)
        checked: dict[int, int] = {}
        limit = lambda: max(longest, LONGEST * min(self.mean, target))  # noqa: E731
        while True:
            long = [int(each) for each in np.argsort(-self.lengths) if self.lengths[each] > limit()]
            long = [each for each in long if checked.get(each) != self.lengths[each]]
            if not long:
                return
            for which in long:
                self.members(which)
                if self.lengths[which] > limit():
                    self._split(which)
                checked[which] = int(self.lengths[which])

    def clean(self, which: int) -> None:
        """Write a list as a whole: around its vectors of today, without dead entries and without vectors that belong
        elsewhere."""
        members = self.members(which)
        if len(self.lengths) - len(self.dropped) < 2 or not len(members.slots):
            return
        compared = self._prepared(members)
        self._recentre(which, compared)
        near = nearest(compared, self._comparable(), 1)
        own = squared_distances(compared, self.centroids[which : which + 1])[:, 0]
        is_far = (near.lists[:, 0] != which) & (own > self.copies.reach**2 * near.squares[:, 0])
        for target in np.unique(near.lists[is_far, 0]).tolist():
            self._give(target, members.some(is_far & (near.lists[:, 0] == target)))
        self._set(which, members.some(~is_far))

    def members(self, which: int) -> Members:
        """All entries of a list that live; it is written as a whole from now on."""
        parts = [self.whole[which]] if which in self.whole else [self.contents.of(which)]
        self._set(which, Members.concatenated([*parts, *self.added.pop(which, ())]))
        return self.whole[which]

    def radius(self, which: int) -> float:
        """The rms distance of the vectors of a list that is written as a whole from its centroid."""
        compared = self._prepared(self.whole[which])
        return float(np.sqrt(((compared - self.centroids[which]) ** 2).sum(axis=1).mean())) if len(compared) else 0.0

    def left(self) -> list[int]:
        """The lists that are not dropped; the new map has them in this order. The last ones take the places of dropped
        ones, so that the others keep theirs, and few pages of centroids change."""
        num = len(self.lengths) - len(self.dropped)
        last = [which for which in range(num, len(self.lengths)) if which not in self.dropped]
        return [which if which not in self.dropped else last.pop() for which in range(num)]

    # -- private ------------------------------------------------------------------------------

    def _set(self, which: int, members: Members) -> None:
        self.whole[which] = members
        self.lengths[which] = len(members.slots) + sum(len(part.slots) for part in self.added.get(which, ()))

    def _append(self, which: int, members: Members) -> None:
        self.added[which].append(members)
        self.lengths[which] += len(members.slots)

    def _give(self, target: int, members: Members) -> None:
        """Add vectors to a list, except those that it has."""
        missing = members.some(~np.isin(members.slots, self._slots_of(target)))
        if len(missing.slots):
            self.num_moved += len(missing.slots)
            self._append(target, missing)

    def _slots_of(self, which: int) -> NDArray[np.int32]:
        here = self.whole[which] if which in self.whole else self.contents.of(which)
        return np.concatenate([here.slots, *(part.slots for part in self.added.get(which, ()))])

    def _split(self, which: int) -> None:
        """Divide a list, and reassign vectors around it."""
        members, old = self.whole[which], self.centroids[which].copy()
        compared = self._prepared(members)
        is_second, means = halves(compared)
        second = len(self.centroids)
        self.centroids = np.concatenate([self.centroids, means[1:]])
        self.centroids[which] = means[0]
        self.lengths = np.append(self.lengths, 0)
        self.parents.append(self.parents[which])
        self._set(which, members.some(~is_second))
        self._set(second, members.some(is_second))
        self.num_splits += 1
        to_old = squared_distances(compared, old[None])[:, 0]
        to_new = squared_distances(compared, means)
        own = np.where(is_second, second, which)
        self._reassign(members, compared, to_old <= to_new.min(axis=1), own)
        self._attract(old, means, (which, second))

    def _recentre(self, which: int, compared: NDArray[np.float32]) -> None:
        """Move the centroid of a list to where its vectors are by now, and reassign vectors around it."""
        is_own = nearest(compared, self._comparable(), 1).lists[:, 0] == which
        own = compared[is_own] if is_own.sum() >= _OWN * len(compared) else compared
        old, new = self.centroids[which].copy(), own.mean(axis=0)
        if ((new - old) ** 2).sum() <= _MOVED * ((own - new) ** 2).sum(axis=1).mean():
            return
        self.centroids = self.centroids.copy()  # the old map has the others
        self.centroids[which] = new
        self._attract(old, new[None], (which,))

    def _attract(self, old: NDArray[np.float32], means: NDArray[np.float32], new: tuple[int, ...]) -> None:
        """Reassign vectors of the lists around a centroid that has been replaced.

        Args:
            old: f32 `[d]`, the centroid that was there.
            means: f32 `[m, d]`, the new centroids.
            new: their lists.
        """
        around = nearest(old[None], self._comparable(), len(new) + _AROUND).lists[0]
        around = [int(each) for each in around if each not in new and each not in self.dropped]
        self.contents.load(each for each in around if each not in self.whole)
        parts = [self.whole[each] if each in self.whole else self.contents.of(each) for each in around]
        if not parts:
            return
        there = Members(*(np.concatenate(each) for each in zip(*parts, strict=True)))
        own = np.repeat(np.array(around), [len(part.slots) for part in parts])
        compared = self._prepared(there)
        squares = squared_distances(compared, np.concatenate([old[None], means]))
        to_own = ((compared - self.centroids[own]) ** 2).sum(axis=1)
        self._reassign(there, compared, squares[:, 1:].min(axis=1) < np.minimum(squares[:, 0], to_own), own)

    def _reassign(
        self,
        members: Members,
        compared: NDArray[np.float32],
        is_checked: NDArray[np.bool_],
        own: NDArray[np.int64],
    ) -> None:
        """Give vectors to their nearest lists, if those are not the lists that they come from, `own`."""
        if not is_checked.any():
            return
        some, own = members.some(is_checked), own[is_checked]
        lists = nearest(compared[is_checked], self._comparable(), 1).lists[:, 0]
        for target in np.unique(lists[lists != own]).tolist():
            self._give(target, Members.concatenated([some.some((lists == target) & (own != target))]))

    def _merge(self, which: int) -> None:
        """Give the vectors of a list to their nearest other lists."""
        members = self.members(which)
        self.dropped.add(which)
        self.lengths[which] = 0
        del self.whole[which]
        self.num_merges += 1
        if not len(members.slots):
            return
        lists = nearest(self._prepared(members), self._comparable(), 1).lists[:, 0]
        for target in np.unique(lists).tolist():
            self._give(target, members.some(lists == target))

    def _comparable(self) -> NDArray[np.float32]:
        """The centroids; those of dropped lists are infinitely far."""
        if not self.dropped:
            return self.centroids
        found = self.centroids.copy()
        found[list(self.dropped)] = 1e18
        return found

    def _prepared(self, members: Members) -> NDArray[np.float32]:
        return prepared(members.vectors, self._metric, self.old.centre)

    @property
    def _metric(self) -> Metric:
        return self.old.metric
