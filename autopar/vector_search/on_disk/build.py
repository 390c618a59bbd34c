"""Build lists on disk within a memory budget, from a corpus that may be larger than memory.

In: an array, or a function that returns chunks. Out: a page file. The corpus is read three times: for a sample; to
assign vectors to lists, and to find the true neighbours of the recall sample; and to write the lists.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.duplicates import row_hashes
from autopar.vector_search.data.metrics import NO_ID, Metric
from autopar.vector_search.data.progress import Report
from autopar.vector_search.frame.recall_tuning import MEASURED_AT, Measured, sample_size
from autopar.vector_search.on_disk.assignment import Assignment, trained
from autopar.vector_search.on_disk.chunks import Chunks, Source
from autopar.vector_search.on_disk.index import KIND
from autopar.vector_search.on_disk.layout import order_of, packed
from autopar.vector_search.on_disk.list_scores import ListScores
from autopar.vector_search.on_disk.page_file import PageFileWriter
from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES
from autopar.vector_search.on_disk.probe_tuning import Tuned, tuned
from autopar.vector_search.on_disk.probing import nearest_lists, prepared
from autopar.vector_search.on_disk.spill import AssignedLists, Spill
from autopar.vector_search.on_disk.stored_lists import StoredLists, entry_bytes

#: Mean pages of a list, and minimum mean vectors. Longer lists waste less of their last page, and are less precise.
_LIST_PAGES, _LIST_VECTORS = 2.7, 40
#: Maximum default lists, whose centroids a search compares one by one; sampled vectors per list.
_MAX_LISTS, _SAMPLED = 65_536, 256
#: Lists near each query of the sample that the tuning considers, before it takes all.
_TUNED_LISTS = 4096
#: Minimum and maximum vectors of a chunk.
_MIN_ROWS, _MAX_ROWS = 64, 8192


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How to build.

    Args:
        num_lists: number of lists; None: lists of a few pages.
        copies: maximum number of lists per vector.
        space: maximum mean number of lists per vector.
        budget_bytes: host memory of the build, in addition to that of the process before.
        recall_target, queries: as in `build`.
        why: reason for the choice of this kind.
    """

    num_lists: int | None = None
    copies: int = 8
    space: float = 2.2
    budget_bytes: float = 2**30
    recall_target: float = 0.95
    queries: ArrayLike | None = None
    why: str = ""


class _Assigned(NamedTuple):
    """The lists of all vectors; vectors of each list; true neighbours of the sample; the sample's queries."""

    lists: AssignedLists
    counts: NDArray[np.int64]
    truth: NDArray[np.int32]
    queries: NDArray[Any]


def build_file(
    source: Source, path: Path, metric: Metric, ids: ArrayLike | None, options: DiskOptions, report: Report
) -> None:
    """Write the page file of an index.

    Raises:
        SearchError: invalid vectors, ids or options, or a memory budget that is too small.
        IndexFileError: the file cannot be written.
    """
    if not path.parent.is_dir():
        raise SearchError(f"`path` is {str(path)!r}, and its folder does not exist: create it")
    chunks = Chunks(source, _MAX_ROWS)
    report("sample the corpus", 0.0)
    sampled = _surveyed(chunks, options.budget_bytes / 8)
    num = chunks.num_vectors
    if num == 0:
        raise SearchError("`vectors` is empty: an index on disk needs at least one vector")
    if num > inputs.MAX_VECTORS:
        raise SearchError(f"`vectors` has {num:,} rows: one index holds at most {inputs.MAX_VECTORS:,}")
    queries = None
    if options.queries is not None:
        queries = inputs.checked_queries(options.queries, chunks.dim, chunks.dtype)
    own_ids = None if ids is None else inputs.checked_ids(ids, num)
    num_lists = _num_lists(chunks, options, len(sampled))
    rows = chunks.max_rows = _rows(chunks.dim, num_lists, options)
    report(f"train {num_lists:,} centroids", 0.1)
    sample = sampled[: max(num_lists, min(len(sampled), _SAMPLED * num_lists))]
    assignment = trained(sample, metric, num_lists, options.copies, options.space, rows)
    with closing(AssignedLists(assignment.copies, path.parent)) as file:
        report(f"assign {num:,} vectors to {num_lists:,} lists", 0.3)
        assigned = _assigned(chunks, sampled, assignment, sample_size(options.recall_target), queries, file)
        one = entry_bytes(chunks.dim, chunks.dtype)
        starts, end = packed(assigned.counts * one, order_of(assignment.centroids))
        lists = StoredLists(
            assignment.centroids,
            starts,
            assigned.counts,
            assignment.centre,
            own_ids,
            chunks.dtype,
            metric,
            num,
            assignment.copies,
        )
        found = _tuned(lists, assigned, options)
        report("write the lists", 0.6)
        max_bytes = int(options.budget_bytes / 8)
        with closing(Spill(starts, assigned.counts, one, end, max_bytes, path.parent)) as spill:
            for start, chunk in chunks:
                spill.add(chunk, start, file.read(start, len(chunk)))
            with PageFileWriter(path) as writer:
                for stream in spill.streams():
                    writer.append(stream)
                settings, arrays = lists.saved()
                settings |= {"measured": found.measured.saved(), "pruning": found.pruning, "why": options.why}
                writer.finish(KIND, settings, arrays)


def _surveyed(chunks: Chunks, max_bytes: float) -> NDArray[Any]:
    """Read the corpus once. A uniform sample of it, `[m, d]`, in random order: the vectors with the smallest keys."""
    draw = np.random.default_rng(0)
    keys, kept, most = np.zeros(0), [], 0
    for _, chunk in chunks:
        most = most or max(1024, int(max_bytes / (4 * chunk.shape[1])))
        keys = np.concatenate([keys, draw.random(len(chunk))])
        kept.append(chunk.copy())
        if len(keys) > 2 * most:
            few = np.argpartition(keys, most)[:most]
            keys, kept = keys[few], [np.concatenate(kept)[few]]
    if not kept:
        return np.zeros((0, 1), np.float32)
    return np.concatenate(kept)[np.argsort(keys, kind="stable")[:most]]


def _num_lists(chunks: Chunks, options: DiskOptions, num_sampled: int) -> int:
    num = chunks.num_vectors
    centroid_bytes = 4 * chunks.dim
    most = min(num_sampled, max(1, int(options.budget_bytes / 8 / centroid_bytes)))
    if options.num_lists is not None:
        if options.num_lists > num:
            raise SearchError(f"`num_lists` is {options.num_lists:,}: give at most the number of vectors, {num:,}")
        if options.num_lists > most:
            raise SearchError(
                f"`memory_budget_bytes` is {options.budget_bytes:,.0f}, of which an eighth holds {most:,} centroids of"
                f" {centroid_bytes} bytes, and `num_lists` is {options.num_lists:,}: give a larger budget, or fewer lists"
            )
        return options.num_lists
    mean = max(_LIST_VECTORS, _LIST_PAGES * PAYLOAD_BYTES / entry_bytes(chunks.dim, chunks.dtype))
    return max(1, min(most, _MAX_LISTS, math.ceil(num * options.space / mean)))


def _rows(dim: int, num_lists: int, options: DiskOptions) -> int:
    """Vectors that are assigned at a time."""
    candidates = 1 + min(4 * options.copies, num_lists)
    compared = 3 * (num_lists + sample_size(options.recall_target))
    row_bytes = 4 * (compared + 4 * dim + candidates * (2 * dim + 2 * candidates))
    rows = int(options.budget_bytes / 8 / row_bytes)
    if rows < _MIN_ROWS:
        needed = 8 * row_bytes * _MIN_ROWS
        raise SearchError(
            f"`memory_budget_bytes` is {options.budget_bytes:,.0f}: {num_lists:,} lists of vectors of {dim} elements need"
            f" {needed:,}. Give that much, or fewer lists (`num_lists`)"
        )
    return min(rows, _MAX_ROWS)


def _assigned(
    chunks: Chunks,
    sampled: NDArray[Any],
    assignment: Assignment,
    most: int,
    queries: NDArray[Any] | None,
    file: AssignedLists,
) -> _Assigned:
    """Assign all vectors, and find the true neighbours of the sample on the way: `most` queries, or vectors."""
    own = None
    if queries is None:
        queries = sampled[: 4 * most]
        own, first = np.unique(row_hashes(queries, assignment.metric), return_index=True)
        order = np.argsort(first, kind="stable")[:most]  # distinct vectors
        queries, own = queries[first[order]], own[order]
    queries = queries[:most]
    k = min(MEASURED_AT, chunks.num_vectors)
    nearest = ListScores(queries, k, assignment.metric, assignment.centre, 1)
    counts = np.zeros(len(assignment.centroids), np.int64)
    for start, chunk in chunks:
        lists = assignment.lists_of(chunk)
        counts += np.bincount(lists[lists != NO_ID], minlength=len(counts))
        file.append(lists)
        is_other = np.ones((len(queries), len(chunk)), bool)
        if own is not None:  # a query of the corpus does not count itself and its duplicates
            is_other = own[:, None] != row_hashes(chunk, assignment.metric)[None]
        nearest.add(chunk, np.arange(start, start + len(chunk), dtype=np.int32), is_other)
    return _Assigned(file, counts, nearest.best()[1], queries)


def _tuned(lists: StoredLists, assigned: _Assigned, options: DiskOptions) -> Tuned:
    truth = assigned.truth
    if not (truth != NO_ID).any():
        return Tuned(Measured(lists.num_lists, None, {}), None)
    held = np.full((*truth.shape, lists.copies), NO_ID, np.int32)
    for place in zip(*np.nonzero(truth != NO_ID), strict=True):
        held[place] = assigned.lists.read(int(truth[place]), 1)[0]
    compared = prepared(assigned.queries, lists.metric, lists.centre)
    near = nearest_lists(compared, lists.centroids, lists.metric, min(_TUNED_LISTS, lists.num_lists))
    pages = lists.last_pages + 1 - lists.first_pages
    found = tuned(near, held, pages, lists.num_lists, options.recall_target)
    return found if lists.metric != "inner_product" else found._replace(pruning=None)  # which has no distances
