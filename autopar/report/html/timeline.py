"""Draw a timeline in rows: a device's kernels and collectives, or the tasks of submeshes.

In: a `StepTrace`, or a `PipelineTimeline`. Out: elements, and the texts that the page's script shows for each bar.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from autopar.pipeline.draw.palette import LOOKS, label, phases_of, shade
from autopar.pipeline.draw.text import owners
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.plans.step_trace import StepTrace
from autopar.report.html.figures import kind_class, loop_marks, ticks_of_time
from autopar.report.html.markup import Element, el, percent, svg
from autopar.system.units import human_bytes, human_seconds

_WIDTH, _HEIGHT = 10_000, 10
#: What is drawn over something hidden, once in a page.
HATCH = svg(
    1,
    1,
    el(
        "pattern",
        el("rect", width=30, height=_HEIGHT, class_="ground"),
        id="hatch",
        width=60,
        height=_HEIGHT,
        patternUnits="userSpaceOnUse",
    ),
    class_="away",
)
#: Tasks of a submesh above which its row is drawn in cells, each what took most of it.
MAX_TASKS = 300
_CELLS = 480


@dataclass(frozen=True, slots=True)
class Slice:
    """A bar of a row; times are integer nanoseconds from the start of the step.

    Args:
        look: the CSS class of its colour, or a colour. text: the tooltip.
    """

    start_ns: int
    ns: int
    look: str
    text: str


# -- one device ------------------------------------------------------------------------------


def step_tracks(trace: StepTrace, step_time_s: float, name: str) -> tuple[Element, dict[str, Any]]:
    """A row of kernels and a row of collectives.

    Args:
        name: the figure's name, unique on the page.

    Returns:
        The figure, and the data of its rows for the script.
    """
    whole = max(1, round(1e9 * step_time_s))  # a file may say 0
    rows = {
        "kernels": list(_kernels(trace)),
        "collectives": list(_collectives(trace)),
    }
    items = [el("li", el("span", class_=f"swatch {look}"), look) for look in ("forward", "backward", "update")]
    kinds = [
        el("li", el("span", class_=f"swatch {kind_class(kind)}"), kind)
        for kind in dict.fromkeys(kind for kind, _ in trace.kinds)
    ]
    hatched = el("li", el("span", class_="swatch hidden plain"), "hidden by kernels") if trace.kinds else None
    loops = loop_marks(trace.loops, whole, ", drawn as one")
    figure = el(
        "div",
        *(_track(row, "", slices, whole, f"{name}-{row}") for row, slices in rows.items() if slices),
        el("div", el("span", class_="track-name"), el("div", *loops, class_="band loops"), class_="track-row bare")
        if loops
        else None,
        _axis(step_time_s),
        el("ul", *items, *kinds, hatched, class_="legend"),
        class_="figure tracks",
    )
    return figure, {f"{name}-{row}": _texts(slices, whole) for row, slices in rows.items() if slices}


def _kernels(trace: StepTrace) -> Iterable[Slice]:
    for place, start, ns in zip(trace.kernels.place, trace.kernels.start_ns, trace.kernels.ns, strict=True):
        phase, path = trace.places[place]
        yield Slice(start, ns, phase, f"{phase} {path}".strip())


def _collectives(trace: StepTrace) -> Iterable[Slice]:
    """Two bars for each collective: the hidden part, then the exposed part."""
    sent = trace.collectives
    columns = (sent.kind, sent.place, sent.start_ns, sent.ns, sent.exposed_ns, sent.num_bytes, sent.count)
    for kind, place, start, ns, exposed, size, count in zip(*columns, strict=True):
        name, axes = trace.kinds[kind]
        phase, path = trace.places[place]
        times = f"{count} x " if count > 1 else ""
        text = f"{times}{name} over {', '.join(axes)}, {human_bytes(size)}, {human_seconds(1e-9 * exposed)} exposed; {phase} {path}"
        hidden = max(0, ns - exposed)
        if hidden:
            yield Slice(start, hidden, f"hidden {kind_class(name)}", text)
        if exposed:
            yield Slice(start + hidden, min(exposed, ns), kind_class(name), text)


# -- submeshes -------------------------------------------------------------------------------


def pipeline_tracks(timeline: PipelineTimeline, name: str) -> tuple[Element, dict[str, Any]]:
    """A row for each submesh, with tasks in the colours of their phases; for arguments and results see
    `step_tracks`."""
    whole = max(1, round(1e9 * timeline.makespan_s))
    rows = [list(_tasks(timeline, submesh)) for submesh in range(timeline.num_submeshes)]
    idle = [f"{100 * share:.0f} % idle" for share in timeline.bubble_fractions]
    tracks = [
        _track(f"submesh {submesh}", idle[submesh], slices, whole, f"{name}-{submesh}")
        for submesh, slices in enumerate(rows)
    ]
    legend = [
        el(
            "li",
            el("span", class_="swatch", style=f"background:{LOOKS[phase].colour}"),
            f"{LOOKS[phase].letter} {LOOKS[phase].name}",
        )
        for phase in phases_of(timeline)
    ]
    legend.append(el("li", el("span", class_="swatch idle"), "idle"))
    if any(len(timeline.stages_on(submesh)) > 1 for submesh in range(timeline.num_submeshes)):
        legend.append(el("li", "lighter: a submesh's later stages"))
    figure = el(
        "div", *tracks, _axis(timeline.makespan_s), el("ul", *legend, class_="legend"), class_="figure tracks pipeline"
    )
    return figure, {f"{name}-{submesh}": _texts(slices, whole) for submesh, slices in enumerate(rows)}


def _tasks(timeline: PipelineTimeline, submesh: int) -> Iterable[Slice]:
    stages, spans = timeline.stages_on(submesh), timeline.on(submesh)
    if len(spans) <= MAX_TASKS:
        for span in spans:
            start = round(1e9 * (span.start_s - timeline.start_s))
            look = shade(span.task.stage, stages, LOOKS[span.task.phase].colour)
            yield Slice(start, round(1e9 * span.seconds), look, f"{label(span.task, stages)}: {span.task}")
        return
    cell = 1e9 * timeline.makespan_s / _CELLS
    found = owners(timeline, submesh, _CELLS / timeline.makespan_s, _CELLS)
    at = 0
    for task, cells in groupby(found, lambda span: None if span is None else (span.task.phase, span.task.stage)):
        length = len(list(cells))
        if task is not None:
            look = shade(task[1], stages, LOOKS[task[0]].colour)
            yield Slice(round(at * cell), round(length * cell), look, f"mostly {LOOKS[task[0]].name}")
        at += length


# -- any row ---------------------------------------------------------------------------------


def _track(name: str, remark: str, slices: Sequence[Slice], whole: int, key: str) -> Element:
    by_look: dict[str, list[str]] = defaultdict(list)
    for one in slices:
        x, width = _WIDTH * one.start_ns / whole, max(_WIDTH * one.ns / whole, 4)
        by_look[one.look].append(f"M{x:.0f} 0h{width:.0f}v{_HEIGHT}h{-width:.0f}z")
    paths = []
    for look, parts in by_look.items():
        colour = look if look.startswith("#") else None
        paths.append(el("path", d="".join(parts), fill=colour, class_=None if colour else look))
        if look.startswith("hidden"):
            paths.append(el("path", d="".join(parts), fill="url(#hatch)"))
    drawing = svg(_WIDTH, _HEIGHT, *paths)
    about = f"{name}: {len(slices)} stretches; left and right go through them"
    return el(
        "div",
        el("span", name, class_="track-name"),
        el("div", drawing, class_="track", tabindex="0", role="group", aria_label=about, data_track=key),
        el("span", remark, class_="track-remark") if remark else None,
        class_="track-row",
    )


def _axis(whole_s: float) -> Element:
    marks = [
        el(
            "span",
            human_seconds(at),
            style=f"left:{percent(at, whole_s)}",
            class_="last" if at > 0.9 * whole_s else None,
        )
        for at in ticks_of_time(whole_s)
    ]
    return el("div", el("span", class_="track-name"), el("div", *marks, class_="time-axis"), class_="track-row bare")


def _texts(slices: Sequence[Slice], whole: int) -> Mapping[str, Any]:
    """The distinct texts, and for each bar its start, its length and the position of its text."""
    texts = list(dict.fromkeys(one.text for one in slices))
    place = {text: n for n, text in enumerate(texts)}
    return {"whole": whole, "texts": texts, "at": [[one.start_ns, one.ns, place[one.text]] for one in slices]}
