"""Provide the index kind `ivfdisk`, and its builder for a corpus that is larger than memory.

In: a build request, or a function that returns chunks of a corpus; a page file. Out: a `DiskIndex`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.build_request import BuildRequest
from autopar.vector_search.data.index_file import Saved
from autopar.vector_search.data.placement import Place
from autopar.vector_search.data.progress import progress_bar
from autopar.vector_search.on_disk.build import DiskOptions, build_file
from autopar.vector_search.on_disk.chunks import Source
from autopar.vector_search.on_disk.index import KIND, DiskIndex
from autopar.vector_search.on_disk.page_file import open_page_file
from autopar.vector_search.on_disk.reader_table import AUTO, checked_reader


def build_on_disk(
    vectors: Source,
    path: str | os.PathLike[str],
    *,
    metric: str = "l2",
    recall_target: float = 0.95,
    memory_budget_bytes: float = 2**30,
    ids: ArrayLike | None = None,
    queries: ArrayLike | None = None,
    num_lists: int | None = None,
    copies: int = 8,
    space: float = 2.2,
    reader: str = AUTO,
    progress: bool | None = None,
) -> DiskIndex:
    """Build an index of inverted lists in a file, from a corpus that may be larger than memory, and open it.

    Args:
        vectors: `[n, d]`, as in `build`; an `np.memmap` is read in parts. Or a function without arguments that returns
            an iterator over such arrays, the same ones in each call; it is called three times, or six.
        path: the file to write. It appears when it is complete, and replaces an older one.
        metric, recall_target, ids: as in `build`.
        memory_budget_bytes: host memory that the build may use in addition to what the process uses, ids and compiled
            programs excepted.
        queries: as in `build`.
        num_lists: by default as many as give lists of a few pages.
        copies: maximum number of lists per vector.
        space: maximum mean number of lists per vector, at least 1.
        reader: engine that reads the file: `"uring"`, `"direct"` (O_DIRECT), `"mmap"`, or `"auto"`, the first of these
            that works.
        progress: as in `build`.

    Raises:
        SearchError: an invalid argument, or a memory budget that is too small.
        IndexFileError: the file cannot be written.
    """
    if not 0 < recall_target <= 1:
        raise SearchError(f"`recall_target` is {recall_target!r}: give a recall above 0 and at most 1")
    lists = None if num_lists is None else inputs.checked_count("num_lists", num_lists)
    options = DiskOptions(
        num_lists=lists,
        copies=inputs.checked_count("copies", copies),
        space=checked_space(space),
        budget_bytes=_checked_budget(memory_budget_bytes),
        recall_target=recall_target,
        queries=queries,
    )
    checked_reader(reader)
    with progress_bar(progress) as report:
        build_file(vectors, Path(path), inputs.checked_metric(metric), ids, options, report)
        report("done", 1.0)
    return DiskIndex(open_page_file(path), reader)


def build(request: BuildRequest) -> DiskIndex:
    """Build an index of this kind. Its setting `path` is the file.

    Raises:
        SearchError: an unknown or invalid setting, or no `path`.
    """
    settings = dict(request.settings)
    path, reader, space = (settings.pop(name, None) for name in ("path", "reader", "space"))
    if not isinstance(path, str | os.PathLike):
        raise SearchError(f"an index of kind {KIND!r} is a file, and `path` is {path!r}: give its path as `path=`")
    known = DiskOptions()
    whole = replace(request, settings=settings).whole_numbers(KIND, {"num_lists": 0, "copies": known.copies})
    options = DiskOptions(
        num_lists=whole["num_lists"] or None,
        copies=whole["copies"],
        space=known.space if space is None else checked_space(space),
        recall_target=request.recall_target,
        queries=request.queries,
        why=request.why,
    )
    engine = checked_reader(AUTO if reader is None else reader)
    ids = None if (request.ids == np.arange(len(request.ids))).all() else request.ids
    build_file(request.vectors, Path(path), request.metric, ids, options, request.report)
    return DiskIndex(open_page_file(path), engine)


def load(saved: Saved, place: Place) -> DiskIndex:
    """Open a page file of this kind."""
    assert saved.path is not None
    pages = open_page_file(saved.path)
    if "part" in pages.settings:
        raise IndexFileError(
            f"{saved.path} is part {pages.settings['part']} of an index that was divided: serve it by `autopar serve --index`,"
            " and search with `ServedIndex`"
        )
    return DiskIndex(pages, saved.reader or AUTO, place.options.get("memory_budget_bytes"), place.batch)


def checked_space(space: Any) -> float:
    """Check the maximum mean number of lists per vector.

    Raises:
        SearchError: not a number of at least 1.
    """
    if isinstance(space, bool) or not isinstance(space, int | float | np.number) or not 1 <= space < np.inf:
        raise SearchError(f"`space` is {space!r}: give the maximum mean number of lists per vector, at least 1")
    return float(space)


def _checked_budget(budget_bytes: Any) -> float:
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int | float | np.number) or not budget_bytes > 0:
        raise SearchError(f"`memory_budget_bytes` is {budget_bytes!r}: give a number of bytes")
    return float(budget_bytes)
