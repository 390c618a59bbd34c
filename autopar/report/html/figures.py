"""Draw where the step time and the memory of a device go.

In: `StepTime`, `MemoryUse`. Out: elements. Drawings stretch to the available width; labels are text next to them and do
not stretch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autopar.plans.records import type_text
from autopar.plans.step_trace import LiveBuffer
from autopar.report.breakdown import MemoryUse, StepTime
from autopar.report.html.markup import Child, Element, el, fitting, percent, svg
from autopar.system.text_tables import share_text, short_source
from autopar.system.units import human_bytes, human_seconds

#: The kinds of collectives that have their own colours.
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
#: A budget above this multiple of the peak is not drawn to scale, because the curve would be a line at the bottom.
_BUDGET_IN_SIGHT = 3.0
_HEIGHT = 200.0
_STEADY = ("parameters", "optimizer state", "data", "outputs")


def kind_class(kind: str) -> str:
    """The CSS class with a collective's colour."""
    return f"kind{_KINDS.index(kind) if kind in _KINDS else len(_KINDS)}"


def time_bar(time: StepTime) -> Element:
    """A bar of the step time's parts, and a hatched bar of the communication hidden by kernels."""
    whole = time.step_time_s
    exposed = [
        _segment(percent(seconds, whole), "compute" if name == "compute" else kind_class(name), name, seconds)
        for name, seconds in time.parts
    ]
    hidden = [
        _segment(percent(one.hidden_s, whole), f"hidden {kind_class(one.kind)}", f"{one.kind}, hidden", one.hidden_s)
        for one in time.collectives
        if one.hidden_s
    ]
    rows = [
        _time_row("compute", "compute", time.compute_s, 0.0, whole),
        *(_time_row(one.kind, kind_class(one.kind), one.exposed_s, one.hidden_s, whole) for one in time.collectives),
    ]
    heads = [el("th", text, scope="col") for text in ("", "exposed", "", "hidden")]
    return el(
        "div",
        el("div", *exposed, class_="bar", role="img", aria_label=_spoken(time)),
        el("div", *hidden, class_="bar thin") if hidden else None,
        el(
            "table",
            el("thead", el("tr", *heads)),
            el("tbody", *rows),
            class_="legend-table",
        ),
        class_="figure",
    )


def _segment(width: str, look: str, name: str, seconds: float) -> Element:
    return el("span", class_=look, style=f"width:{width}", title=f"{name}: {human_seconds(seconds)}")


def _time_row(name: str, look: str, exposed_s: float, hidden_s: float, whole: float) -> Element:
    return el(
        "tr",
        el("th", el("span", class_=f"swatch {look}"), name, scope="row"),
        el("td", human_seconds(exposed_s) if exposed_s else "-", class_="number"),
        el("td", share_text(exposed_s, whole) if exposed_s else "", class_="number"),
        el("td", human_seconds(hidden_s) if hidden_s else "-", class_="number"),
    )


def _spoken(time: StepTime) -> str:
    return "Step time: " + ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in time.parts)


# -- memory ----------------------------------------------------------------------------------


def memory_curve(use: MemoryUse, time: StepTime) -> Element:
    """The live bytes of a device over a step, below its budget."""
    budget = use.budget_bytes
    in_sight = budget is not None and budget <= _BUDGET_IN_SIGHT * use.peak_bytes
    top = 1.08 * max(use.peak_bytes, budget if budget is not None and in_sight else 0.0) or 1.0
    bands = list(_bands(use, top))
    num_parts = len(use.over_step)
    phases, start = [], 0
    for phase, parts in use.phases:
        wide = parts >= 0.09 * num_parts
        style = f"left:{percent(start, num_parts)};width:{percent(parts, num_parts)}"
        phases.append(el("span", fitting(phase) if wide else "", class_=f"phase {phase}", style=style, title=phase))
        start += parts
    loops = loop_marks(use.loops, num_parts)
    at = use.over_step.index(max(use.over_step)) + 0.5
    where = percent(at, num_parts)
    marks: list[Child] = [
        *(_tick(value, top) for value in _round_values(top)),
        el("span", class_="peak-dot", style=f"left:{where};bottom:{percent(use.peak_bytes, top)}"),
        el(
            "span",
            f"peak {human_bytes(use.peak_bytes)}",
            class_="peak-label" + (" left" if at > 0.6 * num_parts else ""),
            style=f"left:{where};bottom:{percent(use.peak_bytes, top)}",
        ),
    ]
    if budget is not None and in_sight:
        marks.append(
            el("span", f"budget {human_bytes(budget)}", class_="budget", style=f"bottom:{percent(budget, top)}")
        )
    about = f"Memory of one device over a step: at most {human_bytes(use.peak_bytes)}"
    plot = el("div", svg(max(num_parts, 1), _HEIGHT, *bands), *marks, class_="plot", role="img", aria_label=about)
    ends = el("div", el("span", "0"), el("span", human_seconds(time.step_time_s)), class_="ends")
    return el(
        "div",
        plot,
        el("div", *phases, class_="band"),
        el("div", *loops, class_="band loops") if loops else None,
        ends,
        _memory_legend(use),
        el("p", _budget_text(use), class_="under"),
        class_="figure",
    )


def loop_marks(loops: Sequence[tuple[int, int, int]], whole: float, remark: str = "") -> list[Element]:
    """A mark for each loop over its part of an axis, with its trip count.

    Args:
        loops: start, end and trip count of each loop.
        whole: the length of the axis.
    """
    return [
        el(
            "span",
            fitting(f"x{count} iterations{remark}"),
            class_="loop",
            style=f"left:{percent(start, whole)};width:{percent(end - start, whole)}",
        )
        for start, end, count in loops
    ]


def _bands(use: MemoryUse, top: float) -> Iterable[Element]:
    """The steady parts, stacked, and the temporaries on top of them."""
    sizes, count = dict(use.parts), len(use.over_step)
    floor = 0.0
    for name in _STEADY:
        if sizes.get(name):
            y = _HEIGHT * (1 - (floor + sizes[name]) / top)
            height = _HEIGHT * sizes[name] / top
            yield el("rect", x=0, y=round(y, 2), width=count, height=round(height, 2), class_=_memory_class(name))
            floor += sizes[name]
    ys = [round(_HEIGHT * (1 - live / top), 2) for live in use.over_step]
    steps = [f"V{y:g}H{n + 1}" for n, y in enumerate(ys) if n + 1 == count or ys[n + 1] != y]
    base = round(_HEIGHT * (1 - floor / top), 2)
    yield el("path", d=f"M0 {base:g}{''.join(steps)}V{base:g}Z", class_=_memory_class("temporaries"))


def _memory_class(name: str) -> str:
    return f"memory-{name.split()[0]}"


def _memory_legend(use: MemoryUse) -> Element:
    items = [
        el("li", el("span", class_=f"swatch {_memory_class(name)}"), f"{name} {human_bytes(size)}")
        for name, size in use.parts
        if size > 0.0005 * use.peak_bytes
    ]
    return el("ul", *items, class_="legend")


def _budget_text(use: MemoryUse) -> str:
    if use.budget_bytes is None:
        return "No budget was given: the plan fits the device's memory."
    share = share_text(use.peak_bytes, use.budget_bytes)
    return f"The peak is {share} of the budget of {human_bytes(use.budget_bytes)}."


def _tick(value: float, top: float) -> Element:
    return el("span", human_bytes(value), class_="tick", style=f"bottom:{percent(value, top)}")


def _round_values(top: float) -> list[float]:
    """About three round numbers below the top."""
    if top <= 0:
        return []
    power = 10.0 ** math.floor(math.log10(top))
    step = next(power * part for part in (0.2, 0.5, 1.0, 2.0, 5.0) if top / (power * part) <= 5)
    return [n * step for n in range(1, int(top / step * 0.92) + 1)]


def at_peak(use: MemoryUse, under: str) -> Element | None:
    """A table of the temporaries live at the peak, the largest first.

    Args:
        under: the path prefix to leave out.
    """
    if use.peak is None:
        return None
    temporaries = dict(use.parts).get("temporaries", 0.0)
    known = sum(one.num_bytes for one in use.at_peak)
    rows = [_live_row(one, temporaries, under) for one in use.at_peak[:10]]
    rest = temporaries - sum(one.num_bytes for one in use.at_peak[:10])
    if rest > 0.001 * max(known, 1.0):
        cells = [
            el("td", "all others"),
            el("td", class_="type"),
            el("td", human_bytes(rest), class_="number"),
            _share_cell(rest, temporaries),
        ]
        rows.append(el("tr", *cells))
    one = use.peak
    where = " at ".join(filter(None, (one.primitive, below(one.path, under) if one.path else "")))
    place = ", ".join(filter(None, (where, short_source(one.source))))
    return el(
        "div",
        el(
            "p",
            f"At the peak, in the {one.phase} pass ({place}), {human_bytes(temporaries)} of temporaries are live.",
            class_="about",
        ),
        el("div", el("table", el("tbody", *rows), class_="peak-table"), class_="scroll", tabindex="0"),
    )


def _live_row(one: LiveBuffer, whole: float, under: str) -> Element:
    times = f" x{one.count}" if one.count > 1 else ""
    return el(
        "tr",
        el(
            "td",
            el("code", below(one.path, under)),
            el("small", f"{one.phase} {one.primitive}" if one.primitive else "gathered"),
        ),
        el("td", type_text(one.shape, one.dtype) + times, class_="type"),
        el("td", human_bytes(one.num_bytes), class_="number"),
        _share_cell(one.num_bytes, whole),
    )


def below(path: str, under: str) -> str:
    """A path without its prefix.

    >>> below("Net/h_0/attn", "Net"), below("Nets", "Net"), below("", "Net")
    ('h_0/attn', 'Nets', '(outside any module)')
    """
    if not path:
        return "(outside any module)"
    return path.removeprefix(f"{under}/") if under else path


def _share_cell(part: float, whole: float) -> Element:
    return el("td", el("span", class_="share", style=f"width:{percent(part, whole)}"), class_="share-cell")


def ticks_of_time(whole_s: float) -> Sequence[float]:
    """About six round times, from 0."""
    if whole_s <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(whole_s / 6))
    step = next(power * part for part in (1, 2, 5, 10) if whole_s / (power * part) <= 6)
    return [n * step for n in range(int(whole_s / step + 1e-9) + 1)]
