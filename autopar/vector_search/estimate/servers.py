"""Size each index kind for servers with host memory and drives, and choose among the kinds that they can serve.

In: `SearchSpec`, and the servers. Out: for each kind and number of servers, bytes in memory and on drives, pages per
query, queries per second, and cost. A kind in memory is bound by the memory bandwidth of the hosts, a kind on disk by the
drives. Lists are placed on servers, so a query asks those that have the lists it probes, and reads each list once. A
graph is split into one graph per server, and a query searches all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from autopar.errors import SearchError
from autopar.vector_search.estimate.efforts import MAX_RECALL
from autopar.vector_search.estimate.sizes import PARTS, SearchSpec, index_bytes, read_bytes

#: A page has so many bytes before its checksum. A list has a mean of 1.75 pages; a query reads 1.65 for each that it probes. A
#: vector is in up to 2.2 lists, and the file is 1.02 times its entries (measured, benchmarks/results/vector_disk.md).
_PAGE_BYTES, _PAYLOAD_BYTES, _LIST_PAGES, _READ_PAGES, _SPACE, _PADDING = 4096, 4092, 1.75, 1.65, 2.2, 1.02
#: Pages that a query reads per node of its beam, at a width of 4 (measured); nodes per entry point.
_PAGES_PER_BEAM, _PER_ENTRY = 0.75, 100
#: Bytes in memory per list or entry point, beside its vector in f32 and the edges of its node: offsets, counts and radius;
#: number; its edges in a graph over more than 100,000.
_LIST_BYTES, _POINT_BYTES, _EDGE_BYTES, _GRAPH_FROM = 20, 4, 128, 100_000
_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Servers that share a corpus.

    Args:
        memory_bytes: memory of one server for the index.
        memory_bytes_per_s: memory bandwidth of one server.
        numbers: numbers of servers; each is a case of its own.
        updates_per_s: vectors that are inserted or deleted per second.
        queries_per_s: rate that is needed of all servers, from the first of `ssd_bytes_per_s`.
        memory_usd, disk_usd: price of a GB for a month; None: no cost is given.

    Raises:
        SearchError: an invalid value, by name.
    """

    memory_bytes: float
    memory_bytes_per_s: float
    numbers: tuple[int, ...] = (1, 8)
    updates_per_s: float = 0
    queries_per_s: float = 0
    memory_usd: float | None = None
    disk_usd: float | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bytes_per_s", "memory_usd", "disk_usd"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SearchError(f"`{name}` is {value!r}: give a number above 0")
        for name in ("updates_per_s", "queries_per_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise SearchError(f"`{name}` is {getattr(self, name)!r}: give a number of at least 0")
        if not self.numbers or min(self.numbers) < 1:
            raise SearchError(f"`numbers` is {self.numbers!r}: give numbers of servers of at least 1")
        if (self.memory_usd is None) != (self.disk_usd is None):
            raise SearchError("only one of the prices of memory and of drives is given: give both, or none")


class Footprint(NamedTuple):
    """What a kind takes: bytes in memory and on drives, and pages that a query reads from one whole index."""

    memory_bytes: float
    disk_bytes: float
    pages: float


def _list_footprint(case: SearchSpec) -> Footprint:
    entry = 4 + case.vector_bytes
    num_lists = math.ceil(case.num_vectors * _SPACE / max(40, _LIST_PAGES * _PAYLOAD_BYTES / entry))
    lists = min(case.disk_probes, num_lists)
    memory = num_lists * _points(case, num_lists, _LIST_BYTES)
    per_list = max(_READ_PAGES, 40 * entry / _PAYLOAD_BYTES)
    return Footprint(memory, case.num_vectors * _SPACE * entry * _PADDING, lists * per_list)


def _graph_footprint(case: SearchSpec) -> Footprint:
    num_entries = math.ceil(case.num_vectors / _PER_ENTRY)
    points = num_entries * _points(case, num_entries, _POINT_BYTES + 4 * case.degree)
    memory = case.num_vectors * case.code_bytes + points
    node = 4 * (1 + math.ceil(case.vector_bytes / 4) + case.degree)
    per_page = max(1, _PAYLOAD_BYTES // node)
    pages = 1 if node <= _PAYLOAD_BYTES else math.ceil(node / _PAYLOAD_BYTES)
    disk = math.ceil(case.num_vectors / per_page) * pages * _PAGE_BYTES
    beam = min(case.disk_beam, case.num_vectors)
    return Footprint(memory, disk, _PAGES_PER_BEAM * beam * pages if per_page > 1 else beam * pages)


def _points(case: SearchSpec, number: int, more: int) -> int:
    return 4 * case.dim + more + (_EDGE_BYTES if number >= _GRAPH_FROM else 0)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a kind is served. footprint: None for a kind in memory. is_placed: a query reads each of its parts on one
    server only."""

    footprint: Callable[[SearchSpec], Footprint] | None
    is_placed: bool = False
    is_updatable: bool = False


#: Kinds by name. Read-only.
KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        **{name: _Kind(None) for name in PARTS},
        "ivfdisk": _Kind(_list_footprint, is_placed=True, is_updatable=True),
        "graphdisk": _Kind(_graph_footprint),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One kind on a number of servers.

    Args:
        memory_bytes, disk_bytes: of all servers.
        pages: pages that a query reads from all drives.
        queries_per_s: of all servers; for a kind on disk, for each of `ssd_bytes_per_s`.
        usd_per_month: cost of the bytes; None without prices.
        why_not: why these servers cannot serve the kind; empty if they can.
    """

    kind: str
    num_servers: int
    memory_bytes: float
    disk_bytes: float
    pages: float
    queries_per_s: tuple[float, ...]
    usd_per_month: float | None
    why_not: str


def served(case: SearchSpec, servers: Servers) -> tuple[Served, ...]:
    """Every kind on every number of servers."""
    return tuple(_served(case, servers, kind, number) for number in servers.numbers for kind in KINDS)


def best_served(every: Sequence[Served], num_servers: int) -> Served | None:
    """The kind that so many servers should serve: the cheapest, or without prices the fastest; None if none can."""
    can = [one for one in every if one.num_servers == num_servers and not one.why_not]
    return min(can, key=lambda one: (one.usd_per_month or 0.0, -one.queries_per_s[0]), default=None)


def _served(case: SearchSpec, servers: Servers, name: str, number: int) -> Served:
    kind = KINDS[name]
    if kind.footprint is None:
        size = float(index_bytes(case, name))
        read = read_bytes(case, name) / (case.batch if name == "exact" else 1)
        takes, rates = Footprint(size, 0.0, 0.0), (number * servers.memory_bytes_per_s / read,)
    else:
        takes = kind.footprint(case)
        takes = takes if kind.is_placed else takes._replace(pages=number * takes.pages)
        rates = tuple(number * speed / (takes.pages * _PAGE_BYTES) for speed in case.ssd_bytes_per_s)
    why_not = ""
    if case.recall > MAX_RECALL and name != "exact":
        why_not = "recall"
    elif takes.memory_bytes > number * servers.memory_bytes:
        why_not = "memory"
    elif servers.updates_per_s and not kind.is_updatable:
        why_not = "updates"
    elif rates[0] < servers.queries_per_s:
        why_not = "rate"
    cost = None
    if servers.memory_usd is not None and servers.disk_usd is not None:
        cost = (takes.memory_bytes * servers.memory_usd + takes.disk_bytes * servers.disk_usd) / _GIGA
    return Served(
        kind=name,
        num_servers=number,
        memory_bytes=takes.memory_bytes,
        disk_bytes=takes.disk_bytes,
        pages=takes.pages,
        queries_per_s=rates,
        usd_per_month=cost,
        why_not=why_not,
    )
