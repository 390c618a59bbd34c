"""Simulate TeraPipe beside GPipe: GPT-3 175B on 48 hosts of 8 V100s, as in Li et al. (2021, table 1, setting 10).

A host is a stage of two of the 96 layers, with tensor parallelism inside; a step has two sequences of 2,048 tokens, each a
microbatch. Slices of tokens are priced by plans of a middle stage with its tokens in 1, 2, 4 and 8 equal slices; the
dynamic programme chooses among 32 ends of slices. Both schedules are simulated with the same prices and transfers.

*Speedup* is GPipe's step over TeraPipe's. *Without overhead* is what it would be if a slice took its share of the
tokens' time: (m + K - 1) / (m + (K - 1) / n) for m microbatches, K stages and n slices. *Slices' overhead* is the time of all
slices over that of whole sequences: shorter matmuls, more kernels and all-reduces, less the columns that a causal
slice leaves out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from autopar.hardware.profile import load
from autopar.ir.mesh import MeshShape
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.partition.token_slices import best_slices
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import Task
from autopar.pipeline.schedule.token_slices import terapipe
from autopar.pipeline.search.request import StageRequest
from autopar.pipeline.search.token_slice_search import fitted, samples_of
from autopar.pipeline.search.transfer_prices import sent_s
from autopar.transforms.program import program_of
from benchmarks.zoo.gpt import GptSizes, gpt

_PROFILE = "v100-sxm-16"
_HIDDEN, _HEADS, _TOKENS, _LAYERS = 12_288, 96, 2048, 96
_STAGES, _DEVICES, _MICROBATCHES, _MOST_ENDS = 48, 8, 2, 32
#: The stages of the model that is planned; the middle one has two layers, as each of the 48.
_PLANNED = 3

#: Megatron's tensor parallelism, for parameters, master copies and moments.
_MEGATRON = {
    "state/*/qkv/kernel": PartitionSpec(None, "tp"),
    "state/*/out/kernel": PartitionSpec("tp", None),
    "state/*/up/kernel": PartitionSpec(None, "tp"),
    "state/*/down/kernel": PartitionSpec("tp", None),
}


def measure() -> list[dict[str, Any]]:
    """The row of GPT-3 175B."""
    of_stage = _LAYERS // _STAGES
    sizes = GptSizes(_HIDDEN, _PLANNED * of_stage, _HEADS, 64, _TOKENS, _MICROBATCHES)
    step, args = gpt(sizes).target
    program = program_of(step, args, carry=None, donate=None)
    group = DeviceGroup(_PROFILE, _PLANNED, _DEVICES)
    profiles = {_PROFILE: load(_PROFILE)}
    cluster = Cluster((group,))
    request = StageRequest(
        cluster=cluster,
        profiles=profiles,
        stages=_PLANNED,
        num_microbatches=_MICROBATCHES,
        mesh=MeshShape(("tp",), (_DEVICES,)),
        pins=_MEGATRON,
    )
    samples = list(samples_of(program, request, _TOKENS, _PLANNED, _MICROBATCHES))
    ends = [_TOKENS * n // _MOST_ENDS for n in range(_MOST_ENDS + 1)]
    both = {
        phase: fitted([(start, stop, seconds[i]) for start, stop, seconds in samples], ends)
        for i, phase in enumerate(("forward", "backward"))
    }
    whole = both["forward"] + both["backward"]
    found = best_slices({1: whole}, _MICROBATCHES, _STAGES)
    assert found is not None
    slices = list(itertools.pairwise([0, *found.microbatches[0][1]]))
    lengths = tuple(ends[stop] - ends[start] for start, stop in slices)
    host = SubmeshShape(_PROFILE, 1, _DEVICES)

    def step_s(parts: list[tuple[int, int]], schedule: Any) -> float:
        def seconds(task: Task) -> float:
            if task.phase == "update":
                return 0.0
            start, stop = parts[task.microbatch % len(parts)]
            return float(both[task.phase][start, stop])

        def transfer_s(source: Task, target: Task) -> float:
            start, stop = parts[source.microbatch % len(parts)]
            num_bytes = 2.0 * _HIDDEN * (ends[stop] - ends[start])
            return sent_s(num_bytes, host, host, False, cluster, profiles)

        return simulate(build(schedule, _STAGES, _MICROBATCHES), seconds, transfer_s).makespan_s

    gpipe = step_s([(0, _MOST_ENDS)], "gpipe")
    sliced = step_s(slices, terapipe(lengths))
    all_slices = sum(float(whole[pair]) for pair in slices)
    m, k, n = _MICROBATCHES, _STAGES, len(slices)
    return [
        {
            "model": "GPT-3 175B",
            "devices": f"{_STAGES} x {_DEVICES} V100",
            "slices": _runs(lengths),
            "gpipe_s": gpipe,
            "terapipe_s": sliced,
            "speedup": gpipe / sliced,
            "without overhead": (m + k - 1) / (m + (k - 1) / n),
            "slices' overhead": all_slices / float(whole[0, _MOST_ENDS]),
        }
    ]


def _runs(lengths: tuple[int, ...]) -> str:
    """Lengths as text, equal neighbours together."""
    groups: Mapping[int, tuple[int, int]] = {
        i: (length, len(list(run))) for i, (length, run) in enumerate(itertools.groupby(lengths))
    }
    return ", ".join(f"{count} x {length}" if count > 1 else str(length) for length, count in groups.values())
