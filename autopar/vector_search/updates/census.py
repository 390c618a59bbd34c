"""Read all lists once: count dead entries, find slots that no list has, and measure recall again.

In: the lists of a state. Out: a `Census`. Recall is that of vectors of the corpus as queries, or of the user's sample,
against their true neighbours, which the same pass finds; the effort that reaches the target follows as at build time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.duplicates import row_hashes
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.recall_tuning import MEASURED_AT, sample_size
from autopar.vector_search.on_disk.probe_tuning import Tuned, tuned
from autopar.vector_search.on_disk.probing import Nearest, prepared
from autopar.vector_search.updates.contents import Contents
from autopar.vector_search.updates.list_map import ListMap
from autopar.vector_search.updates.slots import ALIVE

#: Candidates per query: the neighbours, each in up to so many lists.
_HELD = 16
#: Lists near each query that the tuning considers.
_TUNED_LISTS = 4096


class Census(NamedTuple):
    """What a pass over all lists found.

    Args:
        dead: int64 `[num_lists]`, dead entries of each list.
        is_held: bool `[num_slots]`, slots that a list has an entry of.
        tuned: effort and pruning for the recall target; None if there is nothing to measure.
    """

    dead: NDArray[np.int64]
    is_held: NDArray[np.bool_]
    tuned: Tuned | None


def census(
    lists: ListMap,
    contents: Contents,
    died: NDArray[np.int64],
    recall_target: float,
    queries: NDArray[Any] | None,
    seed: int,
) -> Census:
    """Read all lists.

    Args:
        died: time of death of each slot.
        queries: the user's sample, `[m, d]`; None: vectors of the corpus.

    Raises:
        IndexFileError: a page is damaged or cannot be read.
    """
    own = None
    if queries is None:
        queries = _drawn(lists, contents, died, sample_size(recall_target), seed)
        own = row_hashes(queries, lists.metric) if len(queries) else None
    compared = prepared(queries, lists.metric, lists.centre)
    dead, is_held = np.zeros(lists.num_lists, np.int64), np.zeros(lists.num_slots, np.bool_)
    best = np.full((len(queries), MEASURED_AT * _HELD), -np.inf, np.float32)
    slots, holders = np.full(best.shape, NO_ID, np.int64), np.full(best.shape, NO_ID, np.int64)
    for entries in contents.scan():
        is_live = died[entries.positions] == ALIVE
        is_held[entries.positions] = True
        owners = np.repeat(lists.owners[entries.lists], entries.counts)
        dead += np.bincount(owners, ~is_live, lists.num_lists).astype(np.int64)
        if not len(queries):
            continue
        scores = _scores(compared, prepared(entries.vectors, lists.metric, lists.centre), lists)
        scores[:, ~is_live] = -np.inf
        if own is not None:
            scores[own[:, None] == row_hashes(entries.vectors, lists.metric)[None]] = -np.inf
        num = min(best.shape[1], scores.shape[1])
        few = np.argpartition(-scores, num - 1, axis=1)[:, :num]
        every = np.concatenate([best, np.take_along_axis(scores, few, axis=1)], axis=1)
        kept = np.argpartition(-every, best.shape[1] - 1, axis=1)[:, : best.shape[1]]
        best = np.take_along_axis(every, kept, axis=1)
        found = entries.positions.astype(np.int64)[few]
        slots = np.take_along_axis(np.concatenate([slots, found], axis=1), kept, axis=1)
        holders = np.take_along_axis(np.concatenate([holders, owners.astype(np.int64)[few]], axis=1), kept, axis=1)
    return Census(dead, is_held, _tuned(lists, compared, best, slots, holders, recall_target))


def _scores(queries: NDArray[np.float32], vectors: NDArray[np.float32], lists: ListMap) -> NDArray[np.float32]:
    found = queries @ vectors.T
    return 2 * found - (vectors**2).sum(axis=1)[None] if lists.metric == "l2" else found


def _drawn(lists: ListMap, contents: Contents, died: NDArray[np.int64], most: int, seed: int) -> NDArray[Any]:
    """Vectors of the corpus that live, distinct, `[m, d]`, at most `most`."""
    draw = np.random.default_rng(seed)
    total = int(lists.counts.sum())
    if not total:
        return np.zeros((0, lists.centroids.shape[1]), lists.dtype)
    share = lists.counts / total
    drawn = draw.choice(len(share), 2 * most, p=share)
    wanted = np.bincount(drawn, minlength=len(share))
    found = []
    for entries in contents.scan(np.flatnonzero(wanted)):
        ends = np.cumsum(entries.counts)
        for extent, begin, end in zip(
            entries.lists.tolist(), (ends - entries.counts).tolist(), ends.tolist(), strict=True
        ):
            rows = begin + draw.permutation(end - begin)[: wanted[extent]]
            found.append(entries.vectors[rows[died[entries.positions[rows]] == ALIVE]])
    queries = np.concatenate(found)
    first = np.unique(row_hashes(queries, lists.metric), return_index=True)[1]
    return queries[draw.permutation(first)[:most]]


def _tuned(
    lists: ListMap,
    compared: NDArray[np.float32],
    best: NDArray[np.float32],
    slots: NDArray[np.int64],
    holders: NDArray[np.int64],
    recall_target: float,
) -> Tuned | None:
    """The effort that reaches the target, from the lists that hold the true neighbours."""
    width = max(1, int(max((np.bincount(row[row >= 0]).max(initial=0) for row in slots), default=1)))
    held = np.full((len(slots), MEASURED_AT, width), NO_ID, np.int32)
    for row in range(len(slots)):
        order = np.argsort(-best[row], kind="stable")
        order = order[np.isfinite(best[row][order])]
        known: dict[int, int] = {}
        filled = np.zeros(MEASURED_AT, np.int64)
        for at in order.tolist():
            rank = known.setdefault(int(slots[row, at]), len(known))
            if rank < MEASURED_AT:
                held[row, rank, filled[rank]] = holders[row, at]
                filled[rank] += 1
    if not (held != NO_ID).any():
        return None
    near = nearest_lists(lists, compared, min(_TUNED_LISTS, lists.num_lists))
    pages = np.bincount(lists.owners, lists.extents.last_pages + 1 - lists.extents.first_pages, lists.num_lists).astype(
        np.int64
    )
    found = tuned(near, held, pages, lists.num_lists, recall_target)
    return found if lists.metric != "inner_product" else found._replace(pruning=None)


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
