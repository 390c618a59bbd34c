"""An exact search planned for devices that need not be there, and what the other kinds would take: nothing is allocated.

In: `PaperSearch` and the devices. Out: `SearchOnPaper`: the plan of the search that `build` would make for so many
vectors, the same for other batches, and sizes. The program planned is the exact index's own, of abstract arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.api.make_plan import plan
from autopar.cost.hardware_profile import HardwareProfile
from autopar.errors import BudgetError, SearchError
from autopar.planner.memory_budget import MemoryBudget
from autopar.planner.request import Progress, requested_meshes, requested_profile
from autopar.plans.plan import Plan
from autopar.plans.records import TensorPlan
from autopar.vector_search.data.inputs import DTYPES
from autopar.vector_search.estimate.sizes import (
    PARTS,
    FewerDevices,
    NodesInBlocks,
    PaperSearch,
    Part,
    index_bytes,
    least_devices,
    nodes_in_blocks,
    read_bytes,
    with_fewer_devices,
)
from autopar.vector_search.kernels.exact_top_k import exact_arguments, exact_search
from autopar.vector_search.kernels.tiling import Blocks, Tiling
from autopar.verification.figures import sent_bytes

#: Batches shown beside the one asked for: how the layout changes with it.
_OTHER_BATCHES = (1, 100, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """One number of queries.

    Args:
        plan: None where nothing fits, and `refused` says why.
        corpus_ways, queries_ways: into how many parts the plan splits each; 1: every device has all.
        sent_bytes: that one device sends for one query. most_bytes: of k candidates from each device, a value and a
            position each, which is what a merge at one device would have to get.
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
class IndexOnPaper:
    """One kind of index.

    Args:
        num_bytes: of all parts. least_devices: that hold them in what a plan may fill; `least_bare`: in all their memory.
        read_bytes: that one query alone reads of it.
        fewer: on fewer devices than that, what stays on disk.
    """

    name: str
    parts: tuple[Part, ...]
    num_bytes: int
    least_devices: int
    least_bare: int
    read_bytes: float
    fewer: tuple[FewerDevices, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOnPaper:
    """What there is to say. `asked` is one of `batches`; `room_bytes` is what a plan may fill of a device."""

    case: PaperSearch
    profile: HardwareProfile
    num_devices: int
    room_bytes: float
    asked: PlannedBatch
    batches: tuple[PlannedBatch, ...]
    indexes: tuple[IndexOnPaper, ...]
    blocks: NodesInBlocks


def search_on_paper(
    case: PaperSearch,
    *,
    indexes: Sequence[str] = tuple(PARTS),
    progress: Progress | None = None,
    **options: Any,
) -> SearchOnPaper:
    """Plan the exact search, and size the indexes.

    Args:
        indexes: of `PARTS`, those to tell of.
        options: of `autopar.plan`: mesh or num_devices, hardware, memory_budget_bytes, pin, time_limit_s, cache.

    Raises:
        SearchError: an index that is not known.
        AutoparError: of planning; a search that fits no device is no error, but told.
    """
    for name in indexes:
        if name not in PARTS:
            raise SearchError(f"`index` is {name!r}: on paper there are {', '.join(PARTS)}")
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
    return SearchOnPaper(
        case=case,
        profile=profile,
        num_devices=num_devices,
        room_bytes=room,
        asked=batches[numbers.index(case.batch)],
        batches=tuple(batches),
        indexes=tuple(_index(case, name, room, profile.hbm_bytes) for name in indexes),
        blocks=nodes_in_blocks(case),
    )


def _index(case: PaperSearch, name: str, room: float, memory: float) -> IndexOnPaper:
    size = index_bytes(case, name)
    return IndexOnPaper(
        name=name,
        parts=PARTS[name](case),
        num_bytes=size,
        least_devices=least_devices(size, room),
        least_bare=least_devices(size, memory),
        read_bytes=read_bytes(case, name),
        fewer=with_fewer_devices(case, name, room),
    )


def _planned(case: PaperSearch, batch: int, num_devices: int, options: dict[str, Any]) -> PlannedBatch:
    tiling, blocks = Tiling.of(case.num_vectors, num_devices), Blocks.of(batch, num_devices)
    k = min(case.k, tiling.places)
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
        sent_bytes=sent / blocks.places,
        most_bytes=most,
    )


def _ways(made: Plan, tensor: TensorPlan) -> int:
    """Into how many parts it is split."""
    return made.mesh.sizes(tuple(axis for axes in tensor.sharding.dims for axis in axes))
