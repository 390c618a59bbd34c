"""How large an index is, and what it reads: arithmetic on sizes, of vectors that need not be there.

In: `PaperSearch`, how many vectors of what, and how they are searched. Out: the parts of each kind of index in bytes; how
many devices they take; with fewer, what stays on disk and what reading it there allows; what blocks cost a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autopar.errors import SearchError
from autopar.vector_search.data.inputs import DTYPES, MAX_VECTORS, checked_count, checked_metric
from autopar.vector_search.data.metrics import MAX_INT8_DIM, Metric

#: Bytes of a position, of a neighbour in a list, of what a score needs of a vector beside itself.
_WORD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSearch:
    """What is to be searched, and how.

    Args:
        dtype: of the vectors, by name. batch: queries at once. k: neighbours of each.
        degree: of a graph, neighbours in a node's list. beam: nodes that a walk looks at.
        code_bytes: of a product quantiser; by default the most that divide `dim`, up to 32.
        num_lists: by default twice the square root of the vectors, as an index is built. num_probes: lists that a query
            looks into. rerank: candidates that are scored again by their vectors; by default ten for each neighbour.
        block_bytes: that a drive reads at least.
        ssd_bytes_per_s: what drives read, each a case of its own.

    Raises:
        SearchError: what cannot be, by name.
    """

    num_vectors: int
    dim: int
    dtype: str
    metric: Metric = "l2"
    batch: int = 1000
    k: int = 10
    degree: int = 64
    beam: int = 64
    code_bytes: int = 0
    num_lists: int = 0
    num_probes: int = 32
    rerank: int = 0
    block_bytes: int = 4096
    ssd_bytes_per_s: tuple[float, ...] = (5e9, 10e9)

    def __post_init__(self) -> None:
        checked_metric(self.metric)
        checked_count("k", self.k)
        if self.dtype not in DTYPES:
            raise SearchError(f"vectors of {self.dtype!r}: an index takes {', '.join(DTYPES)}")
        if self.num_vectors > MAX_VECTORS:
            raise SearchError(
                f"{self.num_vectors:,} vectors: one index takes at most {MAX_VECTORS:,}. Plan for several"
            )
        if self.dtype == "int8" and self.dim > MAX_INT8_DIM:
            raise SearchError(
                f"vectors of {self.dim:,} x int8: products are exact up to {MAX_INT8_DIM:,}. Take float32"
            )
        for name in ("num_vectors", "dim", "batch", "degree", "beam", "num_probes", "block_bytes"):
            if getattr(self, name) < 1:
                raise SearchError(f"`{name}` is {getattr(self, name)!r}: give a whole number of at least 1")
        for name in ("code_bytes", "num_lists", "rerank"):
            if getattr(self, name) < 0:
                raise SearchError(f"`{name}` is {getattr(self, name)!r}: give at least 1, or leave it out")
        if self.code_bytes and self.dim % self.code_bytes:
            can = ", ".join(map(str, _divisors(self.dim)))
            raise SearchError(
                f"codes of {self.code_bytes} bytes: each is of as many of the {self.dim} elements. Give {can}"
            )
        defaults = {
            "code_bytes": max(n for n in _divisors(self.dim) if n <= 32),
            "num_lists": min(self.num_vectors, round(2 * math.sqrt(self.num_vectors))),
            "rerank": 10 * self.k,
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or value)

    @property
    def vector_bytes(self) -> int:
        return self.dim * DTYPES[self.dtype].itemsize

    @property
    def list_bytes(self) -> int:
        """Of a node's neighbours."""
        return self.degree * _WORD

    @property
    def node_bytes(self) -> int:
        """Of a graph's node on disk: its vector and its list."""
        return self.vector_bytes + self.list_bytes

    @property
    def _term_bytes(self) -> int:
        return 0 if self.metric == "inner_product" else _WORD


@dataclass(frozen=True, slots=True)
class Part:
    """One array of an index. `num_rows` of `row_bytes` each."""

    name: str
    row_bytes: int
    num_rows: int

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * self.num_rows


def _exact(case: PaperSearch) -> tuple[Part, ...]:
    return (*_vectors(case), Part("marks: which may be returned", 1, case.num_vectors))


def _graph(case: PaperSearch) -> tuple[Part, ...]:
    return (*_vectors(case), Part(f"lists of {case.degree} neighbours", case.list_bytes, case.num_vectors))


def _ivfpq(case: PaperSearch) -> tuple[Part, ...]:
    return (
        Part(f"codes of {case.code_bytes} bytes", case.code_bytes, case.num_vectors),
        Part("positions in lists", _WORD, case.num_vectors),
        Part("centroids, float32", case.dim * _WORD, case.num_lists),
        Part("vectors, for the re-rank", case.vector_bytes, case.num_vectors),
    )


def _vectors(case: PaperSearch) -> tuple[Part, ...]:
    vectors = Part(f"vectors, {case.dim} x {case.dtype}", case.vector_bytes, case.num_vectors)
    if not case._term_bytes:
        return (vectors,)
    return vectors, Part("squared lengths" if case.metric == "l2" else "lengths", case._term_bytes, case.num_vectors)


#: The parts of each kind of index, by what the command line calls it. Read-only.
PARTS: Mapping[str, Callable[[PaperSearch], tuple[Part, ...]]] = MappingProxyType(
    {"exact": _exact, "graph": _graph, "ivfpq": _ivfpq}
)


def index_bytes(case: PaperSearch, index: str) -> int:
    """All parts of an index."""
    return sum(part.num_bytes for part in PARTS[index](case))


def read_bytes(case: PaperSearch, index: str) -> float:
    """What one query alone reads of an index in memory: all of it; the lists, vectors and terms of the nodes that a walk
    looks at; or the centroids, the codes of the probed lists and the vectors to score again."""
    if index == "exact":
        return index_bytes(case, index)
    if index == "graph":
        near = case.degree * (case.vector_bytes + case._term_bytes)
        return case.beam * (case.list_bytes + near)
    probed = min(case.num_probes, case.num_lists) / case.num_lists * case.num_vectors
    codes = probed * (case.code_bytes + _WORD)
    return case.num_lists * case.dim * _WORD + codes + case.rerank * case.vector_bytes


# -- what does not fit ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerDevices:
    """An index on so few devices that a part of it stays on disk.

    Args:
        memory_bytes: of the index, on all devices. disk_bytes: the rest.
        reads: blocks that one query has to read; of an exact index all of the rest, once for a batch.
        queries_per_s: that the drives allow, one number for each of `ssd_bytes_per_s`.
    """

    index: str
    num_devices: int
    memory_bytes: float
    disk_bytes: float
    reads: float
    queries_per_s: tuple[float, ...]


def least_devices(num_bytes: float, room_bytes: float) -> int:
    """That hold an index, by its bytes alone.

    Args:
        room_bytes: of one device.
    """
    return max(1, math.ceil(num_bytes / room_bytes))


def with_fewer_devices(case: PaperSearch, index: str, room_bytes: float) -> tuple[FewerDevices, ...]:
    """The index on 1, 2, 4, .. devices, as long as it does not fit."""
    enough = least_devices(index_bytes(case, index), room_bytes)
    return tuple(_on(case, index, 2**n, 2**n * room_bytes) for n in range((enough - 1).bit_length()))


def _on(case: PaperSearch, index: str, num_devices: int, memory: float) -> FewerDevices:
    on_disk = index_bytes(case, index) - memory
    reads = _reads(case, index, memory)
    at_once = case.batch if index == "exact" else 1  # a scan serves a batch; a walk and a probe are a query's own
    speeds = tuple(at_once * speed / (reads * case.block_bytes) for speed in case.ssd_bytes_per_s)
    return FewerDevices(
        index=index,
        num_devices=num_devices,
        memory_bytes=memory,
        disk_bytes=on_disk,
        reads=reads,
        queries_per_s=speeds,
    )


def _reads(case: PaperSearch, index: str, memory: float) -> float:
    """Blocks on disk that are read, where which are asked for is by chance."""
    size = index_bytes(case, index)
    if index == "exact":
        return (size - memory) / case.block_bytes
    if index == "graph":
        return case.beam * (1 - memory / size) * _blocks(case.node_bytes, case)
    # the vectors go to disk first: a code is looked at far more often than what it stands for
    vectors = case.num_vectors * case.vector_bytes
    small = size - vectors
    missing_vectors, missing_codes = min(1.0, (size - memory) / vectors), max(0.0, 1 - memory / small)
    list_bytes = case.num_vectors / case.num_lists * (case.code_bytes + _WORD)
    lists = min(case.num_probes, case.num_lists) * missing_codes * _blocks(list_bytes, case)
    return case.rerank * missing_vectors * _blocks(case.vector_bytes, case) + lists


def _blocks(num_bytes: float, case: PaperSearch) -> int:
    """Blocks to read for something that begins with one."""
    return math.ceil(num_bytes / case.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesInBlocks:
    """A graph's nodes on disk, none cut by a block that it fits into.

    Args:
        node_bytes: vector and list. per_block: nodes in a block; 0 where one takes several, `blocks_per_node`.
        amplification: bytes read for each byte of a node that is looked at.
        disk_bytes: of all nodes.
        drives: for each of `ssd_bytes_per_s`: blocks, and queries of `beam` nodes each, in a second.
    """

    node_bytes: int
    block_bytes: int
    per_block: int
    blocks_per_node: int
    amplification: float
    disk_bytes: int
    drives: tuple[Mapping[str, Any], ...]


def nodes_in_blocks(case: PaperSearch) -> NodesInBlocks:
    """What blocks cost where all nodes are on disk, and nothing is kept of what was read.

    >>> case = nodes_in_blocks(PaperSearch(num_vectors=1_400_000_000, dim=100, dtype="int8"))
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
