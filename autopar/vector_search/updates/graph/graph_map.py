"""Know where the blocks of a graph lie, whose nodes are those of slots.

In: what a graph on disk keeps in memory, and pages. Out: `GraphMap`, immutable, and its arrays for the page store. The
position in a node is its slot. Nodes keep their numbers; the blocks of nodes may lie anywhere in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.inputs import MAX_VECTORS
from autopar.vector_search.graph.nearest_points import NearestPoints
from autopar.vector_search.graph_on_disk.searcher import entry_points
from autopar.vector_search.graph_on_disk.stored_graph import StoredGraph, graph_of, why_invalid


@dataclass(frozen=True)
class GraphMap:
    """A graph and its blocks.

    Args:
        graph: what is in memory; it has no `ids`, and `num_vectors` is the number of slots.
        first_pages: int64 `[num_blocks]`, the first page of each block.
        width: maximum blocks that a query reads per round.
        num_stored: vectors in it, when it was written.
        num_changed: vectors inserted and deleted since the codebooks were trained.
    """

    graph: StoredGraph
    first_pages: NDArray[np.int64]
    width: int
    num_stored: int
    num_changed: int

    @property
    def num_lists(self) -> int:
        """A graph has no lists."""
        return 0

    @property
    def num_blocks(self) -> int:
        return len(self.first_pages)

    @property
    def data_pages(self) -> NDArray[np.int64]:
        """The pages of all blocks."""
        return (self.first_pages[:, None] + np.arange(self.graph.blocks.pages_per_block)).reshape(-1)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arrays."""
        return self.graph.memory_bytes + self.first_pages.nbytes

    @cached_property
    def entry_points(self) -> NearestPoints:
        """The points at which a search starts."""
        return entry_points(self.graph)

    def saved(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Settings and arrays for the page store."""
        settings, arrays = self.graph.saved()
        settings |= {"width": self.width, "num_stored": self.num_stored, "num_changed": self.num_changed}
        return {"graph": settings}, arrays | {"first_pages": self.first_pages}

    @classmethod
    def loaded(cls, arrays: Mapping[str, NDArray[Any]], saved: Mapping[str, Any]) -> GraphMap:
        """Parse what `saved` returned.

        Raises:
            LookupError, TypeError, ValueError: arrays or settings that contradict each other.
        """
        numbers = {name: saved[name] for name in ("width", "num_stored", "num_changed")}
        for name, number in numbers.items():
            if type(number) is not int or not (name == "width") <= number <= MAX_VECTORS:
                raise ValueError(f"{name} {number!r}")
        pages = arrays["first_pages"]
        if pages.dtype != np.int64 or pages.ndim != 1:
            raise ValueError(f"`first_pages` is {pages.dtype} of shape {list(pages.shape)}")
        named = {name: array for name, array in arrays.items() if name != "ids"}  # these are the slots'
        graph = graph_of(saved, named)
        if why := why_invalid(graph, saved["per_block"], len(pages)):
            raise ValueError(why)
        return cls(graph, pages, **numbers)
