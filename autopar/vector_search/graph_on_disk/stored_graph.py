"""Hold what a search keeps in memory of a graph on disk: codes of all nodes, and entry points with their vectors.

In: a page file. Out: `StoredGraph`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.inputs import DTYPES, MAX_VECTORS, checked_metric
from autopar.vector_search.data.metrics import NO_ID, Metric
from autopar.vector_search.graph.nearest_points import PointGraph, why_invalid_graph
from autopar.vector_search.graph_on_disk.node_blocks import NodeBlocks
from autopar.vector_search.on_disk.page_file import PageFile, damaged

#: Arrays of the page file; a part of them may be missing.
ARRAYS = ("codes", "codebooks", "entries", "entry_vectors", "entry_links", "repeated", "repeated_of")
OPTIONAL_ARRAYS = ("centre", "ids", "entry_edges", "entry_points")
#: Sampled nodes of `code_error`.
_ERROR_SAMPLE = 4096


class Allowed(Protocol):
    """The vectors that may be returned: bool `[n]`, or what is indexed like it."""

    def __getitem__(self, positions: NDArray[np.int32], /) -> Any:
        """bool, of the shape of `positions`."""
        ...


@dataclass(frozen=True)
class StoredGraph:
    """The part of a graph on disk that is in memory.

    Args:
        codes: uint8 `[num_blocks * per_block, num_parts]`, the product-quantized code of each node.
        codebooks: f32 `[num_parts, num_codes, d / num_parts]`, of the compared vectors: centred for l2, of unit length
            for cosine.
        entries: int32 `[num_entries]`, node numbers.
        entry_vectors: f32 `[num_entries, d]`, compared vectors.
        entry_links: int32 `[num_entries, degree]`, the edges of their nodes, which a search follows without a read.
        centre: f32 `[d]`, subtracted for l2 of floats; None if there is none.
        ids: int64 `[n]`; None if ids are positions.
        repeated: int32 `[m]`, positions of vectors that equal the vector of a node.
        repeated_of: int32 `[m]`, ascending, the nodes that they equal.
        entry_edges, entry_points: `nearest_points.PointGraph` of the entry points; None where these are few.
    """

    codes: NDArray[np.uint8]
    codebooks: NDArray[np.float32]
    entries: NDArray[np.int32]
    entry_vectors: NDArray[np.float32]
    entry_links: NDArray[np.int32]
    centre: NDArray[np.float32] | None
    ids: NDArray[np.int64] | None
    repeated: NDArray[np.int32]
    repeated_of: NDArray[np.int32]
    blocks: NodeBlocks
    metric: Metric
    num_vectors: int
    entry_edges: NDArray[np.int32] | None = None
    entry_points: NDArray[np.int32] | None = None

    @property
    def entry_graph(self) -> PointGraph | None:
        """The graph over the entry points."""
        if self.entry_edges is None or self.entry_points is None:
            return None
        return PointGraph(self.entry_edges, self.entry_points)

    def decoded(self, nodes: NDArray[np.integer]) -> NDArray[np.float32]:
        """f32 `[m, d]`, the vectors that the codes of nodes stand for."""
        parts = np.arange(len(self.codebooks))
        return self.codebooks[parts, self.codes[nodes]].reshape(len(nodes), self.blocks.dim)

    @cached_property
    def code_error(self) -> float:
        """The mean of what a cost by code lacks, from a sample of nodes whose vectors are in memory.

        A code stands for the mean of its vectors. So the squared distance to a vector is on average that to its code plus
        the mean squared error of codes; similarities lack nothing.
        """
        if self.metric != "l2":
            return 0.0
        num = len(self.entries)
        some = np.linspace(0, num - 1, min(num, _ERROR_SAMPLE)).astype(np.int64)
        errors = self.entry_vectors[some] - self.decoded(self.entries[some])
        return float((errors**2).sum(axis=1).mean())

    @property
    def num_blocks(self) -> int:
        return len(self.codes) // self.blocks.per_block

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self._arrays.values())

    def ids_of(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """The ids of positions that are not `NO_ID`."""
        return positions.astype(np.int64) if self.ids is None else self.ids[positions]

    def saved(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Settings and arrays for the page file."""
        settings = {"metric": self.metric, "dtype": self.blocks.dtype.name, "dim": self.blocks.dim}
        settings |= {"degree": self.blocks.degree, "per_block": self.blocks.per_block, "num_vectors": self.num_vectors}
        return settings, self._arrays

    @property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays = {name: getattr(self, name) for name in (*ARRAYS, *OPTIONAL_ARRAYS)}
        return {name: array for name, array in arrays.items() if array is not None}


def loaded(pages: PageFile) -> StoredGraph:
    """The graph of a page file.

    Raises:
        IndexFileError: arrays and settings contradict each other.
        LookupError, TypeError, ValueError: a missing or invalid setting.
    """
    graph = graph_of(pages.settings, pages.arrays)
    why = why_invalid(graph, pages.settings["per_block"], pages.num_data_pages // graph.blocks.pages_per_block)
    if why:
        raise damaged(Path(pages.path), why)
    return graph


def graph_of(settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> StoredGraph:
    """The graph of settings and arrays, which may still contradict each other: `why_invalid`.

    Raises:
        LookupError, TypeError, ValueError: a missing or invalid setting.
    """
    numbers = {name: settings[name] for name in ("dim", "degree", "per_block", "num_vectors")}
    for name, number in numbers.items():
        if type(number) is not int or not 1 <= number <= MAX_VECTORS:
            raise ValueError(f"{name} {number!r}")
    blocks = NodeBlocks(numbers["dim"], DTYPES[settings["dtype"]], numbers["degree"], numbers["per_block"])
    return StoredGraph(
        codes=arrays["codes"],
        codebooks=arrays["codebooks"],
        entries=arrays["entries"],
        entry_vectors=arrays["entry_vectors"],
        entry_links=arrays["entry_links"],
        repeated=arrays["repeated"],
        repeated_of=arrays["repeated_of"],
        centre=arrays.get("centre"),
        ids=arrays.get("ids"),
        entry_edges=arrays.get("entry_edges"),
        entry_points=arrays.get("entry_points"),
        blocks=blocks,
        metric=checked_metric(settings["metric"]),
        num_vectors=numbers["num_vectors"],
    )


def why_invalid(graph: StoredGraph, per_block: int, num_blocks: int) -> str | None:
    """The first contradiction, as text. A matching checksum proves that the file is unchanged, not that its author is
    trusted."""
    blocks, num = graph.blocks, graph.num_vectors
    if blocks.per_block != per_block:
        return f"it says {per_block} nodes per block, and at most {blocks.per_block} fit"
    num_nodes = num_blocks * per_block
    parts, num_codes, width = graph.codebooks.shape if graph.codebooks.ndim == 3 else (0, 0, 0)
    if not 1 <= num_codes <= 256 or parts * width != blocks.dim or not np.isfinite(graph.codebooks).all():
        return f"`codebooks` has shape {list(graph.codebooks.shape)}, or elements that are not finite"
    num_entries, num_repeated = len(graph.entries), len(graph.repeated)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "codes": ("uint8", (num_nodes, parts)),
        "codebooks": ("float32", (parts, num_codes, width)),
        "entries": ("int32", (num_entries,)),
        "entry_vectors": ("float32", (num_entries, blocks.dim)),
        "entry_links": ("int32", (num_entries, blocks.degree)),
        "centre": ("float32", (blocks.dim,)),
        "ids": ("int64", (num,)),
        "repeated": ("int32", (num_repeated,)),
        "repeated_of": ("int32", (num_repeated,)),
    }
    if (graph.entry_edges is None) != (graph.entry_points is None):
        return "it has only a part of the graph over its entry points"
    for name, (dtype, shape) in shapes.items():
        array = getattr(graph, name)
        if array is not None and (array.dtype.name, array.shape) != (dtype, shape):
            return f"`{name}` is {array.dtype} of shape {list(array.shape)}, expected {dtype} of shape {list(shape)}"
    if num_codes < 256 and graph.codes.size and int(graph.codes.max()) >= num_codes:
        return f"`codes` has {int(graph.codes.max())}, and there are {num_codes} codes"
    for name, array, least, most in (
        ("entries", graph.entries, 0, num_nodes),
        ("entry_links", graph.entry_links, NO_ID, num_nodes),
        ("repeated", graph.repeated, 0, num),
        ("repeated_of", graph.repeated_of, 0, num_nodes),
    ):
        if array.size and not least <= int(array.min()) <= int(array.max()) < most:
            return f"`{name}` points outside the {most:,}"
    if graph.entry_graph is not None and (why := why_invalid_graph(graph.entry_graph, num_entries)):
        return why
    if (num_nodes and not num_entries) or not np.isfinite(graph.entry_vectors).all():
        return "it has no entry points, or entry vectors that are not finite"
    if (np.diff(graph.repeated_of) < 0).any():
        return "`repeated_of` does not increase"
    return None


def expanded(
    graph: StoredGraph,
    distances: NDArray[Any],
    nodes: NDArray[np.int32],
    positions: NDArray[np.int32],
    allowed: Allowed | None,
    k: int,
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Replace nodes by the allowed vectors that equal them, and keep the k best.

    Args:
        distances, nodes, positions: `[m]`, best first, of one query; without `NO_ID`.
    """
    first, last = (np.searchsorted(graph.repeated_of, nodes, side=side) for side in ("left", "right"))
    found, which = [], []
    for at in range(len(nodes)):
        every = np.concatenate([positions[at : at + 1], graph.repeated[first[at] : last[at]]])
        every = every if allowed is None else every[allowed[every]]
        found.append(every)
        which.append(np.full(len(every), at))
        if sum(map(len, found)) >= k:
            break
    places = np.concatenate([*found, np.zeros(0, np.int32)])[:k].astype(np.int32)
    from_node = np.concatenate([*which, np.zeros(0, np.int64)])[:k].astype(np.int64)
    return distances[from_node], places


def has_allowed(
    graph: StoredGraph, nodes: NDArray[np.int32], positions: NDArray[np.int32], allowed: Allowed
) -> NDArray[np.bool_]:
    """Whether any vector of each node may be returned.

    Args:
        nodes, positions: of the same shape; `NO_ID` is never allowed.
    """
    is_allowed = allowed[np.maximum(positions, 0)] & (positions != NO_ID)
    if graph.repeated.size:
        before = np.concatenate([[0], np.cumsum(allowed[graph.repeated])])
        first, last = (np.searchsorted(graph.repeated_of, nodes, side=side) for side in ("left", "right"))
        is_allowed |= before[last] > before[first]
    return is_allowed
