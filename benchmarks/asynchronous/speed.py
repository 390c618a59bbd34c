"""Simulate every asynchronous rule on published models and clusters, against GPipe and 1F1B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.partition.cluster import submeshes_of
from autopar.pipeline.partition.sends import edges_between
from autopar.pipeline.partition.step_time import staged_timeline
from autopar.pipeline.partition.streamed_time import streamed_time
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.schedule.one_forward_one_backward import ONE_F_ONE_B
from autopar.pipeline.schedule.sequential import GPIPE
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import chain_with
from autopar.pipeline.search.plan_stages import searches_of
from autopar.pipeline.search.searches_by_microbatches import Searches
from autopar.pipeline.search.stage_search import StagedStep
from autopar.transforms.program import program_of
from benchmarks.pipeline.clusters import CASES, Case, request_of
from benchmarks.zoo.gpt import gpt

Row = dict[str, Any]

NUMBERS = (128, 256, 512)
#: Seconds in which no step is: with a limit, stages are searched on several submeshes only.
_LIMIT_S = 1e9


def rows() -> list[Row]:
    """A row for each model."""
    return [row(case) for case in CASES]


def row(case: Case) -> Row:
    """The fastest step of each schedule in stages of its own, and steps of few microbatches in the stages of 1F1B."""
    step, args = gpt(case.sizes).target
    request = request_of(case)
    searches = searches_of(Cuttable.of(program_of(step, args, carry=None, donate=None)), request)
    best = {kind.name: _fastest(searches, kind) for kind in (GPIPE, ONE_F_ONE_B, *ASYNCHRONOUS.values())}
    usual = best["1f1b"]
    assert usual is not None, "1F1B fits on all of these clusters"
    seconds = {name: found.step_time_s for name, found in best.items() if found is not None}
    fastest = min(seconds[name] for name in ASYNCHRONOUS if name in seconds)
    p = len(usual.stages)
    few = {m: {kind.name: _in_stages(usual, kind, m) for kind in (GPIPE, ONE_F_ONE_B)} for m in (1, p)}
    streamed = {m: _in_stages(usual, ASYNCHRONOUS["pipedream"], m) for m in few}
    return {
        "model": case.name,
        "devices": f"{case.num_hosts} x 8",
        **{name: _told(found) for name, found in best.items()},
        "over gpipe": f"{seconds['gpipe'] / fastest:.2f}x" if "gpipe" in seconds else "",
        "over 1f1b": f"{seconds['1f1b'] / fastest:.2f}x",
        "m = p over gpipe": f"{few[p]['gpipe'] / streamed[p]:.2f}x",
        "m = p over 1f1b": f"{few[p]['1f1b'] / streamed[p]:.2f}x",
        "m = 1 over 1f1b": f"{few[1]['1f1b'] / streamed[1]:.2f}x",
    }


def _fastest(searches: Searches, kind: ScheduleKind) -> StagedStep | None:
    found = [replace(searches.search(number), limit_s=_LIMIT_S).outcome((kind,)).step for number in NUMBERS]
    return min((step for step in found if step is not None), key=lambda step: step.step_time_s, default=None)


def _in_stages(step: StagedStep, kind: ScheduleKind, num_microbatches: int) -> float:
    """Seconds of a step, after filling where batches stream, with microbatches of the same size in the same stages."""
    costs, submeshes, p = step.costs, submeshes_of(step.stages), len(step.stages)
    edges = chain_with(p, edges_between(step.sends))
    if kind.is_asynchronous:
        return streamed_time(kind, num_microbatches, edges, costs, step.sends, submeshes).step_s
    schedule = build(kind, p, num_microbatches, edges=edges)
    return staged_timeline(schedule, costs, step.sends, submeshes).makespan_s


def _told(step: StagedStep | None) -> str:
    if step is None:
        return "does not fit"
    per_update = step.schedule.num_microbatches
    return f"{step.step_time_s:.2f} s, {len(step.stages)} stages, {per_update} microbatches, {max(step.peak_bytes) / 1e9:.1f} GB"
