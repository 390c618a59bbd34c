"""Create updatable indexes: empty ones, or from an index on disk, whose lists or graph are copied."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.inputs import DTYPES
from autopar.vector_search.frame.recall_tuning import Measured
from autopar.vector_search.graph_on_disk.index import GraphDiskIndex
from autopar.vector_search.on_disk.choice_tuning import Choice
from autopar.vector_search.on_disk.index import DiskIndex
from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES
from autopar.vector_search.on_disk.probe_tuning import Tuned
from autopar.vector_search.on_disk.reader_table import AUTO, checked_reader
from autopar.vector_search.on_disk.readers import Run
from autopar.vector_search.on_disk.stored_lists import FIRST_PAGE
from autopar.vector_search.updates import folder as folders
from autopar.vector_search.updates import log as logs
from autopar.vector_search.updates.checked_updates import checked_metadata
from autopar.vector_search.updates.checkpoint import saved_tuning
from autopar.vector_search.updates.files import FILES, Files
from autopar.vector_search.updates.graph.copy import copied_graph
from autopar.vector_search.updates.index import UpdatableIndex
from autopar.vector_search.updates.list_map import ListMap
from autopar.vector_search.updates.page_store import (
    FIRST_DATA_PAGE,
    VERSION,
    VERSION_OF_OTHERS,
    PageWriter,
    created_store,
)
from autopar.vector_search.updates.records import Layout
from autopar.vector_search.updates.settings import Settings

#: Pages that are copied at a time; maximum bytes of metadata per vector.
_AT_ONCE, _MAX_ROW_BYTES = 256, 65_536

#: Maximum lists per vector, and maximum of the mean.
COPIES, SPACE = 4, 1.5


def create_updatable(
    path: str | os.PathLike[str],
    dim: int,
    *,
    dtype: str = "float32",
    metric: str = "l2",
    metadata: DTypeLike | None = None,
    recall_target: float = 0.95,
    queries: ArrayLike | None = None,
    copies: int = COPIES,
    space: float = SPACE,
    delta_share: float = 0.05,
    memory_budget_bytes: float = 2**26,
    reader: str = AUTO,
    background: bool = True,
) -> UpdatableIndex:
    """Create an empty index in a folder, to which vectors are added.

    Args:
        path: the folder, which must not exist.
        dim: elements per vector.
        dtype: dtype of the vectors: float32, bfloat16, float16, int8 or uint8.
        metric: as in `build`.
        metadata: dtype of a row of metadata per vector, with named fields; None: no metadata. It is kept in memory.
        recall_target: as in `build`. It is measured again when a twentieth of the vectors has changed.
        queries: as in `build`.
        copies, space: maximum lists per vector, and of the mean; as in `build_on_disk`.
        delta_share: vectors are moved from memory to lists when so large a share of the vectors has changed.
        memory_budget_bytes: bytes of lists that are in memory while they are reorganized.
        reader: as in `build_on_disk`.
        background: whether a thread moves vectors to lists; else the call that makes it due does.

    Raises:
        SearchError: an invalid argument.
        IndexFileError: the folder exists, or cannot be written.
    """
    if dtype not in DTYPES:
        raise SearchError(f"`dtype` is {dtype!r}: expected one of {', '.join(DTYPES)}")
    layout = Layout(inputs.checked_count("dim", dim), DTYPES[dtype], _checked_metadata_dtype(metadata))
    settings = _settings(layout, metric, recall_target, copies, space, delta_share, memory_budget_bytes)
    arrays = {} if queries is None else {"queries": _sample(queries, layout)}
    checked_reader(reader)

    def fill(folder: Path) -> None:
        none = Choice(Tuned(Measured(1, None, {}), None), None)
        _created(folder, FILES, settings, saved_tuning(none, 0), arrays, lambda _: ({}, {}), VERSION)

    folders.complete(Path(path), fill, FILES)
    return UpdatableIndex(path, reader, background=background)


def make_updatable(
    index: DiskIndex | GraphDiskIndex,
    path: str | os.PathLike[str],
    *,
    metadata: NDArray[Any] | None = None,
    recall_target: float = 0.95,
    queries: ArrayLike | None = None,
    copies: int = COPIES,
    space: float = SPACE,
    delta_share: float = 0.05,
    memory_budget_bytes: float = 2**26,
    reader: str = AUTO,
    background: bool = True,
) -> UpdatableIndex:
    """Copy an index on disk into a folder that can be changed.

    Args:
        index: lists, or a graph.
        metadata: `[n]`, a row for each vector in the order in which the index was built, with named fields; None: none.
        copies, space, memory_budget_bytes: of lists.
        path, recall_target, queries, delta_share, reader, background: as in `create_updatable`, as are these.

    Raises:
        SearchError: an invalid argument.
        IndexFileError: the folder exists or cannot be written, or the index is damaged.
    """
    about = index.stats()
    num, version = about.num_vectors, VERSION if isinstance(index, DiskIndex) else VERSION_OF_OTHERS
    dtype = _checked_metadata_dtype(None if metadata is None else np.asarray(metadata).dtype)
    layout = Layout(about.dim, DTYPES[about.dtype], dtype)
    settings = _settings(layout, about.metric, recall_target, copies, space, delta_share, memory_budget_bytes)
    rows = checked_metadata(metadata, num, dtype)
    checked_reader(reader)
    ids = index.lists.ids_of(np.arange(num)) if isinstance(index, DiskIndex) else index.graph.ids_of(np.arange(num))
    arrays: dict[str, NDArray[Any]] = {"ids": ids, "is_live": np.packbits(np.ones(num, np.bool_))}
    if dtype.itemsize:
        arrays["metadata"] = rows
    if queries is not None:
        arrays["queries"] = _sample(queries, layout)
    if isinstance(index, DiskIndex):
        moved = _moved(index)
        tuning = saved_tuning(Choice(Tuned(index.measured, index.pruning), moved.rule), 0)
        arrays |= moved.saved() | {"dead": np.zeros(moved.num_lists, np.int64)}
        write = partial(_copied_lists, index)
    else:
        tuning = saved_tuning(Choice(Tuned(index.measured, None), None), 0)
        write = partial(copied_graph, index)

    def fill(folder: Path) -> None:
        _created(folder, FILES, settings, tuning, arrays, write, version)

    folders.complete(Path(path), fill, FILES)
    return UpdatableIndex(path, reader, background=background)


def _moved(index: DiskIndex) -> ListMap:
    """The lists of an index, as they lie in a folder."""
    lists = index.lists
    kept = np.flatnonzero(lists.counts)
    return ListMap(
        lists.centroids,
        lists.centre,
        kept.astype(np.int32),
        lists.starts[kept] + (FIRST_DATA_PAGE - FIRST_PAGE) * PAYLOAD_BYTES,
        lists.counts[kept],
        lists.dtype,
        lists.metric,
        lists.num_vectors,
        None if lists.metric == "inner_product" else lists.rule,
    )


def _copied_lists(index: DiskIndex, writer: PageWriter) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Copy the pages of an index; nothing more is to be saved."""
    for at in range(0, index.num_data_pages, _AT_ONCE):
        count = min(_AT_ONCE, index.num_data_pages - at)
        writer.write_groups(index.payloads_of(Run(FIRST_PAGE + at, count)), [count])
    return {}, {}


def _created(
    folder: Path,
    files: Files,
    settings: Settings,
    tuning: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    write: Callable[[PageWriter], tuple[Mapping[str, Any], Mapping[str, NDArray[Any]]]],
    version: int,
) -> None:
    """Create a file of pages with the first state, and its log.

    Args:
        write: writes what is on disk, and returns its settings and arrays.
    """
    store = created_store(folder / folders.PAGES, files, version)
    try:
        writer = store.writer()
        more, its_arrays = write(writer)
        state = writer.commit(0, {**settings.saved(), **tuning, **more}, {**its_arrays, **arrays})
        logs.created(folder, files, store.file_id, state.generation, 1).close()
    finally:
        store.close()


def _settings(
    layout: Layout, metric: str, recall_target: float, copies: int, space: float, delta_share: float, memory: float
) -> Settings:
    if not 0 < recall_target <= 1:
        raise SearchError(f"`recall_target` is {recall_target!r}: give a recall above 0 and at most 1")
    if not 1 <= space < np.inf:
        raise SearchError(f"`space` is {space!r}: give the maximum mean number of lists per vector, at least 1")
    if not 0 < delta_share <= 1:
        raise SearchError(f"`delta_share` is {delta_share!r}: give a share of the vectors, above 0 and at most 1")
    if not memory > 0:
        raise SearchError(f"`memory_budget_bytes` is {memory!r}: give a number of bytes")
    known = inputs.checked_metric(metric)
    most = inputs.checked_count("copies", copies)
    return Settings(layout, known, most, float(space), recall_target, float(delta_share), memory_bytes=float(memory))


def _checked_metadata_dtype(given: DTypeLike | None) -> np.dtype[Any]:
    if given is None:
        return np.dtype([])
    try:
        dtype = np.dtype(given)
    except TypeError as error:
        raise SearchError(f"`metadata` is {given!r}, which is no NumPy dtype: {error}") from None
    fields = [each[0] for each in (dtype.fields or {}).values()]
    if not fields or dtype.hasobject or any(each.subdtype or each.names for each in fields):
        raise SearchError(
            f"`metadata` has dtype {dtype}: give one with named fields of numbers or fixed-length text, as"
            " [('page', 'i4'), ('year', 'i2')]"
        )
    if dtype.itemsize > _MAX_ROW_BYTES:
        raise SearchError(
            f"`metadata` has {dtype.itemsize:,} bytes per vector, which are kept in memory: give at most {_MAX_ROW_BYTES:,}, and"
            " keep long texts elsewhere, by id"
        )
    return dtype


def _sample(queries: ArrayLike, layout: Layout) -> NDArray[Any]:
    checked = inputs.checked_queries(queries, layout.dim, layout.dtype)
    if not len(checked):
        raise SearchError("`queries` is empty: give a few hundred to measure recall, or omit it")
    return checked.view(np.uint8) if layout.dtype.name == "bfloat16" else checked
