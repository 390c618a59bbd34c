"""Build lists on disk within a memory budget, from a corpus that may be larger than memory.

In: an array, or a function that returns chunks. Out: a page file. The corpus is read three times: for a sample; to
assign vectors to lists, and to find the true neighbours of the recall sample; and to write the lists. It is read three
times more to train the centroids if the sample has few vectors per list.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data.metrics import NO_ID, Metric
from autopar.vector_search.data.progress import Report
from autopar.vector_search.frame.recall_tuning import Measured, sample_size
from autopar.vector_search.graph.nearest_points import point_graph
from autopar.vector_search.on_disk.assignment import ENOUGH, REACH, Assignment, trained
from autopar.vector_search.on_disk.choice_tuning import RULE_LISTS, Choice, tuned_choice
from autopar.vector_search.on_disk.chunks import Chunks, Source
from autopar.vector_search.on_disk.corpus_sample import RecallSample, Truth, checked_corpus
from autopar.vector_search.on_disk.hit_model import Lists
from autopar.vector_search.on_disk.index import KIND
from autopar.vector_search.on_disk.layout import order_of, packed
from autopar.vector_search.on_disk.long_lists import cut_long_lists
from autopar.vector_search.on_disk.page_file import PageFileWriter
from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES
from autopar.vector_search.on_disk.probe_tuning import Tuned
from autopar.vector_search.on_disk.probing import Nearest, nearest_lists, prepared, without_own
from autopar.vector_search.on_disk.spill import AssignedLists, Spill
from autopar.vector_search.on_disk.stored_lists import StoredLists, entry_bytes, mean_entries
from autopar.vector_search.on_disk.whole_pages import LEVELS, filled, levels_of, sizes_of

#: Maximum default lists, whose centroids a search compares one by one.
_MAX_LISTS = 65_536
#: Queries that the rule by expected neighbours is learned from. Comparing all vectors with them costs at most so many
#: scores.
_RULE_QUERIES, _RULE_SCORES = 4096, 2**32
#: Queries of the sample whose nearest lists are found at a time.
_QUERIES_AT_ONCE = 256
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
    """The lists of all vectors.

    Args:
        counts: vectors of each list.
        of: int64 `[num_lists]`, the centroid of each list.
    """

    lists: AssignedLists
    counts: NDArray[np.int64]
    of: NDArray[np.int64]


def build_file(
    source: Source, path: Path, metric: Metric, ids: ArrayLike | None, options: DiskOptions, report: Report
) -> None:
    """Write the page file of an index.

    Raises:
        SearchError: invalid vectors, ids or options, or a memory budget that is too small.
        IndexFileError: the file cannot be written.
    """
    chunks = Chunks(source, _MAX_ROWS)
    sampled, queries, own_ids = checked_corpus(chunks, path, ids, options.queries, options.budget_bytes / 8, report)
    num = chunks.num_vectors
    num_lists = _num_lists(chunks, options, len(sampled))
    num_queries = _num_queries(num, options)
    rows = chunks.max_rows = _rows(chunks.dim, num_lists, num_queries, options)
    report(f"train {num_lists:,} centroids", 0.1)
    sample = sampled[: max(num_lists, min(len(sampled), ENOUGH * num_lists))]
    assignment = trained(sample, chunks, metric, num_lists, options.copies, rows)
    one = entry_bytes(chunks.dim, chunks.dtype)
    with ExitStack() as files:
        report(f"assign {num:,} vectors to {num_lists:,} lists", 0.3)
        recall_sample = RecallSample(sampled, queries, metric, assignment.centre, num_queries, num)
        assigned = _assigned(chunks, recall_sample, assignment, PAYLOAD_BYTES / one, options.space * num, path.parent)
        file = files.enter_context(closing(assigned.lists))
        centroids, radii = assignment.centroids[assigned.of], assignment.radii[assigned.of]
        graph = assignment.graph if len(centroids) == num_lists else point_graph(centroids, "l2")
        starts, end = packed(assigned.counts * one, order_of(centroids))
        lists = StoredLists(
            centroids,
            starts,
            assigned.counts,
            assignment.centre,
            own_ids,
            chunks.dtype,
            metric,
            num,
            assignment.copies,
            graph=graph,
        )
        trained_with = assignment.num_trained[assigned.of] if recall_sample.is_of_corpus else None
        tuning = _tuned(lists, radii, assigned, recall_sample.truth(), trained_with, options)
        found, lists = tuning.found, replace(lists, rule=tuning.rule)
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
    mean = mean_entries(chunks.dim, chunks.dtype)
    return max(1, min(most, _MAX_LISTS, math.ceil(num * options.space / mean)))


def _num_queries(num: int, options: DiskOptions) -> int:
    """Queries of the sample: more for a small corpus, as far as the budget allows."""
    row_bytes = 16 * 2 * RULE_LISTS  # lists, ratios and distances of each
    most = min(_RULE_QUERIES, _RULE_SCORES // num, int(options.budget_bytes / 8 / row_bytes))
    return max(sample_size(options.recall_target), most)


def _rows(dim: int, num_lists: int, num_queries: int, options: DiskOptions) -> int:
    """Vectors that are assigned at a time."""
    candidates = 1 + min(4 * options.copies, num_lists)
    compared = 3 * (num_lists + num_queries)
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
    chunks: Chunks, sample: RecallSample, assignment: Assignment, per_page: float, most: float, folder: Path
) -> _Assigned:
    """Assign all vectors, and find the true neighbours of the sample on the way.

    Args:
        per_page: vectors of a page.
        most: maximum vectors of all lists.
    """
    num_lists, copies = len(assignment.centroids), assignment.copies
    counts = np.zeros(num_lists * (1 + LEVELS), np.int32)
    with ExitStack() as files:
        near_lists, levels = (AssignedLists(copies, folder) for _ in range(2))
        for file in (near_lists, levels):
            files.enter_context(closing(file))
        for start, chunk in chunks:
            near = assignment.near(chunk)
            level = levels_of(near.ratios, REACH)
            is_given = near.lists != NO_ID
            np.add.at(counts, (near.lists * (1 + LEVELS) + level)[is_given], 1)
            near_lists.append(near.lists)
            levels.append(level)
            sample.add(chunk, start)
        by_level = counts.reshape(num_lists, 1 + LEVELS)
        sizes = sizes_of(by_level, per_page, most)
        lists = filled(near_lists, levels, by_level, sizes, folder)
    cut = cut_long_lists(lists, sizes, chunks.num_vectors, copies, folder)
    return _Assigned(cut.lists, cut.counts, cut.of)


def _tuned(
    lists: StoredLists,
    radii: NDArray[np.float32],
    assigned: _Assigned,
    sample: Truth,
    num_trained: NDArray[np.int64] | None,
    options: DiskOptions,
) -> Choice:
    """The effort and the pruning, and the rule by expected neighbours if it reads fewer pages.

    Args:
        num_trained: vectors that each centroid is the mean of, the queries among them; None if they are not.
    """
    truth = sample.positions
    if not (truth != NO_ID).any():
        return Choice(Tuned(Measured(lists.num_lists, None, {}), None), None)
    held = np.full((*truth.shape, lists.copies), NO_ID, np.int32)
    for place in zip(*np.nonzero(truth != NO_ID), strict=True):
        held[place] = assigned.lists.read(int(truth[place]), 1)[0]
    return tuned_choice(
        lambda some, width: _nearest(lists, sample.queries[some], width, num_trained),
        held,
        Lists(lists.centroids, lists.counts, radii),
        lists.num_pages,
        lists.entry_bytes,
        lists.metric,
        options.recall_target,
        slice(0, sample_size(options.recall_target)),
    )


def _nearest(lists: StoredLists, queries: NDArray[Any], width: int, num_trained: NDArray[np.int64] | None) -> Nearest:
    """The nearest lists of the sample's queries, some queries at a time."""
    compared = prepared(queries, lists.metric, lists.centre)
    parts = [
        nearest_lists(compared[at : at + _QUERIES_AT_ONCE], lists.centroids, lists.metric, width, lists.points)
        for at in range(0, len(compared), _QUERIES_AT_ONCE)
    ]
    lists_of, ratios, distances = (np.concatenate(each) for each in zip(*parts, strict=True))
    found = Nearest(lists_of, ratios, distances)
    return found if num_trained is None or lists.metric == "inner_product" else without_own(found, num_trained)
