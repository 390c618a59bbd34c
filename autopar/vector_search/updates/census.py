"""Read all lists once: count dead entries, find slots that no list has, and measure recall again.

In: the lists of a state. Out: a `Census`. Recall is that of vectors of the corpus as queries, or of the user's sample,
against their true neighbours, which the same pass finds; the choice of lists that reaches the target follows as at
build time. Vectors of the corpus are two samples: of all, and of those that were added last. Each has to reach the
target, so a new distribution of vectors is not hidden behind the old one, which the lists fit better.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.duplicates import row_hashes
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.recall_tuning import MEASURED_AT, can_reach, sample_size
from autopar.vector_search.on_disk.choice_tuning import Choice, tuned_choice
from autopar.vector_search.on_disk.hit_model import Lists
from autopar.vector_search.on_disk.probing import Nearest, prepared
from autopar.vector_search.updates.contents import Contents
from autopar.vector_search.updates.list_map import ListMap
from autopar.vector_search.updates.slots import ALIVE

#: Candidates per query: the neighbours, each in up to so many lists.
_HELD = 16
#: Minimum queries of a sample, if there are so many vectors; as many as at build time while comparing them with all vectors
#: costs at most so many scores.
_QUERIES, _MOST_QUERIES, _SCORES = 1024, 4096, 2**30


class Census(NamedTuple):
    """What a pass over all lists found.

    Args:
        dead: int64 `[num_lists]`, dead entries of each list.
        is_held: bool `[num_slots]`, slots that a list has an entry of.
        choice: how queries choose lists for the recall target; None if there is nothing to measure.
    """

    dead: NDArray[np.int64]
    is_held: NDArray[np.bool_]
    choice: Choice | None


def census(
    lists: ListMap,
    contents: Contents,
    died: NDArray[np.int64],
    recall_target: float,
    queries: NDArray[Any] | None,
    recent: NDArray[Any],
    seed: int,
) -> Census:
    """Read all lists.

    Args:
        died: time of death of each slot.
        queries: the user's sample, `[m, d]`; None: vectors of the corpus.
        recent: `[m, d]`, the vectors that were added last.

    Raises:
        IndexFileError: a page is damaged or cannot be read.
    """
    sample = _Sample.of(lists, contents, died, recall_target, queries, recent, seed)
    compared = prepared(sample.queries, lists.metric, lists.centre)
    found = _Neighbours.of(len(compared))
    dead, is_held = np.zeros(lists.num_lists, np.int64), np.zeros(lists.num_slots, np.bool_)
    squares = np.zeros(lists.num_lists)
    for entries in contents.scan():
        is_live = died[entries.positions] == ALIVE
        is_held[entries.positions] = True
        owners = np.repeat(lists.owners[entries.lists], entries.counts)
        dead += np.bincount(owners, ~is_live, lists.num_lists).astype(np.int64)
        if not len(compared):
            continue
        vectors = prepared(entries.vectors, lists.metric, lists.centre)
        far = ((vectors - lists.centroids[owners]) ** 2).sum(axis=1)
        squares += np.bincount(owners, far * is_live, lists.num_lists)
        scores = _scores(compared, vectors, lists)
        scores[:, ~is_live] = -np.inf
        if sample.own is not None:
            scores[sample.own[:, None] == row_hashes(entries.vectors, lists.metric)[None]] = -np.inf
        found = found.with_more(scores, entries.positions, owners)
    num_live = np.maximum(lists.lengths - dead, 0)
    radii = np.sqrt(np.where(num_live > 0, squares / np.maximum(num_live, 1), squares.sum() / max(1, num_live.sum())))
    return Census(dead, is_held, _chosen(lists, compared, found, radii.astype(np.float32), recall_target, sample.each))


class _Sample(NamedTuple):
    """Queries.

    Args:
        queries: `[m, d]`.
        own: hashes of the vectors that are queries, which are no neighbours of themselves; None for the user's.
        each: the queries of each sample.
    """

    queries: NDArray[Any]
    own: NDArray[np.uint64] | None
    each: tuple[slice, ...]

    @classmethod
    def of(
        cls,
        lists: ListMap,
        contents: Contents,
        died: NDArray[np.int64],
        recall_target: float,
        queries: NDArray[Any] | None,
        recent: NDArray[Any],
        seed: int,
    ) -> _Sample:
        """The user's queries; or vectors of the corpus, and of those that were added last, if they are enough."""
        if queries is not None:
            return cls(queries, None, (slice(None),))
        affordable = min(_MOST_QUERIES, _SCORES // max(1, lists.num_slots))
        most, draw = max(_QUERIES, sample_size(recall_target), affordable), np.random.default_rng(seed)
        drawn = _distinct(_drawn(lists, contents, died, 2 * most, draw), lists, most, draw)
        recent = _distinct(recent, lists, most, draw)
        if not can_reach(len(recent), recall_target):
            return cls(drawn, row_hashes(drawn, lists.metric), (slice(None),))
        both = np.concatenate([drawn, recent])
        return cls(both, row_hashes(both, lists.metric), (slice(0, len(drawn)), slice(len(drawn), None)))


class _Neighbours(NamedTuple):
    """The best entries of each query so far, `[num_queries, m]`, in any order: scores, slots, and the lists they are in."""

    scores: NDArray[np.float32]
    slots: NDArray[np.int64]
    lists: NDArray[np.int64]

    @classmethod
    def of(cls, num_queries: int) -> _Neighbours:
        """None yet."""
        shape = (num_queries, MEASURED_AT * _HELD)
        none = np.full(shape, NO_ID, np.int64)
        return cls(np.full(shape, -np.inf, np.float32), none, none)

    def with_more(self, scores: NDArray[np.float32], slots: NDArray[np.int32], lists: NDArray[Any]) -> _Neighbours:
        """Those of further entries too.

        Args:
            scores: `[num_queries, num_entries]`.
            slots, lists: `[num_entries]`.
        """
        worst = self.scores.min(axis=1)
        row, column = np.nonzero(scores > worst[:, None])  # few, and the rest cannot be among the best
        num_better = np.bincount(row, minlength=len(scores))
        place = np.arange(len(row)) - (np.cumsum(num_better) - num_better)[row]
        shape = (len(scores), int(num_better.max(initial=0)))
        more, which = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int64)
        more[row, place], which[row, place] = scores[row, column], column
        width, every = self.scores.shape[1], np.concatenate([self.scores, more], axis=1)
        kept = np.argpartition(-every, width - 1, axis=1)[:, :width]
        parts = ((self.slots, slots.astype(np.int64)[which]), (self.lists, lists.astype(np.int64)[which]))
        return _Neighbours(
            np.take_along_axis(every, kept, axis=1),
            *(np.take_along_axis(np.concatenate(part, axis=1), kept, axis=1) for part in parts),
        )

    def held(self) -> NDArray[np.int32]:
        """int32 `[num_queries, k, copies]`: the lists that hold each of the k best vectors; `NO_ID` for fewer."""
        width = max(1, int(max((np.bincount(row[row >= 0]).max(initial=0) for row in self.slots), default=1)))
        held = np.full((len(self.slots), MEASURED_AT, width), NO_ID, np.int32)
        for row in range(len(self.slots)):
            order = np.argsort(-self.scores[row], kind="stable")
            order = order[np.isfinite(self.scores[row][order])]
            known: dict[int, int] = {}
            filled = np.zeros(MEASURED_AT, np.int64)
            for at in order.tolist():
                rank = known.setdefault(int(self.slots[row, at]), len(known))
                if rank < MEASURED_AT:
                    held[row, rank, filled[rank]] = self.lists[row, at]
                    filled[rank] += 1
        return held


def _scores(queries: NDArray[np.float32], vectors: NDArray[np.float32], lists: ListMap) -> NDArray[np.float32]:
    found = queries @ vectors.T
    return 2 * found - (vectors**2).sum(axis=1)[None] if lists.metric == "l2" else found


def _drawn(
    lists: ListMap, contents: Contents, died: NDArray[np.int64], most: int, draw: np.random.Generator
) -> NDArray[Any]:
    """Vectors of the corpus that live, `[m, d]`, about `most`."""
    total = int(lists.counts.sum())
    if not total:
        return np.zeros((0, lists.centroids.shape[1]), lists.dtype)
    share = lists.counts / total
    drawn = draw.choice(len(share), most, p=share)
    wanted = np.bincount(drawn, minlength=len(share))
    found = []
    for entries in contents.scan(np.flatnonzero(wanted)):
        ends = np.cumsum(entries.counts)
        for extent, begin, end in zip(
            entries.lists.tolist(), (ends - entries.counts).tolist(), ends.tolist(), strict=True
        ):
            rows = begin + draw.permutation(end - begin)[: wanted[extent]]
            found.append(entries.vectors[rows[died[entries.positions[rows]] == ALIVE]])
    return np.concatenate(found)


def _distinct(vectors: NDArray[Any], lists: ListMap, most: int, draw: np.random.Generator) -> NDArray[Any]:
    """At most so many of some vectors, drawn from the distinct ones."""
    first = np.unique(row_hashes(vectors, lists.metric), return_index=True)[1]
    return vectors[draw.permutation(first)[:most]]


def _chosen(
    lists: ListMap,
    compared: NDArray[np.float32],
    found: _Neighbours,
    radii: NDArray[np.float32],
    recall_target: float,
    samples: tuple[slice, ...],
) -> Choice | None:
    """The choice of lists that reaches the target, from the lists that hold the true neighbours."""
    held = found.held()
    if not (held != NO_ID).any():
        return None
    sizes = lists.extents.last_pages + 1 - lists.extents.first_pages
    return tuned_choice(
        lambda some, width: nearest_lists(lists, compared[some], width),
        held,
        Lists(lists.centroids, lists.lengths, radii),
        np.bincount(lists.owners, sizes, lists.num_lists).astype(np.int64),
        lists.extents.entry_bytes,
        lists.metric,
        recall_target,
        samples=samples,
    )


def nearest_lists(lists: ListMap, queries: NDArray[np.float32], effort: int) -> Nearest:
    """The nearest lists of each query, as `on_disk.probing.nearest_lists`, for lists whose number changes.

    Args:
        queries: `[num_queries, d]`, `prepared`.
        effort: at most the number of lists.
    """
    products = queries @ lists.centroids.T
    if lists.metric == "inner_product":
        near = _top(products, effort)
        ones = np.ones(near.shape, np.float32)  # lists that change have no rule, which would need distances
        return Nearest(near, ones, ones)
    if lists.metric == "l2":
        squares = (queries**2).sum(axis=1)[:, None] + (lists.centroids**2).sum(axis=1)[None] - 2 * products
    else:
        lengths = np.linalg.norm(lists.centroids, axis=1)
        squares = 2 - 2 * products / np.where(lengths > 0, lengths, 1)
    near = _top(-squares, effort)
    distances = np.sqrt(np.maximum(np.take_along_axis(squares, near, axis=1), 0))
    ratios = distances / np.maximum(distances[:, :1], np.finfo(np.float32).tiny)
    return Nearest(near, ratios.astype(np.float32), distances.astype(np.float32))


def _top(scores: NDArray[np.floating], num: int) -> NDArray[np.int64]:
    """The places of the largest scores of each row, largest first; of equal ones, the first."""
    if num < scores.shape[1]:
        some = np.sort(np.argpartition(-scores, num - 1, axis=1)[:, :num], axis=1)
    else:
        some = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    order = np.argsort(-np.take_along_axis(scores, some, axis=1), axis=1, kind="stable")
    return np.take_along_axis(some, order, axis=1).astype(np.int64)
