"""Provide the index kind `updatable`: build lists on disk, and make them a folder that can be changed."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.data.build_request import BuildRequest
from autopar.vector_search.data.index_file import Saved
from autopar.vector_search.data.placement import Place
from autopar.vector_search.on_disk.build import DiskOptions, build_file
from autopar.vector_search.on_disk.build_on_disk import checked_space
from autopar.vector_search.on_disk.index import DiskIndex
from autopar.vector_search.on_disk.page_file import open_page_file
from autopar.vector_search.on_disk.reader_table import AUTO, checked_reader
from autopar.vector_search.updates.create import COPIES, SPACE, create_updatable, make_updatable
from autopar.vector_search.updates.index import KIND, UpdatableIndex


def build(request: BuildRequest) -> UpdatableIndex:
    """Build an index of this kind. Its setting `path` is the folder, which must not exist. There may be no vectors yet.

    Raises:
        SearchError: an unknown or invalid setting, or no `path`.
        IndexFileError: the folder exists, or cannot be written.
    """
    settings = dict(request.settings)
    path, reader = settings.pop("path", None), settings.pop("reader", None)
    space = checked_space(settings.pop("space", SPACE))
    if not isinstance(path, str | os.PathLike):
        raise SearchError(f"an index of kind {KIND!r} is a folder, and `path` is {path!r}: give its path as `path=`")
    copies = replace(request, settings=settings).whole_numbers(KIND, {"copies": COPIES})["copies"]
    more: dict[str, Any] = {"copies": copies, "space": space, "recall_target": request.recall_target}
    more |= {"queries": request.queries, "reader": checked_reader(AUTO if reader is None else reader)}
    if not len(request.vectors):
        dim, dtype = request.vectors.shape[1], request.vectors.dtype.name
        return create_updatable(path, dim, dtype=dtype, metric=request.metric, **more)
    if Path(path).exists():
        raise IndexFileError(f"{path} exists: give a path where nothing is, or load the index that is there")
    options = DiskOptions(
        copies=copies, space=space, recall_target=request.recall_target, queries=request.queries, why=request.why
    )
    ids = None if (request.ids == np.arange(len(request.ids))).all() else request.ids
    try:
        made = tempfile.TemporaryDirectory(prefix=f".{Path(path).name}.", dir=Path(path).parent)
    except OSError as error:
        raise IndexFileError(
            f"{path} cannot be created: {error.strerror or error}. Give a path in a writable folder"
        ) from None
    with made as folder:
        build_file(request.vectors, Path(folder) / "lists", request.metric, ids, options, request.report)
        with DiskIndex(open_page_file(Path(folder) / "lists"), "mmap") as lists:
            return make_updatable(lists, path, **more)


def load(saved: Saved, place: Place) -> UpdatableIndex:
    """Open a folder of this kind."""
    assert saved.path is not None
    budget = place.options.get("memory_budget_bytes")
    return UpdatableIndex(saved.path, saved.reader or AUTO, memory_budget_bytes=budget, batch=place.batch)
