"""Explain a pipeline plan in text, tables and a timeline, from the `PipelinePlan` alone.

In: a plan, fresh or from a file. Out: `explain_stages(plan)`, a `StagesExplanation` that prints as plain text and has
the timeline; `render_stages(plan, console)` for a terminal; `stages_json(plan)` for other programs. Each stage has its
own plan, which is explained like any other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from autopar.pipeline.draw.file import write_timelines
from autopar.pipeline.draw.text import timeline_text
from autopar.pipeline.partition.sends import Send
from autopar.pipeline.plan import PipelinePlan, StagePlan, WeightVersions
from autopar.pipeline.schedule import dag as any_edges
from autopar.pipeline.schedule.table import KINDS
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.report.breakdown import efficiency_text, replicated_text
from autopar.report.considered import considered_json, considered_section
from autopar.report.explain_program import Explanation, explain_program
from autopar.report.submeshes import SubmeshUse, submesh_uses
from autopar.system.text_tables import (
    TEXT_WIDTH,
    bars,
    facts_table,
    finite,
    inset,
    new_table,
    notes_section,
    plain_text,
    section,
    share_text,
)
from autopar.system.units import human_bytes, human_seconds

#: The most alternatives that are shown; the JSON has all.
MAX_TRIED = 8
#: Sends of a step below this are left out: step counters, keys, norms.
_SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True, repr=False)
class StagesExplanation:
    """An explanation of a pipeline plan as values, which every report reads. It prints as plain text.

    Args:
        timeline: the simulated timeline of a step.
        submeshes: the use of each submesh in that step.
        stages: the explanation of each stage's plan.
    """

    plan: PipelinePlan
    timeline: PipelineTimeline
    submeshes: tuple[SubmeshUse, ...]
    stages: tuple[Explanation, ...]

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as a picture, or as a trace for Perfetto if the path ends in `.json`.

        Raises:
            PlotError: the file cannot be written.
        """
        write_timelines(path, self.timeline)

    @property
    def summary(self) -> str:
        """The report without the timeline and the rejected alternatives."""
        return plain_text(lambda console: render_stages_summary(self.plan, console))

    @property
    def shown_s(self) -> float:
        """Seconds of the timeline: of a step, or of the first batches of a stream."""
        return self.timeline.makespan_s if self.plan.weight_versions else self.plan.prediction.step_time_s

    def __str__(self) -> str:
        return plain_text(lambda console: _print(self, console))

    __repr__ = __str__


def explain_stages(plan: PipelinePlan) -> StagesExplanation:
    """Explain a pipeline plan: `print(explain_stages(plan))`."""
    timeline = plan.shown_timeline()
    stages = tuple(explain_program(stage.plan) for stage in plan.stages)
    return StagesExplanation(plan, timeline, submesh_uses(plan, timeline), stages)


def render_stages(plan: PipelinePlan, console: Console) -> None:
    """Print the explanation to a console, with styles if it supports them."""
    _print(explain_stages(plan), console)


def render_stages_summary(plan: PipelinePlan, console: Console) -> None:
    """Print the explanation without the timeline and the alternatives that were tried."""
    considered = considered_section(plan.considered)
    console.print(Group(*_head(plan), *_totals(plan), *_stages(plan), *considered, *notes_section(plan.notes)))


def stages_json(plan: PipelinePlan) -> dict[str, Any]:
    """The explanation as JSON types: seconds and bytes as numbers, infinite ones as null."""
    timeline = plan.shown_timeline()
    document = {
        "format": "autopar-stages-explanation",
        "version": 2,
        "program": plan.program.name,
        "cluster": [asdict(group) for group in plan.cluster.groups],
        "strategy": plan.strategy,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "efficiency": asdict(plan.efficiency) if plan.efficiency else None,
        "memory_budget_bytes": plan.memory_budget_bytes,
        "prediction": asdict(plan.prediction) | {"peak_bytes": plan.prediction.peak_bytes},
        "outcome": asdict(plan.outcome),
        "stages": [_stage_json(stage) for stage in plan.stages],
        "sends": [asdict(one) for one in plan.sends],
        "side_by_side": plan.side_by_side(),
        "weight_versions": [asdict(one) for one in plan.weight_versions],
        "timeline": timeline.rows(),
        "submeshes": [asdict(use) | {"peak_bytes": use.peak_bytes} for use in submesh_uses(plan, timeline)],
        "tried": [asdict(other) for other in plan.tried],
        "considered": considered_json(plan.considered),
        "notes": plan.notes,
        "versions": plan.versions,
    }
    return finite(document)


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    return {
        "layers": [stage.first_layer, stage.last_layer],
        "devices": [stage.devices.start, stage.devices.stop - 1],
        "replicas": [[one.devices.start, one.devices.stop - 1] for one in stage.replicas],
        "hardware": stage.submesh.shape.kind,
        "mesh": stage.plan.mesh.size_of,
        "strategy": stage.plan.strategy,
        "cost": asdict(stage.cost),
    }


def _print(explained: StagesExplanation, console: Console) -> None:
    plan = explained.plan
    console.print(Group(*_head(plan), *_totals(plan), *_stages(plan)))
    of = "a stream of batches" if plan.weight_versions else "a step"
    console.print(Text(f"Timeline of {of}, simulated", "bold"), Text())
    console.print(inset(timeline_text(explained.timeline, width=min(console.width, TEXT_WIDTH) - 4)), Text())
    console.print(Group(*_tried(plan), *notes_section(plan.notes)))


def _head(plan: PipelinePlan) -> list[RenderableType]:
    outcome = plan.outcome
    sure = f"stages {outcome.status}" if outcome.gap <= 1e-6 else f"stages within {100 * outcome.gap:.2g} % of the best"
    if not outcome.gap < 1:  # the lower bound is 0
        sure = f"not bounded; {outcome.status}"
    among = f" among {outcome.among}" if outcome.among and len(plan.stages) > 1 else ""
    searched = f"{outcome.num_layers} layers, {outcome.num_planned} runs of layers planned"
    descriptions = {**any_edges.DESCRIPTIONS, **{name: kind.description for name, kind in KINDS.items()}}
    own = plan.own_schedule
    description = descriptions.get(plan.schedule, "") if own is None else own.description
    took = "" if outcome.search_time_s is None else f", {human_seconds(outcome.search_time_s)}"
    facts = [
        ("Strategy", plan.strategy),
        *(("Replicated", text) for text in stages_replicated(plan)),
        ("Certainty", f"{sure}{among}, by the costs of planned layers ({searched}{took})"),
        ("Schedule", f"{plan.schedule}: {description}" if description else plan.schedule),
    ]
    if branches := plan.side_by_side():
        facts.append(("In parallel", "; ".join(f"stages {_branches(fork)}" for fork in branches)))
    if any(stage.replicas for stage in plan.stages):
        facts.append(("Replicas", _replicas_text(plan)))
    if plan.weight_versions:
        facts.append(("Versions", versions_text(plan.weight_versions)))
    if plan.own_statistics:
        text = "each microbatch has its own batch statistics, which changes the step slightly"
        facts.append(("Statistics", text))
    count = f"{len(plan.stages)} stages" if len(plan.stages) > 1 else "one stage"
    where = f"{plan.cluster.num_devices} devices ({plan.cluster})"
    return [Text(f"Plan of `{plan.program.name}` in {count} for {where}", "bold"), Text(), facts_table(facts), Text()]


def _replicas_text(plan: PipelinePlan) -> str:
    """What each stage's replicas hold and exchange."""
    count = max(len(stage.places) for stage in plan.stages)
    sends = [one for one in plan.sends if one.source == one.target]
    held = "two submeshes" if count == 2 else f"{count} submeshes"
    text = f"each stage is on {held} with equal state, for some of the microbatches each; their gradients are exchanged once"
    if not sends:
        return text
    slowest = max(sends, key=lambda one: one.seconds)
    return f"{text} a step, at most {human_bytes(slowest.num_bytes)} in {human_seconds(slowest.seconds)}"


def versions_text(kept: Sequence[WeightVersions]) -> str:
    """The versions of its weights that each stage keeps, and the delay of its gradients, in an asynchronous schedule."""
    delays = [range_text(one.least_delay, one.most_delay) for one in kept]
    sizes = ", ".join(human_bytes(one.kept_bytes) for one in kept)
    text = (
        f"by stage, {', '.join(str(one.copies) for one in kept)} copies of the weights, together {sizes} per device; gradients are"
        f" {', '.join(delays)} updates late"
    )
    if not any(one.velocity_bytes for one in kept):
        return text
    velocities, moved = (
        ", ".join(human_bytes(size) for size in sizes)
        for sizes in ([one.velocity_bytes for one in kept], [one.corrected_bytes for one in kept])
    )
    return f"{text}; velocities of the weights take {velocities}, and weights corrected for backward passes {moved}"


def stages_replicated(plan: PipelinePlan) -> list[str]:
    """The operations of each stage that run replicated because they have no sharding rule; stages with equal texts
    share a line."""
    stages_of: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        if text := replicated_text(stage.plan):
            stages_of.setdefault(text.replace("of the step", "of its program"), []).append(number)
    return [
        f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {text}" for text, numbers in stages_of.items()
    ]


def _totals(plan: PipelinePlan) -> list[RenderableType]:
    prediction, budget = plan.prediction, plan.memory_budget_bytes
    of = f"of {human_bytes(budget)} ({share_text(prediction.peak_bytes, budget)})" if budget else ""
    bubble_s = prediction.bubble_fraction * prediction.step_time_s
    parts = [("busy", prediction.step_time_s - bubble_s), ("bubble", bubble_s)]
    memory = [(f"submesh {i}", size) for i, size in enumerate(prediction.stage_bytes)]
    return [
        Text(f"Predicted step time: {human_seconds(prediction.step_time_s)}", "bold"),
        inset(bars(parts, prediction.step_time_s, human_seconds)),
        *([Text(efficiency)] if (efficiency := efficiency_text(plan)) else []),
        Text(),
        Text(f"Predicted peak memory per device: {human_bytes(prediction.peak_bytes)} {of}".rstrip(), "bold"),
        inset(bars(memory, prediction.peak_bytes, human_bytes)),
        Text(),
    ]


def _stages(plan: PipelinePlan) -> list[RenderableType]:
    split = any(stage.cost.weight_s for stage in plan.stages)
    numbers = ["forward", "input" if split else "backward", *(["weight"] if split else []), "update", "sends"]
    table = new_table("stage", "layers", "devices", *numbers, "mesh and strategy", right=numbers)
    for number, stage in enumerate(plan.stages):
        cost = stage.cost
        seconds = [cost.forward_s, cost.backward_s, *([cost.weight_s] if split else []), cost.update_s]
        sends = "\n".join(map(sent_text, sends_from(plan, number)))
        table.add_row(
            str(number),
            range_text(stage.first_layer, stage.last_layer),
            f"{devices_text(stage)}\n{stage.submesh.shape.kind}",
            *map(human_seconds, seconds),
            sends or "-",
            Text(f"{stage.plan.mesh.describe()}\n{stage.plan.strategy}" + _remat(stage)),
        )
    under = "seconds and `sends` of one microbatch; `update`, `at start`, `at end`: of a step"
    return section("Stages", table, under)


def _remat(stage: StagePlan) -> str:
    """The time of a stage's rematerialization. Values that are cheaper to recompute than to stash are always
    rematerialized."""
    seconds = sum(one.time_s for one in stage.plan.rematerialized)
    return f"\nrematerializes {human_seconds(seconds)} a microbatch" if seconds else ""


def sends_from(plan: PipelinePlan, stage: int) -> list[Send]:
    """What a stage sends to other submeshes, without small values that it sends once per step."""
    sends = (one for one in plan.sends if one.source == stage and one.num_bytes)
    return [one for one in sends if one.when == "microbatch" or one.num_bytes >= _SMALL_BYTES]


def sent_text(send: Send, between: str = "\n") -> str:
    """A transfer to another stage, or to other replicas of the stage: where to, bytes and seconds."""
    at = "" if send.when == "microbatch" else f" at {send.when}"
    to = "to its replica" if send.source == send.target else f"to {send.target}"
    return f"{to}{at}: {human_bytes(send.num_bytes)}{between}{human_seconds(send.seconds)}"


def _branches(fork: Sequence[Sequence[int]]) -> str:
    """The stages of each branch: `1 | 2, 3 | 4`."""
    return " | ".join(", ".join(map(str, stages)) for stages in fork)


def devices_text(stage: StagePlan) -> str:
    """The devices of a stage, replica by replica."""
    return " and ".join(range_text(one.devices.start, one.devices.stop - 1) for one in stage.places)


def range_text(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _tried(plan: PipelinePlan) -> list[RenderableType]:
    """The fastest alternatives that were tried; everything that was considered, where that is known."""
    tried = [one for one in plan.tried if not one.planned]
    if plan.considered or len(tried) < 2:
        return considered_section(plan.considered)
    numbers = ["microbatches", "predicted step", "peak memory"]
    table = new_table("schedule", "stages", *numbers, right=numbers)
    best = sorted(tried, key=lambda other: other.step_time_s)
    for other in best[:MAX_TRIED]:
        fits = math.isfinite(other.step_time_s)
        slower = other.step_time_s / plan.prediction.step_time_s - 1 if fits else math.inf
        table.add_row(
            Text(other.schedule or "one program"),
            str(other.num_stages) if fits else "-",
            str(other.num_microbatches),
            f"{human_seconds(other.step_time_s)}, {100 * slower:+.1f} %" if fits else "does not fit",
            human_bytes(other.peak_bytes) if fits else "-",
        )
    left = f"and {len(best) - MAX_TRIED} more" if len(best) > MAX_TRIED else ""
    return section("Alternatives that were tried, the fastest first", table, left)
