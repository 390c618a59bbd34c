"""Compute the size of each index kind and the bytes that a query reads, from sizes only.

In: `SearchSpec`, the corpus and the search parameters. Out: the parts of each index kind in bytes; the number of
devices that hold them; with fewer devices, the bytes on disk and the query rate that the drives allow; the read
amplification of graph nodes in disk blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autopar.errors import SearchError
from autopar.vector_search.data.inputs import DTYPES, MAX_VECTORS, checked_count, checked_metric
from autopar.vector_search.data.metrics import Metric, is_integer, max_dim
from autopar.vector_search.estimate.efforts import effort_of

#: Bytes of a position, an edge, or a term; typical slots per vector in inverted lists.
_ENTRY_BYTES, _PADDING = 4, 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpec:
    """The corpus and the search parameters of an estimate.

    Args:
        dtype: name of the vectors' dtype.
        batch: queries per batch.
        k: neighbours per query.
        recall: recall@10, from which numbers of lists and nodes follow that are not given; 1: exact search only.
        degree: neighbours per graph node.
        beam: nodes that a beam search expands; of a graph on disk, `disk_beam`.
        code_bytes: bytes of a product-quantized code; by default the largest divisor of `dim` up to 32.
        num_lists: inverted lists; by default twice the square root of the number of vectors, as in `build`.
        num_probes: lists that a query probes; of lists on disk, `disk_probes`.
        rerank: candidates that are re-ranked by their vectors; by default ten per neighbour.
        block_bytes: smallest read of a drive.
        ssd_bytes_per_s: read bandwidths of the drives; each is a case of its own.

    Raises:
        SearchError: an invalid value, by name.
    """

    num_vectors: int
    dim: int
    dtype: str
    metric: Metric = "l2"
    batch: int = 1000
    k: int = 10
    recall: float = 0.95
    degree: int = 64
    beam: int = 0
    disk_beam: int = 0
    code_bytes: int = 0
    num_lists: int = 0
    num_probes: int = 0
    disk_probes: int = 0
    rerank: int = 0
    block_bytes: int = 4096
    ssd_bytes_per_s: tuple[float, ...] = (5e9, 10e9)

    def __post_init__(self) -> None:
        checked_metric(self.metric)
        checked_count("k", self.k)
        if self.dtype not in DTYPES:
            raise SearchError(f"`dtype` is {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if self.num_vectors > MAX_VECTORS:
            raise SearchError(
                f"{self.num_vectors:,} vectors: one index holds at most {MAX_VECTORS:,}. Estimate several indexes"
            )
        if is_integer(self.dtype) and self.dim > max_dim(self.dtype):
            raise SearchError(
                f"vectors of {self.dim:,} x {self.dtype}: int32 scores are exact up to {max_dim(self.dtype):,} elements."
                " Use float32"
            )
        if not 0 < self.recall <= 1:
            raise SearchError(f"`recall` is {self.recall!r}: give a recall above 0 and at most 1")
        for name in ("num_vectors", "dim", "batch", "degree", "block_bytes"):
            if getattr(self, name) < 1:
                raise SearchError(f"`{name}` is {getattr(self, name)!r}: give an integer of at least 1")
        for name in ("code_bytes", "num_lists", "rerank", "beam", "disk_beam", "num_probes", "disk_probes"):
            if getattr(self, name) < 0:
                raise SearchError(f"`{name}` is {getattr(self, name)!r}: give at least 1, or omit it")
        if self.code_bytes and self.dim % self.code_bytes:
            divisors = ", ".join(map(str, _divisors(self.dim)))
            raise SearchError(
                f"`code_bytes` is {self.code_bytes}: it has to divide the {self.dim} elements of a vector. Give {divisors}"
            )
        usual_lists = min(self.num_vectors, round(2 * math.sqrt(self.num_vectors)))
        num_lists = self.num_lists or usual_lists
        defaults = {
            "code_bytes": max(n for n in _divisors(self.dim) if n <= 32),
            "num_lists": num_lists,
            "rerank": 10 * self.k,
            "disk_beam": self.beam or self._effort("graphdisk"),
            "disk_probes": self.num_probes or self._effort("ivfdisk"),
            "beam": self._effort("graph"),
            "num_probes": max(1, round(self._effort("ivf") * num_lists / usual_lists)),
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or value)

    def _effort(self, kind: str) -> int:
        return effort_of(kind, self.recall, self.num_vectors)

    @property
    def vector_bytes(self) -> int:
        return self.dim * DTYPES[self.dtype].itemsize

    @property
    def list_bytes(self) -> int:
        """Bytes of one adjacency list."""
        return self.degree * _ENTRY_BYTES

    @property
    def node_bytes(self) -> int:
        """Bytes of one graph node on disk: its vector and its adjacency list."""
        return self.vector_bytes + self.list_bytes

    @property
    def _term_bytes(self) -> int:
        return 0 if self.metric == "inner_product" else _ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """One array of an index: `num_rows` rows of `row_bytes`."""

    name: str
    row_bytes: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * self.num_rows


def _exact(case: SearchSpec) -> tuple[Part, ...]:
    return (*_vectors(case), Part("mask of returnable vectors", 1, case.num_vectors))


def _graph(case: SearchSpec) -> tuple[Part, ...]:
    return (*_vectors(case), Part(f"adjacency lists, {case.degree} neighbours", case.list_bytes, case.num_vectors))


def _ivf(case: SearchSpec) -> tuple[Part, ...]:
    vectors = (Part(part.name, part.row_bytes, round(_PADDING * part.num_rows)) for part in _vectors(case))
    return (
        *vectors,
        Part("positions of the vectors", _ENTRY_BYTES, round(_PADDING * case.num_vectors)),
        Part("centroids, float32", case.dim * _ENTRY_BYTES, case.num_lists),
    )


def _ivfpq(case: SearchSpec) -> tuple[Part, ...]:
    return (
        Part(f"codes of {case.code_bytes} bytes", case.code_bytes, case.num_vectors),
        Part("positions of the vectors", _ENTRY_BYTES, case.num_vectors),
        Part("centroids, float32", case.dim * _ENTRY_BYTES, case.num_lists),
        Part("vectors, for re-ranking", case.vector_bytes, case.num_vectors),
    )


def _vectors(case: SearchSpec) -> tuple[Part, ...]:
    vectors = Part(f"vectors, {case.dim} x {case.dtype}", case.vector_bytes, case.num_vectors)
    if not case._term_bytes:
        return (vectors,)
    return vectors, Part("squared norms" if case.metric == "l2" else "norms", case._term_bytes, case.num_vectors)


#: The parts of each index kind, by the kind's name on the command line. Read-only.
PARTS: Mapping[str, Callable[[SearchSpec], tuple[Part, ...]]] = MappingProxyType(
    {"exact": _exact, "ivf": _ivf, "graph": _graph, "ivfpq": _ivfpq}
)


def index_bytes(case: SearchSpec, index: str) -> int:
    """Bytes of all parts of an index."""
    return sum(part.num_bytes for part in PARTS[index](case))


def read_bytes(case: SearchSpec, index: str) -> float:
    """Bytes that a single query reads of an index in memory.

    exact: the whole index. ivf: centroids, and the probed lists. graph: adjacency list, neighbours and terms of the
    expanded nodes. ivfpq: centroids, codes of the probed lists, vectors to re-rank.
    """
    if index == "exact":
        return index_bytes(case, index)
    if index == "graph":
        near = case.degree * (case.vector_bytes + case._term_bytes)
        return case.beam * (case.list_bytes + near)
    share = min(case.num_probes, case.num_lists) / case.num_lists
    if index == "ivf":
        centroids = case.num_lists * case.dim * _ENTRY_BYTES
        return centroids + share * (index_bytes(case, index) - centroids)
    probed = share * case.num_vectors
    codes = probed * (case.code_bytes + _ENTRY_BYTES)
    return case.num_lists * case.dim * _ENTRY_BYTES + codes + case.rerank * case.vector_bytes


# -- indexes larger than memory ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerDevices:
    """An index on so few devices that a part of it stays on disk.

    Args:
        memory_bytes: bytes in the memory of all devices.
        disk_bytes: the remaining bytes.
        reads: disk blocks per query; for an exact index, per batch: all blocks on disk.
        queries_per_s: query rate that the drives allow, for each of `ssd_bytes_per_s`.
    """

    index: str
    num_devices: int
    memory_bytes: float
    disk_bytes: float
    reads: float
    queries_per_s: tuple[float, ...]


def least_devices(num_bytes: float, room_bytes: float) -> int:
    """The smallest number of devices that hold an index, by bytes only.

    Args:
        room_bytes: usable memory of one device.
    """
    return max(1, math.ceil(num_bytes / room_bytes))


def with_fewer_devices(case: SearchSpec, index: str, room_bytes: float) -> tuple[FewerDevices, ...]:
    """The index on 1, 2, 4, .. devices, as long as it does not fit in their memory."""
    enough = least_devices(index_bytes(case, index), room_bytes)
    return tuple(_on(case, index, 2**n, 2**n * room_bytes) for n in range((enough - 1).bit_length()))


def _on(case: SearchSpec, index: str, num_devices: int, memory: float) -> FewerDevices:
    on_disk = index_bytes(case, index) - memory
    reads = _reads(case, index, memory)
    # one scan serves a batch; beam search and probes read for one query
    at_once = case.batch if index == "exact" else 1
    speeds = tuple(at_once * speed / (reads * case.block_bytes) for speed in case.ssd_bytes_per_s)
    return FewerDevices(
        index=index,
        num_devices=num_devices,
        memory_bytes=memory,
        disk_bytes=on_disk,
        reads=reads,
        queries_per_s=speeds,
    )


def _reads(case: SearchSpec, index: str, memory: float) -> float:
    """Expected disk blocks per query, if accesses are uniformly random."""
    size = index_bytes(case, index)
    if index == "exact":
        return (size - memory) / case.block_bytes
    if index == "graph":
        return case.beam * (1 - memory / size) * _blocks(case.node_bytes, case)
    if index == "ivf":
        list_bytes = case.num_vectors / case.num_lists * (case.vector_bytes + case._term_bytes + _ENTRY_BYTES)
        return min(case.num_probes, case.num_lists) * (1 - memory / size) * _blocks(list_bytes, case)
    # vectors go to disk before codes: a query reads many more codes than vectors
    vectors = case.num_vectors * case.vector_bytes
    small = size - vectors
    missing_vectors, missing_codes = min(1.0, (size - memory) / vectors), max(0.0, 1 - memory / small)
    list_bytes = case.num_vectors / case.num_lists * (case.code_bytes + _ENTRY_BYTES)
    lists = min(case.num_probes, case.num_lists) * missing_codes * _blocks(list_bytes, case)
    return case.rerank * missing_vectors * _blocks(case.vector_bytes, case) + lists


def _blocks(num_bytes: float, case: SearchSpec) -> int:
    """Number of blocks of an object that starts at a block boundary."""
    return math.ceil(num_bytes / case.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesInBlocks:
    """Graph nodes on disk; no node crosses a block boundary unless it is larger than a block.

    Args:
        node_bytes: vector and adjacency list.
        per_block: nodes per block; 0 if a node takes several blocks, `blocks_per_node`.
        amplification: bytes read per byte of an expanded node.
        disk_bytes: bytes of all nodes on disk.
        drives: blocks per second and queries per second of `beam` nodes, for each of `ssd_bytes_per_s`.
    """

    node_bytes: int
    block_bytes: int
    per_block: int
    blocks_per_node: int
    amplification: float
    disk_bytes: int
    drives: tuple[Mapping[str, Any], ...]


def nodes_in_blocks(case: SearchSpec) -> NodesInBlocks:
    """The read amplification of a graph whose nodes are all on disk, without a cache.

    >>> case = nodes_in_blocks(SearchSpec(num_vectors=1_400_000_000, dim=100, dtype="int8"))
    >>> case.node_bytes, case.per_block, round(case.amplification, 1)
    (356, 11, 11.5)
    """
    per_block, each = case.block_bytes // case.node_bytes, _blocks(case.node_bytes, case)
    blocks = math.ceil(case.num_vectors / per_block) if per_block else case.num_vectors * each
    drives = [
        {
            "bytes_per_s": speed,
            "blocks_per_s": speed / case.block_bytes,
            "useful_bytes_per_s": speed * case.node_bytes / (each * case.block_bytes),
            "queries_per_s": speed / case.block_bytes / (each * case.beam),
        }
        for speed in case.ssd_bytes_per_s
    ]
    return NodesInBlocks(
        node_bytes=case.node_bytes,
        block_bytes=case.block_bytes,
        per_block=per_block,
        blocks_per_node=each,
        amplification=each * case.block_bytes / case.node_bytes,
        disk_bytes=blocks * case.block_bytes,
        drives=tuple(drives),
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
