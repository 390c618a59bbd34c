"""Stages on paper for published models and clusters (Narayanan et al. 2021; Zheng et al. 2022, Alpa): GPTs of 2.6 to
39 billion parameters on 1 to 8 hosts of 8 V100-16GB, NVLink inside a host and 25 Gb/s between hosts, batches of 1,024
sequences of 1,024 tokens, a vocabulary of 51,200, fp16 with an fp32 master copy.

The model is `benchmarks/zoo/gpt.py`: its table of words and its head are two. Layers are the blocks, with what is before
and after them clustered beside them. A device may hold 90 % of its memory, as Alpa's workers are told, less a margin of
5 % for what a prediction leaves out. All submeshes are looked at whose devices are a power of two, schedules 1F1B,
ZB-H1 and interleaved 1F1B, and numbers of microbatches that divide the batch; each stage may hold more or less of its
state and of what its backward pass reads. No device is there and nothing is compiled: times are predictions, at the
rates of the profile `v100-sxm-16`.

*intra-op only* is one stage on all devices, planned as one program; *inter-op only* has every stage on one device; both
with the same layers, options of memory, and search of the number of microbatches. *As planned* is the step with each of
its stages planned as a program by itself, where the search adds up prices of single layers and pairs; `peak_gb` is what
the fullest device then holds, of the 14.5 GB that it may. PFLOPS count the
products of the model once, whatever is computed again. Seconds of the search begin with the traced step; of tracing it
is `trace_s`. `cpu_s` is what the search takes of one core: on a busy machine the difference is others'.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost.hardware import HardwareProfile, LinkProfile, load
from autopar.pipeline.cluster import Cluster, DeviceGroup
from autopar.pipeline.clustering import Clustering, cluster_layers
from autopar.pipeline.cutting import Cuttable
from autopar.pipeline.microbatch_search import Tried, divisors, over_microbatches
from autopar.pipeline.search import StagedStep, StageSearch
from autopar.pipeline.searches import Searches
from autopar.program import Program, program_of
from benchmarks.zoo.gpt import GptSizes, gpt

#: Of the memory that a device may hold, what stays free.
_MARGIN = 0.05
_MOST_LAYERS = 64
#: Seconds that the search of one schedule's partition may take.
_SEARCH_LIMIT_S = 100.0


def v100() -> HardwareProfile:
    """A V100 of a host with 25 Gb/s, which its eight devices share."""
    profile = load("v100-sxm-16")
    network = LinkProfile(25e9 / 8 / 8, profile.network_link.latency_s)
    return replace(profile, network_link=network, usable_fraction=0.9)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on its cluster."""

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


def searches_of(case: Case, cuttable: Cuttable, clusters: Clustering) -> Searches:
    """The searches of one model; prices of a number of microbatches are shared by them."""
    profile = v100()
    cluster = Cluster((DeviceGroup(profile.name, case.num_hosts, profile.devices_per_host),))
    budget_bytes = {profile.name: (1 - _MARGIN) * profile.usable_bytes}
    return Searches(cuttable, clusters, cluster, {profile.name: profile}, budget_bytes, _SEARCH_LIMIT_S)


def as_planned(searches: Searches, number: int, step: StagedStep) -> StagedStep:
    """The step with its stages planned."""
    if len(step.stages) == 1:
        return step
    search, costs = searches.search(number), searches.costs[number]
    planned = [costs.planned(stage.first, stage.last, stage.submesh.shape).cost for stage in step.stages]
    return search.with_costs(step, planned)


def measure() -> list[dict[str, Any]]:
    """A row for each model."""
    return [row(case) for case in CASES]


def row(case: Case) -> dict[str, Any]:
    """One model."""
    started = time.perf_counter()
    step, args = gpt(case.sizes).target
    program = program_of(step, args, carry=None, donate=None)
    traced, used = time.perf_counter(), time.process_time()
    cuttable = Cuttable.of(program)
    chain = cuttable.chain
    clusters = cluster_layers(chain.flops, [0.0, *chain.cut_bytes], most_layers=_MOST_LAYERS)
    searching = searches_of(case, cuttable, clusters)
    numbers = divisors(case.sizes.batch)
    start = case.sizes.batch // (2 if _is_short(program, searching) else 8)
    found = over_microbatches(searching.search, numbers, start)
    seconds, cpu = time.perf_counter() - traced, time.process_time() - used
    planned = searching.num_planned
    others = {
        "intra-op only": over_microbatches(
            lambda number, _: searching.search(number), numbers, start, StageSearch.one_stage
        ),
        "inter-op only": over_microbatches(
            lambda number, _: searching.search(number),
            numbers,
            start,
            lambda search: search.one_device_each(("1f1b", "zb-h1")),
        ),
    }
    best = found[0]
    told = {name: _told(tried[0]) for name, tried in others.items()}
    ahead = min((tried[0].step_time_s for tried in others.values()), default=math.inf) / best.step_time_s
    ours = best.outcome.step
    flops = case.sizes.model_flops
    checked = None if ours is None else as_planned(searching, best.num_microbatches, ours)
    return {
        "model": case.name,
        "parameters_b": case.sizes.num_parameters / 1e9,
        "devices": f"{case.num_hosts} x 8",
        "stages": _stages(ours),
        "microbatches": best.num_microbatches,
        "schedule": "" if ours is None else ours.schedule.name,
        "step_s": best.step_time_s,
        "as_planned_s": None if checked is None else checked.step_time_s,
        "peak_gb": None if checked is None else max(checked.peak_bytes) / 1e9,
        "pflops": flops / best.step_time_s / 1e15,
        **told,
        "ahead of both": "nothing else fits" if math.isinf(ahead) else f"{ahead:.2f}x",
        "tried": ", ".join(f"{tried.num_microbatches}" for tried in found),
        "trace_s": traced - started,
        "search_s": seconds,
        "cpu_s": cpu,
        "planned": planned,
        "outcome": "" if ours is None else ours.partition.status.value.split(",")[0],
    }


def _is_short(program: Program, searching: Searches) -> bool:
    """Whether the state alone takes half of all memory: then microbatches must be small."""
    graph = program.graph
    state = sum(graph.values[graph.inputs[position]].num_bytes for position, _ in graph.carried)
    return state > 0.5 * searching.cluster.num_devices * v100().usable_bytes


def _stages(step: StagedStep | None) -> str:
    """Layers times devices of the stages that follow one another."""
    if step is None:
        return "does not fit"
    runs = [
        (stage.last - stage.first + 1, f"{stage.submesh.shape.num_hosts}x{stage.submesh.shape.devices_per_host}")
        for stage in step.stages
    ]
    told = []
    for shape, group in itertools.groupby(runs, key=lambda run: run[1]):
        told.append(f"{'+'.join(str(layers) for layers, _ in group)} on {shape}")
    return "; ".join(told)


def _told(tried: Tried) -> str:
    if tried.outcome.step is None:
        return "does not fit"
    return f"{tried.step_time_s:.2f} s, {tried.num_microbatches} microbatches"
