"""Search a graph on disk: the index `graphdisk`.

In: a page file. Out: an `Index` that keeps a code of each vector in memory and reads the blocks of nodes that its beam
leads to. The effort of a search is the number of nodes of the beam.
"""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.index import Found, IndexStats, padded
from autopar.vector_search.data.index_file import written_whole
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.recall_tuning import Measured, for_filter
from autopar.vector_search.graph_on_disk.node_blocks import Nodes
from autopar.vector_search.graph_on_disk.searcher import Searcher
from autopar.vector_search.graph_on_disk.stored_graph import StoredGraph, loaded
from autopar.vector_search.on_disk.index import Reads
from autopar.vector_search.on_disk.page_checks import read_and_check
from autopar.vector_search.on_disk.page_file import PageFile, damaged
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.on_disk.reader_table import open_reader
from autopar.vector_search.on_disk.readers import Run

KIND = "graphdisk"


class GraphDiskIndex:
    """A neighbour graph in a page file. Use it as a context, or `close` it.

    Args:
        pages: an open page file of this kind.
        reader: an engine of `reader_table.READERS`, or `"auto"`.

    Raises:
        IndexFileError: the file is damaged, or cannot be opened by this engine.
        SearchError: this machine does not have the engine.
    """

    def __init__(self, pages: PageFile, reader: str = "auto") -> None:
        self.path = pages.path
        self._pages = pages
        try:
            self._graph = loaded(pages)
            measured = Measured.loaded(pages.settings["measured"])
            width, self._why = pages.settings["width"], str(pages.settings["why"])
            for name, count in (("effort", measured.effort), ("width", width)):
                if type(count) is not int or not 1 <= count <= inputs.MAX_VECTORS:
                    raise ValueError(f"{name} {count!r}")
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise damaged(self.path, f"its settings are invalid ({error!r})") from error
        self.measured = measured
        self._width = width
        self._engine, self._reader = open_reader(reader, self.path)
        self._searcher = Searcher(self.path, pages.file_id, self._graph, self._reader, width)
        self._lock = threading.Lock()
        self._is_open = True
        self._release = weakref.finalize(self, self._reader.close)  # also if the user does not close it

    def search(
        self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None, effort: int | None = None
    ) -> Found:
        """See `Index.search`. The effort is the number of nodes of the beam. Searches of several threads run one after
        the other.

        Raises:
            IndexFileError: a page that the search needs is damaged or cannot be read.
        """
        graph = self._graph
        checked = inputs.checked_queries(queries, graph.blocks.dim, graph.blocks.dtype)
        k, allowed = inputs.checked_count("k", k), inputs.checked_filter(filter, graph.num_vectors)
        effort = self.measured.effort if effort is None else inputs.checked_count("effort", effort)
        num_allowed = graph.num_vectors if allowed is None else int(np.count_nonzero(allowed))
        kept = min(k, graph.num_vectors)
        with self._lock:
            if not self._is_open:
                raise SearchError(f"the index of {self.path} is closed: load it again")
            distances, positions = self._searched(checked, kept, effort, allowed, num_allowed)
        ids = np.full(positions.shape, NO_ID, np.int64)
        ids[positions != NO_ID] = graph.ids_of(positions[positions != NO_ID])
        found = padded(Found(ids, distances), k, graph.metric)
        return found.of_one() if np.ndim(queries) == 1 else found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Copy the file to another path, atomically."""
        target = Path(path)
        if target.exists() and target.samefile(self.path):
            return
        with written_whole(target) as file, self.path.open("rb") as own:
            shutil.copyfileobj(own, file, 2**20)

    def verify(self) -> None:
        """Read the whole file and check every page; a search checks the pages that it reads.

        Raises:
            IndexFileError: a page is damaged or cannot be read.
        """
        with self._lock:
            read_and_check(self._reader, self.path, self._pages.file_id, Run(1, self._pages.num_pages - 1))

    def reads(self) -> Reads:
        """What searches and `verify` have read. Used are the bytes of the nodes whose edges were followed."""
        counts = self._reader.counts
        used = self._searcher.blocks.followed * self._graph.blocks.node_bytes
        return Reads(counts.requests, counts.pages, counts.num_bytes, used)

    def stats(self) -> IndexStats:
        """See `Index.stats`. `device_bytes` are the bytes of the arrays that are in memory between searches."""
        graph = self._graph
        blocks = graph.blocks
        details: dict[str, Any] = dict(self.measured.details)
        details |= {"degree": blocks.degree, "width": self._width, "code_bytes": graph.codes.shape[1]}
        details |= {"nodes_per_block": blocks.per_block, "num_entries": len(graph.entries)}
        details |= {"file_bytes": self._pages.num_pages * PAGE_BYTES, "reader": self._engine, "reads": self.reads()}
        return IndexStats(
            kind=KIND,
            metric=graph.metric,
            dtype=blocks.dtype.name,
            num_vectors=graph.num_vectors,
            dim=blocks.dim,
            num_devices=1,
            device_bytes=graph.memory_bytes,
            layouts=(),
            searches={},
            details=details | ({"why": self._why} if self._why else {}),
            reached=self.measured.reached,
        )

    @property
    def graph(self) -> StoredGraph:
        """What is in memory of the graph."""
        return self._graph

    @property
    def width(self) -> int:
        """Maximum blocks that a query reads per round."""
        return self._width

    @property
    def node_bytes(self) -> int:
        """Bytes of a node on disk."""
        return self._graph.blocks.node_bytes

    def nodes(self, blocks: NDArray[np.int64]) -> Nodes:
        """Read blocks, int64 `[m]`, ascending.

        Raises:
            IndexFileError: a page cannot be read, or is damaged.
        """
        with self._lock:
            return self._searcher.blocks.nodes(blocks)

    def close(self) -> None:
        """Close the file. A closed index cannot be searched."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._release()

    def __enter__(self) -> GraphDiskIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- private ------------------------------------------------------------------------------

    def _searched(
        self, queries: NDArray[Any], k: int, effort: int, allowed: NDArray[np.bool_] | None, num_allowed: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and positions, `[num_queries, k]`. A filter doubles the effort until that makes up for its
        selectivity. Queries that find too few are searched again, exactly."""
        effort = for_filter(effort, max(1, num_allowed) / self._graph.num_vectors)
        if effort >= self._graph.num_vectors or not num_allowed:
            return self._searcher.exact(queries, k, allowed)
        distances, positions = self._searcher.best(queries, k, effort, allowed)
        short = np.flatnonzero(positions[:, min(k, num_allowed) - 1] == NO_ID)
        if short.size:
            distances[short], positions[short] = self._searcher.exact(queries[short], k, allowed)
        return distances, positions
