"""Draw the tables of the page: decisions with runners-up, collectives, other meshes, predicted against compiled
figures.

In: rows of an explanation. Out: elements. A column is sorted by the `data-value` of its cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.mesh import MeshShape
from autopar.plans.considered import Considered
from autopar.plans.records import RejectedMesh, type_text
from autopar.report.breakdown import SIMULATED
from autopar.report.considered import HEADS, considered_rows
from autopar.report.explain_program import Explanation
from autopar.report.html.blocks import blocks
from autopar.report.html.figures import below, kind_class
from autopar.report.html.markup import Child, Element, el, in_code
from autopar.report.predicted_vs_compiled import Compiled, CompiledCollectives, CompiledFigure
from autopar.report.rows import CollectiveRow, Span, TensorRow
from autopar.system.text_tables import short_source
from autopar.system.units import human_bytes, human_seconds

#: The most rows of unbounded tables.
MAX_DECISIONS, MAX_COLLECTIVES = 250, 60


def table(heads: Sequence[str], rows: Sequence[Element], *, numbers: Sequence[str] = (), name: str = "") -> Element:
    """A table that can be sorted by its headings."""
    cells = [
        el(
            "th",
            el("button", head, type="button") if head else "",
            scope="col",
            class_="number" if head in numbers else None,
        )
        for head in heads
    ]
    for row in rows:
        for head, one in zip(heads, row, strict=True):
            if head:
                one.set("data-label", head)  # on a narrow page, a row is a card without column headings
    grid = el("table", el("thead", el("tr", *cells)), el("tbody", *rows), class_="sortable", aria_label=name or None)
    return el("div", grid, class_="scroll", tabindex="0")


def cell(*children: Child, value: float | None = None, look: str | None = None) -> Element:
    """A table cell; numbers are right-aligned."""
    shown = None if value is None or not math.isfinite(value) else value
    looks = " ".join(filter(None, ("number" if value is not None else None, look)))
    return el("td", *children, class_=looks or None, data_value=shown)


# -- decisions -------------------------------------------------------------------------------


def decisions_table(explained: Explanation, mesh: MeshShape) -> Element:
    """All decisions, those with the most expensive runner-up first."""
    rows = [row for row in (*explained.parameters, *explained.data, *explained.activations) if row.cost_s is not None]
    rows.sort(key=lambda row: -_runner_up_cost_s(row))
    shown = [_decision(row, explained, mesh) for row in rows[:MAX_DECISIONS]]
    heads = ("tensor", "kind", "type", "sharding", "cost", "runner-up", "added time", "collectives caused")
    left = len(rows) - len(shown)
    return el(
        "div",
        el(
            "input",
            type="search",
            placeholder="filter: a path, a primitive, a file",
            aria_label="filter",
            class_="filter",
        ),
        table(heads, shown, numbers=("cost", "adds"), name="Decisions"),
        el("p", f"and {left} more with cheaper runners-up; autopar explain --json has all", class_="under")
        if left
        else None,
    )


def _runner_up_cost_s(row: TensorRow) -> float:
    return row.count * row.runner_up_extra_s[1] if row.runner_up_extra_s and not row.pinned else -1.0


def _decision(row: TensorRow, explained: Explanation, mesh: MeshShape) -> Element:
    under = explained.modules.activations_under if row.kind == "activation" else explained.modules.parameters_under
    producer = [f"{row.phase} {row.primitive}", short_source(row.source)] if row.kind == "activation" else []
    times = f" x{row.count}" if row.count > 1 else ""
    caused = [
        el(
            "div",
            el("span", class_=f"swatch {kind_class(kind)}"),
            f"{kind} over {', '.join(axes)}: {human_seconds(time_s)}",
        )
        for kind, axes, time_s in row.collectives
    ]
    return el(
        "tr",
        cell(el("code", below(row.path, under)), *(el("small", text) for text in producer if text)),
        cell(row.kind),
        cell(type_text(row.shape, row.dtype) + times, look="type"),
        cell(blocks(row.shape, row.split, mesh, below(row.path, under))),
        cell(_span(row.cost_s), value=row.cost_s[1] if row.cost_s else math.nan),
        cell("pinned" if row.pinned else " or ".join(row.runner_up[:2]) or "no other choice", look="type"),
        _extra(row),
        cell(*caused),
    )


def _extra(row: TensorRow) -> Element:
    if row.pinned or row.runner_up_extra_s is None:
        return cell("", value=math.nan)
    most = row.runner_up_extra_s[1]
    return cell("the same" if most == 0 else f"+{_span(row.runner_up_extra_s)}", value=most)


def _span(span: Span | None) -> str:
    if span is None:
        return ""
    low, high = map(human_seconds, span)
    return high if low == high or span[1] <= 1.02 * span[0] else f"{low} to {high}"


# -- collectives, meshes ---------------------------------------------------------------------


def collectives_table(rows: Sequence[CollectiveRow], under: str) -> Element:
    """Collectives and their causes, the longest first.

    Args:
        under: the path prefix to leave out.
    """
    shown = [
        el(
            "tr",
            cell(
                el("span", class_=f"swatch {kind_class(row.kind)}"),
                row.kind,
                el("small", f"over {', '.join(row.axes)}"),
            ),
            cell(f"{row.count}{'*' if row.combinable else ''}", value=row.count),
            cell(human_seconds(row.time_s), value=row.time_s),
            cell(human_bytes(row.num_bytes), value=row.num_bytes),
            cell(
                *in_code(row.cause),
                el("small", below(row.path, under)) if row.path and row.path not in row.cause else None,
            ),
            cell(row.phase, el("small", short_source(row.source)) if row.source else None),
        )
        for row in rows[:MAX_COLLECTIVES]
    ]
    left = f"and {len(rows) - len(shown)} more rows; autopar explain --json has all. " if len(rows) > len(shown) else ""
    star = "* XLA may combine these into fewer. " if any(row.combinable for row in rows) else ""
    heads = ("collective", "count", "time", "data", "cause", "phase")
    return el(
        "div",
        table(heads, shown, numbers=("count", "time", "data"), name="Collectives"),
        el("p", f"{left}{star}Times include hidden and exposed time; data is per device.", class_="under"),
    )


def meshes_table(explained: Explanation) -> Element | None:
    """The other meshes that were planned."""
    rejected: Sequence[RejectedMesh] = explained.plan.rejected
    if not rejected:
        return None
    own = explained.plan.prediction.step_time_s
    rows = [
        el(
            "tr",
            cell(one.mesh.describe()),
            cell(*_compared_with(one.step_time_s, own), value=one.step_time_s),
            cell(human_bytes(one.peak_bytes), value=one.peak_bytes),
            cell(*in_code(one.strategy)),
        )
        for one in rejected
    ]
    heads = ("mesh", "step time", "peak memory", "strategy")
    return table(heads, rows, numbers=("step time", "peak memory"), name="Other meshes")


def considered_table(considered: Sequence[Considered]) -> Element | None:
    """What was considered for a plan, with the reasons; nothing for plans without a record."""
    shown, left = considered_rows(considered)
    if not shown:
        return None
    rows = [
        el(
            "tr",
            cell(*in_code(one.what)),
            cell(one.microbatches, value=one.row.num_microbatches),
            cell(one.step_time, value=one.row.step_time_s),
            cell(one.peak, value=one.row.peak_bytes),
            cell(*in_code(one.reason)),
        )
        for one in shown
    ]
    under = f"and {left} more rows; autopar explain --json has all. " if left else ""
    return el(
        "div",
        table(HEADS, rows, numbers=HEADS[1:4], name="Considered"),
        el("p", f"{under}Priced stages are simulated with the costs of planned runs of layers.", class_="under"),
    )


def _compared_with(seconds: float, own: float) -> list[Child]:
    if not math.isfinite(seconds):
        return ["does not fit"]
    return [f"{human_seconds(seconds)}, {100 * (seconds / own - 1):+.1f} %" if own else human_seconds(seconds)]


# -- predicted against compiled ---------------------------------------------------------------


def compiled_view(explained: Sequence[Compiled]) -> Element:
    """A table of figures for each program."""
    parts: list[Child] = []
    for one in explained:
        verdict = "all figures hold" if not one.off else f"off: {', '.join(one.off)}"
        title = f"{one.name}: {verdict}" if one.name else verdict.capitalize()
        parts += [
            el("h3", title),
            el(
                "p",
                f"XLA's own program for {one.topology} GPUs, compiled in {human_seconds(one.compile_s)}.",
                class_="under",
            ),
            *_step_times(one),
            _figures(one),
        ]
    return el("div", *parts)


def _step_times(one: Compiled) -> list[Child]:
    """The step time by model, with a column of measured times if there are any."""
    if not one.step_times:
        return []
    columns = ["predicted", "replayed", "XLA's estimate"]
    if any(row.measured is not None for row in one.step_times):
        columns.append("measured")
    rows = []
    for row in one.step_times:
        seconds = (row.predicted, row.replayed, row.xla_estimate, row.measured)[: len(columns)]
        cells = [cell("-" if s is None else human_seconds(s), value=math.nan if s is None else s) for s in seconds]
        rows.append(el("tr", cell(row.name), *cells))
    wrong = (
        f" XLA's estimate is left out: it is wrong for {' and '.join(one.estimate_errors)}."
        if one.estimate_errors
        else ""
    )
    about = f"Replayed: a simulation of the compiled program with the device's rates, an estimate.{wrong}"
    return [table(("", *columns), rows, numbers=columns), el("p", about, class_="under")]


def _figures(one: Compiled) -> Element:
    rows = [*map(_figure, one.figures), *map(_sent, one.collectives)]
    return table(
        ("figure", "predicted", "compiled", "off", "tolerance", ""),
        rows,
        numbers=("predicted", "compiled", "off", "tolerance"),
    )


def _figure(one: CompiledFigure) -> Element:
    show = human_bytes if one.unit == "bytes" else human_seconds
    ran = el("small", f"measured {show(one.measured)}") if one.measured is not None else None
    name = SIMULATED if one.name == "step time" else one.name  # files of older versions use this name
    return _compared(name, show(one.predicted), "-" if one.compiled is None else show(one.compiled), ran, one)


def _sent(one: CompiledCollectives) -> Element:
    axes = "no mesh axes" if one.axes is None else ", ".join(one.axes)
    as_figure = CompiledFigure(
        name=f"{one.kind} over {axes}",
        unit="bytes",
        predicted=one.predicted_bytes,
        compiled=one.compiled_bytes,
        tolerance=None,
        holds=one.holds,
    )
    predicted, compiled = (
        f"{count}: {human_bytes(size)}"
        for count, size in ((one.predicted_count, one.predicted_bytes), (one.compiled_count, one.compiled_bytes))
    )
    return _compared(as_figure.name, predicted, compiled, None, as_figure)


def _compared(name: str, predicted: str, compiled: str, more: Element | None, one: CompiledFigure) -> Element:
    off = (one.predicted - one.compiled) / one.compiled if one.compiled else None
    return el(
        "tr",
        cell(name),
        cell(predicted, value=one.predicted),
        cell(compiled, more, value=one.compiled if one.compiled is not None else math.nan),
        cell("-" if off is None else f"{100 * off:+.1f} %", value=off if off is not None else math.nan),
        cell("-" if one.tolerance is None else f"{100 * one.tolerance:g} %", value=one.tolerance or math.nan),
        cell("holds" if one.holds else "OFF", look="holds" if one.holds else "off"),
    )
