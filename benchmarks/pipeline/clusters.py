"""Plan pipeline stages for published models and clusters, against intra-operator and inter-operator parallelism alone.

The settings are those of Narayanan et al. 2021 and of Alpa (Zheng et al. 2022): GPTs of 2.6 to 39 billion parameters on
1 to 8 hosts of 8 V100-16GB, NVLink inside a host and 25 Gb/s between hosts, batches of 1,024 sequences of 1,024 tokens,
a vocabulary of 51,200, fp16 with an fp32 master copy.

The model is `benchmarks/zoo/gpt.py`, with separate embedding and head. Layers are the blocks; the equations before and
after them are clustered with them. A plan may fill 90 % of a device's memory, as in Alpa, less a margin of 5 % for
prediction errors. The search covers all submeshes with a power of two of devices, the schedules 1F1B, ZB-H1 and
interleaved 1F1B, and numbers of microbatches that divide the batch; each stage may hold more or less of its state and
of its activations. No devices are used and nothing is compiled: times are predictions, at the rates of the profile
`v100-sxm-16`.

The plan is that of `plan_stages`, which `parallelize(stages="auto")` calls. Stages are found by prices of single layers
and pairs. Then each stage is planned as a program of its own; if one needs more memory than its price predicted, the
search looks for stages that need less. `step_s` and `peak_gb`, of the fullest device, are those of the planned stages.
*intra-op only* is one stage on all devices, priced as one program; *inter-op only* has every stage on one device. Both
have the same layers and memory options, and a search of their own for the number of microbatches; both are prices.
The columns of schedules have the fastest step under each, with stages of its own, for the numbers of microbatches that the
plan's search tried. PFLOPS count the model's matmuls once, without rematerialization. The search time runs from the traced step to the
planned stages; the tracing time is `trace_s`. `cpu_s` is the CPU time of the search on one core, without that of other
processes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.hardware.profile import HardwareProfile, LinkProfile, load
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.schedule.table import SCHEDULES
from autopar.pipeline.schedule.token_slices import TERAPIPE
from autopar.pipeline.search.microbatch_search import SearchOf, Tried, over_microbatches
from autopar.pipeline.search.plan_stages import likely_numbers, plan_stages, searches_of
from autopar.pipeline.search.request import StageRequest
from autopar.pipeline.search.searches_by_microbatches import Searches
from autopar.pipeline.search.stage_search import StageSearch
from autopar.transforms.program import program_of
from benchmarks.zoo.gpt import GptSizes, gpt


def v100() -> HardwareProfile:
    """A V100 of a host with 25 Gb/s, which its eight devices share."""
    profile = load("v100-sxm-16")
    network = LinkProfile(25e9 / 8 / 8, profile.network_link.latency_s)
    return replace(profile, network_link=network, usable_fraction=0.9)


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its cluster."""

    name: str
    sizes: GptSizes
    num_hosts: int


def _case(name: str, hidden: int, layers: int, heads: int, hosts: int) -> Case:
    return Case(name, GptSizes(hidden, layers, heads, 51_200, 1024, 1024), hosts)


CASES = (
    _case("2.6B", 2560, 32, 32, 1),
    _case("6.7B", 4096, 32, 32, 2),
    _case("15B", 5120, 48, 40, 4),
    _case("39B", 8192, 48, 64, 8),
)


def request_of(case: Case) -> StageRequest:
    """The request of a user who names the cluster."""
    profile = v100()
    cluster = Cluster((DeviceGroup(profile.name, case.num_hosts, profile.devices_per_host),))
    return StageRequest(cluster=cluster, profiles={profile.name: profile})


def measure() -> list[dict[str, Any]]:
    """A row for each model."""
    return [row(case) for case in CASES]


def row(case: Case) -> dict[str, Any]:
    """One model."""
    started = time.perf_counter()
    step, args = gpt(case.sizes).target
    program = program_of(step, args, carry=None, donate=None)
    traced, used = time.perf_counter(), time.process_time()
    request = request_of(case)
    plan = plan_stages(program, request)
    seconds, cpu = time.perf_counter() - traced, time.process_time() - used
    searches = searches_of(Cuttable.of(program), request)
    others = {name: tried[0] for name, tried in _others(searches, request, plan.num_microbatches).items()}
    numbers = sorted({one.num_microbatches for one in plan.tried})
    # One stage runs as one program, not in pieces as its plan has it.
    step_s = plan.prediction.step_time_s if len(plan.stages) > 1 else others["intra-op only"].step_time_s
    return {
        "model": case.name,
        "parameters_b": case.sizes.num_parameters / 1e9,
        "devices": f"{case.num_hosts} x 8",
        "stages": _stages(plan),
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule,
        "step_s": step_s,
        "peak_gb": max(plan.prediction.stage_bytes) / 1e9,
        "pflops": case.sizes.model_flops / step_s / 1e15,
        **{name: _told(other) for name, other in others.items()},
        "ahead of both": _ahead(min(other.step_time_s for other in others.values()) / step_s),
        "tried": ", ".join(str(number) for number in dict.fromkeys(one.num_microbatches for one in plan.tried)),
        "trace_s": traced - started,
        "search_s": seconds,
        "cpu_s": cpu,
        "planned": plan.outcome.num_planned,
        "outcome": plan.outcome.status.split(",")[0],
        **{kind.name: _under(kind, searches, numbers) for kind in SCHEDULES.values() if kind.backward != "none"},
    }


def _under(kind: ScheduleKind, searches: Searches, numbers: Sequence[int]) -> str:
    """The fastest step under one schedule, in stages of its own."""
    if kind is TERAPIPE:
        return "see token_slices"
    tried = [Tried(number, searches.search(number).outcome((kind,))) for number in numbers]
    return _told(min(tried, key=lambda one: one.step_time_s))


def _others(searches: Searches, request: StageRequest, start: int) -> dict[str, tuple[Tried, ...]]:
    """Each kind of parallelism alone, with its own number of microbatches."""
    numbers, _ = likely_numbers(searches.cuttable, request.cluster)
    return {
        "intra-op only": over_microbatches(_on_all(searches), numbers, start, StageSearch.one_stage),
        "inter-op only": over_microbatches(_on_all(searches), numbers, start, StageSearch.one_device_each),
    }


def _on_all(searches: Searches) -> SearchOf:
    return lambda number, _: searches.search(number)


def _ahead(ratio: float) -> str:
    return "nothing else fits" if math.isinf(ratio) else f"{ratio:.2f}x"


def _stages(plan: PipelinePlan) -> str:
    """Layers and devices of the stages, in order."""
    runs = [
        (
            stage.last_layer - stage.first_layer + 1,
            f"{stage.submesh.shape.num_hosts}x{stage.submesh.shape.devices_per_host}",
        )
        for stage in plan.stages
    ]
    groups = []
    for shape, group in itertools.groupby(runs, key=lambda run: run[1]):
        groups.append(f"{'+'.join(str(layers) for layers, _ in group)} on {shape}")
    return "; ".join(groups)


def _told(tried: Tried) -> str:
    if tried.outcome.step is None:
        return "does not fit"
    return f"{tried.step_time_s:.2f} s, {tried.num_microbatches} microbatches"
