"""Plan an exact search, and size the other index kinds, for devices that need not exist; nothing is allocated.

In: `SearchSpec` and the devices. Out: `SearchEstimate`: the plan of the search that `build` would make for a corpus of
that size, the same for other batch sizes, and the size of each index. The planned program is the exact index's own,
traced with abstract arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.api.make_plan import plan
from autopar.errors import BudgetError, SearchError
from autopar.hardware.profile import HardwareProfile
from autopar.planner.memory_budget import MemoryBudget
from autopar.planner.request import Progress, requested_meshes, requested_profile
from autopar.plans.plan import Plan
from autopar.plans.records import TensorPlan
from autopar.vector_search.data.inputs import DTYPES
from autopar.vector_search.estimate.servers import Served, Servers, served
from autopar.vector_search.estimate.sizes import (
    PARTS,
    FewerDevices,
    NodesInBlocks,
    Part,
    SearchSpec,
    index_bytes,
    least_devices,
    nodes_in_blocks,
    read_bytes,
    with_fewer_devices,
)
from autopar.vector_search.kernels.exact_top_k import exact_arguments, exact_search
from autopar.vector_search.kernels.tiling import Blocks, Tiling
from autopar.xla_compiler.hlo_collectives import sent_bytes

#: Batch sizes that are planned in addition to the requested one.
_OTHER_BATCHES = (1, 100, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """The planned exact search for one batch size.

    Args:
        plan: None if no plan fits; `refused` then holds the error.
        corpus_ways, queries_ways: number of shards of each; 1: replicated.
        sent_bytes: bytes that one device sends per query.
        most_bytes: bytes of k candidates, value and position, from every device: what a merge on one device would
            receive.
    """

    batch: int
    plan: Plan | None
    refused: str
    corpus_ways: int
    queries_ways: int
    sent_bytes: float
    most_bytes: float

    @property
    def queries_per_s(self) -> float:
        return 0.0 if self.plan is None else self.batch / self.plan.prediction.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEstimate:
    """The size of one index kind.

    Args:
        num_bytes: bytes of all parts.
        least_devices: number of devices whose memory budget holds the index; `least_bare`: whose full memory holds it.
        read_bytes: bytes that a single query reads.
        fewer: the index on fewer devices, with the rest on disk.
    """

    name: str
    parts: tuple[Part, ...]
    num_bytes: int
    least_devices: int
    least_bare: int
    read_bytes: float
    fewer: tuple[FewerDevices, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEstimate:
    """The estimate of one search. `requested` is the entry of `batches` for the spec's batch size; `room_bytes` is the
    memory of one device that a plan may fill; `served` has every kind on servers with drives."""

    case: SearchSpec
    profile: HardwareProfile
    num_devices: int
    room_bytes: float
    requested: PlannedBatch
    batches: tuple[PlannedBatch, ...]
    indexes: tuple[IndexEstimate, ...]
    blocks: NodesInBlocks
    served: tuple[Served, ...] = ()


def estimate_search(
    case: SearchSpec,
    *,
    indexes: Sequence[str] = tuple(PARTS),
    servers: Servers | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> SearchEstimate:
    """Plan the exact search, and size the index kinds.

    Args:
        indexes: index kinds to include, of `PARTS`.
        servers: servers with memory and drives, for which all kinds are sized; None: none.
        options: options of `autopar.plan`: mesh or num_devices, hardware, memory_budget_bytes, pin, time_limit_s,
            cache.

    Raises:
        SearchError: an unknown index kind.
        AutoparError: planning fails. A batch that fits no device is part of the result, not an error.
    """
    for name in indexes:
        if name not in PARTS:
            raise SearchError(f"`index` is {name!r}: expected one of {', '.join(PARTS)}")
    profile = requested_profile(options.get("hardware"))
    budget = options.get("memory_budget_bytes")
    room = MemoryBudget(profile.usable_bytes if budget is None else float(budget)).plan_bytes
    num_devices = requested_meshes(options.get("mesh"), options.get("num_devices"))[0].num_devices
    report = progress or (lambda stage, fraction: None)
    numbers = sorted({case.batch, *_OTHER_BATCHES})
    batches = []
    for done, number in enumerate(numbers):
        report(f"plan {number:,} queries", done / len(numbers))
        batches.append(_planned(case, number, num_devices, {**options, "hardware": profile}))
    report("done", 1.0)
    return SearchEstimate(
        case=case,
        profile=profile,
        num_devices=num_devices,
        room_bytes=room,
        requested=batches[numbers.index(case.batch)],
        batches=tuple(batches),
        indexes=tuple(_index(case, name, room, profile.hbm_bytes) for name in indexes),
        blocks=nodes_in_blocks(case),
        served=() if servers is None else served(case, servers),
    )


def _index(case: SearchSpec, name: str, room: float, memory: float) -> IndexEstimate:
    size = index_bytes(case, name)
    return IndexEstimate(
        name=name,
        parts=PARTS[name](case),
        num_bytes=size,
        least_devices=least_devices(size, room),
        least_bare=least_devices(size, memory),
        read_bytes=read_bytes(case, name),
        fewer=with_fewer_devices(case, name, room),
    )


def _planned(case: SearchSpec, batch: int, num_devices: int, options: dict[str, Any]) -> PlannedBatch:
    tiling, blocks = Tiling.of(case.num_vectors, num_devices), Blocks.of(batch, num_devices)
    k = min(case.k, tiling.capacity)
    arguments = exact_arguments(tiling, blocks, case.dim, DTYPES[case.dtype], case.metric)
    most = num_devices * k * (4 + 4.0)
    try:
        made = plan(exact_search(case.metric, k, at_once=blocks.at_once), *arguments, **options)
    except BudgetError as error:
        return PlannedBatch(
            batch=batch, plan=None, refused=str(error), corpus_ways=0, queries_ways=0, sent_bytes=0.0, most_bytes=most
        )
    sent = sum(sent_bytes(use.kind, use.bytes_per_step, made.mesh.sizes(use.axes)) for use in made.collectives)
    queries, vectors = made.inputs[:2]
    return PlannedBatch(
        batch=batch,
        plan=made,
        refused="",
        corpus_ways=_ways(made, vectors),
        queries_ways=_ways(made, queries),
        sent_bytes=sent / blocks.capacity,
        most_bytes=most,
    )


def _ways(made: Plan, tensor: TensorPlan) -> int:
    """The number of shards of a tensor."""
    return made.mesh.sizes(tuple(axis for axes in tensor.sharding.dims for axis in axes))
