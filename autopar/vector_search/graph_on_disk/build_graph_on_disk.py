"""Provide the index kind `graphdisk`, and its builder for a corpus that is larger than memory.

In: a build request, or a function that returns chunks of a corpus; a page file. Out: a `GraphDiskIndex`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from autopar.errors import SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.build_request import BuildRequest
from autopar.vector_search.data.index_file import Saved
from autopar.vector_search.data.placement import Place
from autopar.vector_search.data.progress import progress_bar
from autopar.vector_search.graph_on_disk.build import GraphOptions, build_file
from autopar.vector_search.graph_on_disk.index import KIND, GraphDiskIndex
from autopar.vector_search.on_disk.chunks import Source
from autopar.vector_search.on_disk.page_file import open_page_file
from autopar.vector_search.on_disk.reader_table import AUTO, checked_reader


def build_graph_on_disk(
    vectors: Source,
    path: str | os.PathLike[str],
    *,
    metric: str = "l2",
    recall_target: float = 0.95,
    memory_budget_bytes: float = 2**30,
    ids: ArrayLike | None = None,
    queries: ArrayLike | None = None,
    degree: int = 64,
    code_bytes: int | None = None,
    width: int = 4,
    reader: str = AUTO,
    progress: bool | None = None,
) -> GraphDiskIndex:
    """Build a neighbour graph in a file, from a corpus that may be larger than memory, and open it.

    Args:
        vectors: as in `build_on_disk`; a function is called twice.
        path: the file to write. It appears when it is complete, and replaces an older one.
        metric, recall_target, ids: as in `build`.
        memory_budget_bytes: host memory that the build may use in addition to what the process uses, ids and compiled
            programs excepted.
        queries: as in `build`.
        degree: maximum edges per node.
        code_bytes: bytes of the code of each vector that stays in memory, a divisor of d; by default the largest up to
            32.
        width: maximum blocks of nodes that a query reads at a time; more need fewer rounds of reads, and more reads.
        reader: as in `build_on_disk`.
        progress: as in `build`.

    Raises:
        SearchError: an invalid argument, or a memory budget that is too small.
        IndexFileError: the file cannot be written.
    """
    if not 0 < recall_target <= 1:
        raise SearchError(f"`recall_target` is {recall_target!r}: give a recall above 0 and at most 1")
    budget = memory_budget_bytes
    if isinstance(budget, bool) or not isinstance(budget, int | float | np.number) or not budget > 0:
        raise SearchError(f"`memory_budget_bytes` is {budget!r}: give a number of bytes")
    options = GraphOptions(
        degree=inputs.checked_count("degree", degree),
        code_bytes=0 if code_bytes is None else inputs.checked_count("code_bytes", code_bytes),
        width=inputs.checked_count("width", width),
        budget_bytes=float(budget),
        recall_target=recall_target,
        queries=queries,
    )
    checked_reader(reader)
    with progress_bar(progress) as report:
        build_file(vectors, Path(path), inputs.checked_metric(metric), ids, options, report)
        report("done", 1.0)
    return GraphDiskIndex(open_page_file(path), reader)


def build(request: BuildRequest) -> GraphDiskIndex:
    """Build an index of this kind. Its setting `path` is the file.

    Raises:
        SearchError: an unknown or invalid setting, or no `path`.
    """
    settings = dict(request.settings)
    path, reader = (settings.pop(name, None) for name in ("path", "reader"))
    if not isinstance(path, str | os.PathLike):
        raise SearchError(f"an index of kind {KIND!r} is a file, and `path` is {path!r}: give its path as `path=`")
    known = GraphOptions()
    whole = replace(request, settings=settings).whole_numbers(
        KIND, {"degree": known.degree, "code_bytes": 0, "width": known.width}
    )
    options = GraphOptions(**whole, recall_target=request.recall_target, queries=request.queries, why=request.why)
    engine = checked_reader(AUTO if reader is None else reader)
    ids = None if (request.ids == np.arange(len(request.ids))).all() else request.ids
    build_file(request.vectors, Path(path), request.metric, ids, options, request.report)
    return GraphDiskIndex(open_page_file(path), engine)


def load(saved: Saved, place: Place) -> GraphDiskIndex:
    """Open a page file of this kind."""
    assert saved.path is not None
    return GraphDiskIndex(open_page_file(saved.path), saved.reader or AUTO)
