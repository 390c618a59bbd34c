"""Divide an index on disk into a part per server: all centroids, and some of the lists."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.on_disk.index import AT_ONCE, DiskIndex
from autopar.vector_search.on_disk.layout import packed
from autopar.vector_search.on_disk.page_file import PageFileWriter
from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES
from autopar.vector_search.on_disk.readers import Run
from autopar.vector_search.servers.list_orders import smooth_order
from autopar.vector_search.servers.list_placement import num_requested, placed

#: The kind of a part in its file. A part alone is no index: it lacks lists.
PART = "ivfdisk part"
#: Pages that are written at a time; queries that the orders of lists are compared with.
_AT_ONCE, _COMPARED = 256, 512


def divide(
    index: DiskIndex,
    folder: str | os.PathLike[str],
    num_servers: int,
    *,
    replicas: int = 2,
    queries: ArrayLike | None = None,
) -> list[Path]:
    """Write a part of an index for each server, and return the files.

    Args:
        folder: where the files `part-0` and so on are written; it must exist.
        replicas: servers that have each list, at least.
        queries: `[num_queries, d]`, a sample of your queries, from which the load of each list follows; by default all
            lists have a load in proportion to their length.

    Raises:
        SearchError: an invalid argument.
        IndexFileError: the index is damaged, or a part cannot be written.
    """
    servers = inputs.checked_count("num_servers", num_servers)
    target, lists = Path(folder), index.lists
    if not target.is_dir():
        raise SearchError(f"`folder` is {str(target)!r}, which is no folder: create it")
    loads, few = lists.counts.astype(np.float64), np.zeros((0, lists.num_lists), np.bool_)
    if queries is not None:
        checked = inputs.checked_queries(queries, lists.dim, lists.dtype)
        loads = np.zeros(lists.num_lists)
        for at in range(0, len(checked), AT_ONCE):
            is_probed = index.searches.usually_probed(checked[at : at + AT_ONCE])
            loads += is_probed.sum(axis=0)
            few = np.concatenate([few, is_probed[: _COMPARED - len(few)]])
    order = np.argsort(lists.starts, kind="stable")
    sizes, copies = lists.counts * lists.entry_bytes, inputs.checked_count("replicas", replicas)
    orders = (order, smooth_order(lists.centroids)) if len(few) else (order,)
    has = min((placed(each, loads, sizes, servers, copies) for each in orders), key=lambda one: num_requested(few, one))
    paths = [target / f"part-{server}" for server in range(servers)]
    for server, path in enumerate(paths):
        _write(index, path, has, server, order[has[order, server]])
    return paths


def _write(index: DiskIndex, path: Path, has: NDArray[np.bool_], server: int, order: NDArray[np.int64]) -> None:
    lists, is_here = index.lists, has[:, server]
    counts = np.where(is_here, lists.counts, 0)
    starts, end = packed(counts * lists.entry_bytes, order)
    with PageFileWriter(path) as writer:
        for stream in _streams(index, starts, order, end):
            writer.append(stream)
        settings, arrays = lists.saved()
        arrays |= {"starts": np.where(is_here, starts, 0), "counts": counts, "whole_counts": lists.counts}
        arrays |= {"servers": has.astype(np.uint8)}
        settings |= {"measured": index.measured.saved(), "pruning": index.pruning, "why": "", "part": server}
        writer.finish(PART, settings, arrays)


def _streams(
    index: DiskIndex, starts: NDArray[np.int64], order: NDArray[np.int64], end: int
) -> Iterator[NDArray[np.uint8]]:
    """The bytes of some lists at their places, in whole pages."""
    content = bytearray()
    base = 0
    for (
        which
    ) in order.tolist():  # lists that follow each other in the file share pages: the cache of the system has them
        content += bytes(int(starts[which]) - base - len(content)) + _bytes_of(index, which)
        whole = len(content) // (_AT_ONCE * PAYLOAD_BYTES) * _AT_ONCE * PAYLOAD_BYTES
        if whole:
            yield np.frombuffer(bytes(content[:whole]), np.uint8)
            del content[:whole]
            base += whole
    content += bytes(end - base - len(content))
    if content:
        yield np.frombuffer(bytes(content), np.uint8)


def _bytes_of(index: DiskIndex, which: int) -> bytes:
    lists = index.lists
    size = int(lists.counts[which]) * lists.entry_bytes
    if not size:
        return b""
    first, begin = int(lists.first_pages[which]), int(lists.starts[which]) % PAYLOAD_BYTES
    payloads = index.payloads_of(Run(first, int(lists.last_pages[which]) + 1 - first))
    return payloads[begin : begin + size].tobytes()
