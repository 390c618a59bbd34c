"""Draw the stages of a pipeline plan: the time and memory of each submesh, the table of stages, and the alternatives.

In: a `StagesExplanation`. Out: elements. Each stage's program is drawn like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.pipeline.draw.palette import LOOKS, phases_of
from autopar.pipeline.plan import StagePlan
from autopar.report.explain_stages import StagesExplanation, devices_text, range_text, sends_from, sent_text
from autopar.report.html.markup import Child, Element, el, fitting, in_code, percent, svg
from autopar.report.html.tables import cell, table
from autopar.report.submeshes import SubmeshUse
from autopar.system.text_tables import share_text
from autopar.system.units import human_bytes, human_seconds

#: The most alternatives that are shown.
_MAX_TRIED = 20
_HEIGHT = 100.0


def submesh_times(explained: StagesExplanation) -> Element:
    """For each submesh, a bar of its phases and its idle time, which sum up to the time that the timeline shows."""
    whole = explained.shown_s
    rows = []
    for number, use in enumerate(explained.submeshes):
        parts = [_part(LOOKS[phase].name, LOOKS[phase].colour, seconds, whole) for phase, seconds in use.phases]
        parts.append(_part("idle", "", use.idle_s, whole))
        rows.append(
            el(
                "div",
                el("span", f"submesh {number}", class_="track-name"),
                el("div", *parts, class_="bar"),
                class_="track-row",
            )
        )
    looks = [LOOKS[phase] for phase in phases_of(explained.timeline)]
    legend = [el("li", el("span", class_="swatch", style=f"background:{look.colour}"), look.name) for look in looks]
    legend.append(el("li", el("span", class_="swatch idle"), "idle"))
    return el("div", *rows, el("ul", *legend, class_="legend"), class_="figure")


def _part(label: str, colour: str, seconds: float, whole: float) -> Element:
    return el(
        "span",
        fitting(share_text(seconds, whole)) if seconds > 0.08 * whole else "",
        style=f"width:{percent(seconds, whole)}" + (f";--own:{colour}" if colour else ""),
        title=f"{label}: {human_seconds(seconds)}",
        class_="inked" if colour else "inked idle",
    )


def submesh_memory(explained: StagesExplanation) -> Element:
    """For each submesh, the memory of one device over the timeline, on a common scale."""
    whole = explained.shown_s
    peak, budget = explained.plan.prediction.peak_bytes, explained.plan.memory_budget_bytes
    in_sight = budget is not None and budget <= 3 * peak
    top = 1.05 * max(peak, budget if budget is not None and in_sight else 0.0) or 1.0
    rows = [
        _submesh_memory(number, use, whole, top, budget if in_sight else None)
        for number, use in enumerate(explained.submeshes)
    ]
    legend = [
        el("li", el("span", class_=f"swatch memory-{name}"), label)
        for name, label in (
            ("parameters", "parameters, optimizer state, gradients"),
            ("optimizer", "temporaries of one microbatch"),
            ("temporaries", "microbatches in flight"),
        )
    ]
    under = f"The budget is {human_bytes(budget)} on each device." if budget else "No budget was given."
    return el("div", *rows, el("ul", *legend, class_="legend"), el("p", under, class_="under"), class_="figure")


def _submesh_memory(number: int, use: SubmeshUse, whole: float, top: float, budget: float | None) -> Element:
    def y(num_bytes: float) -> float:
        return round(_HEIGHT * (1 - num_bytes / top), 2)

    floor = use.state_bytes + use.working_bytes
    steps, last = "", floor
    for start_s, flight_bytes in use.in_flight:
        if floor + flight_bytes != last:
            steps += f"H{1000 * start_s / whole if whole else 0:.1f}V{y(floor + flight_bytes):g}"
            last = floor + flight_bytes
    shapes = [
        el(
            "rect",
            x=0,
            y=y(use.state_bytes),
            width=1000,
            height=round(_HEIGHT - y(use.state_bytes), 2),
            class_="memory-parameters",
        ),
        el(
            "rect",
            x=0,
            y=y(floor),
            width=1000,
            height=round(y(use.state_bytes) - y(floor), 2),
            class_="memory-optimizer",
        ),
        el("path", d=f"M0 {y(floor):g}{steps}H1000V{y(floor):g}Z", class_="memory-temporaries"),
    ]
    marks: list[Child] = []
    if budget is not None:
        marks.append(el("span", class_="budget", style=f"bottom:{percent(budget, top)}"))
    devices = f"{use.devices[0]}-{use.devices[1]}" if use.devices[0] != use.devices[1] else f"{use.devices[0]}"
    return el(
        "div",
        el("span", f"submesh {number}", el("small", f"devices {devices}"), class_="track-name"),
        el("div", svg(1000, _HEIGHT, *shapes), *marks, class_="plot small"),
        el("span", f"peak {human_bytes(use.peak_bytes)}", class_="track-remark"),
        class_="track-row",
    )


def versions_table(explained: StagesExplanation) -> Element:
    """A row for each stage of an asynchronous schedule: the versions of its weights, and the delay of its gradients."""
    kept = explained.plan.weight_versions
    corrects = any(one.velocity_bytes for one in kept)
    rows = [
        el(
            "tr",
            cell(el("a", f"stage {number}", href=f"#stage-{number}")),
            cell(str(one.copies), value=one.copies),
            cell(range_text(one.least_delay, one.most_delay), value=one.most_delay),
            *(
                cell(human_bytes(size), value=size)
                for size in (
                    one.num_bytes,
                    one.kept_bytes,
                    *((one.velocity_bytes, one.corrected_bytes) if corrects else ()),
                )
            ),
        )
        for number, one in enumerate(kept)
    ]
    more = ("velocities", "corrected weights") if corrects else ()
    numbers = ("copies", "updates late", "one version", "all versions", *more)
    return table(["stage", *numbers], rows, numbers=numbers)


def stages_table(explained: StagesExplanation) -> Element:
    """A row for each stage."""
    plan = explained.plan
    split = any(stage.cost.weight_s for stage in plan.stages)
    numbers = ("forward", "input" if split else "backward", *(("weight",) if split else ()), "update", "peak")
    rows = []
    for number, stage in enumerate(plan.stages):
        cost = stage.cost
        seconds = (cost.forward_s, cost.backward_s, *((cost.weight_s,) if split else ()), cost.update_s)
        peak = explained.submeshes[plan.submesh_of[number]].peak_bytes
        rows.append(
            el(
                "tr",
                cell(el("a", f"stage {number}", href=f"#stage-{number}"), value=number),
                cell(range_text(stage.first_layer, stage.last_layer)),
                cell(devices_text(stage), el("small", stage.submesh.shape.kind)),
                *(cell(human_seconds(one), value=one) for one in seconds),
                cell(human_bytes(peak), value=peak),
                cell(*(el("div", sent_text(one, ", ")) for one in sends_from(plan, number))),
                cell(stage.plan.mesh.describe(), el("small", *in_code(_strategy_text(stage)))),
            )
        )
    heads = ("stage", "layers", "devices", *numbers, "sends", "mesh and strategy")
    return el(
        "div",
        table(heads, rows, numbers=("stage", *numbers), name="Stages"),
        el(
            "p",
            "Seconds and sends are of one microbatch; update, and sends at start and at end, of a step.",
            class_="under",
        ),
    )


def _strategy_text(stage: StagePlan) -> str:
    seconds = sum(one.time_s for one in stage.plan.rematerialized)
    return stage.plan.strategy + (f"; rematerializes {human_seconds(seconds)} a microbatch" if seconds else "")


def tried_table(explained: StagesExplanation) -> Element | None:
    """The alternatives that were tried, the fastest first."""
    tried = sorted((one for one in explained.plan.tried if not one.planned), key=lambda one: one.step_time_s)
    if len(tried) < 2:
        return None
    own = explained.plan.prediction.step_time_s
    rows = []
    for one in tried[:_MAX_TRIED]:
        fits = math.isfinite(one.step_time_s)
        slower = (
            f"{human_seconds(one.step_time_s)}, {100 * (one.step_time_s / own - 1):+.1f} %" if fits else "does not fit"
        )
        rows.append(
            el(
                "tr",
                cell(one.schedule or "one program"),
                cell(str(one.num_stages) if fits else "-", value=one.num_stages),
                cell(str(one.num_microbatches), value=one.num_microbatches),
                cell(slower, value=one.step_time_s),
                cell(human_bytes(one.peak_bytes) if fits else "-", value=one.peak_bytes),
            )
        )
    numbers = ("stages", "microbatches", "predicted step", "peak memory")
    return table(("schedule", *numbers), rows, numbers=numbers, name="Alternatives that were tried")


def same_stages(explained: StagesExplanation) -> Sequence[tuple[int, ...]]:
    """Groups of stages whose plans differ only in the names of their layers, in order."""
    groups: dict[object, list[int]] = {}
    for number, one in enumerate(explained.stages):
        plan = one.plan
        inputs = tuple((tensor.shape, tensor.dtype, tensor.role, tensor.sharding) for tensor in plan.inputs)
        key = (plan.mesh, plan.hardware, plan.strategy, inputs, plan.prediction.step_time_s, plan.prediction.peak_bytes)
        groups.setdefault(key, []).append(number)
    return [tuple(group) for group in groups.values()]
