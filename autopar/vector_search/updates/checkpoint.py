"""Move the delta into lists on disk, and make the result the state that is on the device.

In: a frozen state. Out: new lists, and a superblock that refers to them. Updates and searches go on meanwhile. After many
changes, a census measures the recall again, and finds slots that can be used again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, is_integer
from autopar.vector_search.frame.recall_tuning import Measured
from autopar.vector_search.on_disk.choice_tuning import Choice
from autopar.vector_search.on_disk.probe_tuning import Tuned
from autopar.vector_search.on_disk.probing import prepared
from autopar.vector_search.on_disk.stored_lists import mean_entries
from autopar.vector_search.updates.assign import closure
from autopar.vector_search.updates.census import Census, census
from autopar.vector_search.updates.contents import Contents, Members
from autopar.vector_search.updates.list_map import ListMap
from autopar.vector_search.updates.page_store import PageStore, State
from autopar.vector_search.updates.rebalance import Copies, Rebalance
from autopar.vector_search.updates.settings import Settings
from autopar.vector_search.updates.slots import ALIVE
from autopar.vector_search.updates.snapshot import Stored
from autopar.vector_search.updates.write_lists import ListWriter

#: Entries of a list that is never split.
_NEVER_SPLIT = 16
#: Tried distances of a further centroid relative to the nearest one, and the vectors they are tried on.
_REACHES, _REACH_SAMPLE = (1.3, 1.2, 1.14, 1.08, 1.05, 1.02), 1024
#: Share of the vectors whose change makes a census due.
CENSUS_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Frozen:
    """The state that a checkpoint writes.

    Args:
        sequence: its last operation.
        stored: the lists, or the graph.
        delta: vectors that are not in it.
        ids, metadata, died: copies, of each slot.
        num_changes: vectors changed since the census before.
        dead: int64 `[num_lists]`, entries that are known to be dead.
        tuned: the probing so far.
    """

    sequence: int
    stored: Stored
    delta: Members
    ids: NDArray[np.int64]
    metadata: NDArray[Any]
    died: NDArray[np.int64]
    num_changes: int
    dead: NDArray[np.int64]
    tuned: Tuned


class Written(NamedTuple):
    """The result of a checkpoint.

    Args:
        free: slots that nothing on disk has; None if that is unknown.
        is_measured: whether the recall was measured.
        dead: as in `Frozen`, of the new lists.
        counts: what was done, by name.
    """

    state: State
    stored: Stored
    tuned: Tuned
    free: NDArray[np.int64] | None
    dead: NDArray[np.int64]
    counts: dict[str, int]
    is_measured: bool


def checkpoint(store: PageStore, frozen: Frozen, settings: Settings, queries: NDArray[Any] | None) -> Written:
    """Write a state.

    Raises:
        OSError: it cannot be written; the state before is the state still.
        IndexFileError: a page is damaged or cannot be read.
    """
    lists, added = _centred(frozen), frozen.delta.some(frozen.died[frozen.delta.slots] == ALIVE)
    contents = Contents(store, lists, frozen.died, settings.memory_bytes)
    sample = prepared(added.vectors[-_REACH_SAMPLE:], lists.metric, lists.centre)
    work = Rebalance.of(lists, contents, copies_within(sample, lists.centroids, settings), frozen.dead)
    work.add(added)
    mean = mean_entries(settings.layout.dim, settings.layout.dtype)
    work.balance(mean, _NEVER_SPLIT)
    lists_of = ListWriter(work, frozen.dead)
    for which in lists_of.due():
        if which not in work.dropped:
            work.clean(which)
    work.balance(mean, _NEVER_SPLIT)
    writer = store.writer()
    new = lists_of.write(writer, len(frozen.ids), lists.centre)
    dead = np.array(
        [frozen.dead[which] if which < len(frozen.dead) and which not in work.whole else 0 for which in work.left()],
        np.int64,
    )
    num_live = int((frozen.died == ALIVE).sum())
    found: Census | None = None
    if frozen.num_changes >= CENSUS_SHARE * num_live:
        after = Contents(store, new, frozen.died, settings.memory_bytes)
        found = census(new, after, frozen.died, settings.recall_target, queries, added.vectors, frozen.sequence)
        dead = found.dead
        if found.choice is not None:
            new = replace(new, rule=found.choice.rule)
    tuned = frozen.tuned if found is None or found.choice is None else found.choice.found
    tuned = _scaled(tuned, lists.num_lists, new.num_lists) if found is None else tuned
    changes = 0 if found is not None else frozen.num_changes
    arrays: dict[str, NDArray[Any]] = new.saved() | {
        "ids": frozen.ids,
        "is_live": np.packbits(frozen.died == ALIVE),
        "dead": dead,
    }
    if settings.layout.metadata.itemsize:
        arrays["metadata"] = frozen.metadata
    if queries is not None:
        arrays["queries"] = queries.view(np.uint8) if queries.dtype.name == "bfloat16" else queries
    state = writer.commit(frozen.sequence, settings.saved() | saved_tuning(Choice(tuned, new.rule), changes), arrays)
    free = None
    if found is not None:
        free = np.flatnonzero((frozen.died != ALIVE) & ~found.is_held)
    counts = {"splits": work.num_splits, "merges": work.num_merges, "moved": work.num_moved}
    return Written(state, new, tuned, free, dead, counts | {"censuses": int(found is not None)}, found is not None)


def copies_within(sample: NDArray[np.float32], centroids: NDArray[np.float32], settings: Settings) -> Copies:
    """The largest reach with which the mean number of lists of these vectors keeps to the limit.

    Args:
        sample: `[m, d]`, `prepared`.
    """
    most = min(settings.copies, max(1, len(centroids)))
    if most == 1 or settings.space <= 1 or not len(sample):
        return Copies(1, 1.0)
    for reach in _REACHES:
        if (closure(sample, centroids, most, reach) != NO_ID).sum() <= settings.space * len(sample):
            return Copies(settings.copies, reach)
    return Copies(1, 1.0)


def _centred(frozen: Frozen) -> ListMap:
    """The lists; the first ones of floats get the mean of the delta as their centre."""
    lists = frozen.stored
    assert isinstance(lists, ListMap)
    if lists.num_lists or lists.metric != "l2" or is_integer(lists.dtype) or not len(frozen.delta.slots):
        return lists
    centre = frozen.delta.vectors.astype(np.float32).mean(axis=0, dtype=np.float64).astype(np.float32)
    return ListMap(
        lists.centroids, centre, lists.owners, lists.starts, lists.counts, lists.dtype, lists.metric, lists.num_slots
    )


def _scaled(tuned: Tuned, before: int, after: int) -> Tuned:
    """The probing of more lists, until it is measured again: as large a share of them."""
    measured = tuned.measured
    effort = measured.effort * after / before if after > before > 0 else measured.effort
    return tuned._replace(
        measured=Measured(
            max(1, min(after, int(np.ceil(effort)))),
            measured.recall,
            measured.tried,
            measured.target,
            measured.at_least,
        )
    )


def saved_tuning(choice: Choice, num_changes: int) -> dict[str, Any]:
    """JSON types for the page store."""
    (measured, pruning), rule = choice
    saved = {"measured": measured.saved(), "pruning": pruning, "num_changes": num_changes}
    return saved | {"rule": None if rule is None else rule.saved()}
