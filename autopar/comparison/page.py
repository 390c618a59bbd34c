"""Write a comparison over numbers of devices as a page: for each step a curve of step time and a table.

In: a `GridComparison`. Out: an HTML file without references to other files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

from autopar.comparison.by_hardware_text import used_text
from autopar.comparison.device_curve import Curve, Point, curves
from autopar.report.html.markup import Element, el, in_code, written
from autopar.report.html.tables import cell, table
from autopar.system.atomic_file import write_whole
from autopar.system.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from autopar.comparison.by_hardware import Compared, GridComparison

#: Size of the drawing and of its margins, in units that are a CSS pixel on a narrow page.
_WIDTH, _HEIGHT = 360, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 40
_STYLE = """
.curve { width: 100%; max-width: 600px; height: auto; display: block; }
.curve text { fill: var(--quiet); font-size: 11px; } .curve path.line { fill: none; stroke: var(--own); stroke-width: 2; }
.curve path.all { fill: none; stroke: var(--own); stroke-width: 1.2; stroke-dasharray: 4 3; }
.curve path.even { fill: none; stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 1 3; }
.curve path.grid { fill: none; stroke: var(--line); stroke-width: 1; }
.curve circle { fill: var(--panel); stroke: var(--own); stroke-width: 2; } .curve circle.used { fill: var(--own); }
"""


def write_grid_page(comparison: GridComparison, path: str) -> None:
    """Write the page; an existing file stays until the new one is complete."""
    body = [_section(grid) for grid in comparison.grids if curves(grid)]
    style = (files("autopar.report.html") / "page.css").read_text(encoding="utf-8") + _STYLE
    title = "Step time over the number of devices"
    about = (
        "Predicted. Filled points use the given number of devices. Hollow points use fewer, because more do not make the step"
        " faster: the dashed line is the step on all devices. Dotted: the step of the fewest devices, divided evenly."
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", style),
    )
    page = el("html", head, el("body", el("h1", title), el("p", about, class_="about"), el("main", *body)), lang="en")
    write_whole(f"<!doctype html>\n{written(page)}\n", path)


def _section(grid: Compared) -> Element:
    found = curves(grid)
    names = [el("li", el("span", class_=f"swatch {_colour(n)}"), curve.profile.name) for n, curve in enumerate(found)]
    heads = ("devices", "step time", "speedup", "efficiency", "peak memory", "used", "strategy")
    tables: list[Element] = []
    for curve in found:
        rows = [_row(curve, point) for point in curve.points]
        tables += [el("h3", curve.profile.name), table(heads, rows, numbers=heads[:5], name=curve.profile.name)]
    return el("section", el("h2", grid.target), el("ul", *names, class_="legend"), _drawing(found), *tables)


def _row(curve: Curve, point: Point) -> Element:
    prediction = point.used.prediction
    efficiency = curve.efficiency(point)
    return el(
        "tr",
        cell(str(point.num_devices), value=point.num_devices),
        cell(human_seconds(point.step_time_s), value=point.step_time_s),
        cell(f"{curve.speedup(point):.1f}x", value=curve.speedup(point)),
        cell(f"{100 * efficiency:.0f} %", value=efficiency),
        cell(human_bytes(prediction.peak_bytes), value=prediction.peak_bytes),
        cell(used_text(point)),
        cell(*in_code(point.used.strategy)),
    )


def _colour(n: int) -> str:
    return f"axis{n % 6}"


# -- the drawing -------------------------------------------------------------------------------


def _drawing(found: Sequence[Curve]) -> Element:
    """The curves on logarithmic axes, where an even division is a straight line."""
    points = [point for curve in found for point in curve.points]
    numbers = sorted({point.num_devices for point in points})
    times = [seconds for point in points for seconds in (point.step_time_s, point.on_all.prediction.step_time_s)]
    scale = _Scale(numbers[0], numbers[-1], min(times), max(times))
    marks = [mark for n, curve in enumerate(found) for mark in _marks(curve, scale, _colour(n))]
    lines = "; ".join(
        f"{curve.profile.name}: "
        + ", ".join(f"{point.num_devices} devices {human_seconds(point.step_time_s)}" for point in curve.points)
        for curve in found
    )
    drawing = el("svg", *_axes(numbers, scale), *marks, class_="curve", role="img", aria_label=lines)
    drawing.set("viewBox", f"0 0 {_WIDTH} {_HEIGHT}")
    return drawing


class _Scale:
    """Positions in the drawing of numbers of devices and of seconds."""

    def __init__(self, fewest: int, most: int, least_s: float, most_s: float) -> None:
        self._fewest, self._most = math.log2(fewest), math.log2(max(most, 2 * fewest))
        self.least_s, self.most_s = 0.9 * least_s, max(1.1 * most_s, 2 * least_s)

    def x(self, number: float) -> float:
        share = (math.log2(number) - self._fewest) / (self._most - self._fewest)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, seconds: float) -> float:
        share = math.log(max(seconds, self.least_s) / self.least_s) / math.log(self.most_s / self.least_s)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    def ticks(self) -> list[float]:
        """Seconds of the horizontal lines: 1, 2 and 5 of each power of ten; more, if they are too few."""
        first, last = math.floor(math.log10(self.least_s)), math.ceil(math.log10(self.most_s))
        for round_numbers in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            found = [m * 10.0**e for e in range(first, last + 1) for m in round_numbers]
            found = [one for one in found if self.least_s <= one <= self.most_s]
            if len(found) > 2:
                break
        return found


def _axes(numbers: Sequence[int], scale: _Scale) -> Iterator[Element]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for seconds in scale.ticks():
        y = scale.y(seconds)
        yield el("path", class_="grid", d=f"M{_LEFT} {y}H{right}")
        yield el("text", human_seconds(seconds), x=_LEFT - 6, y=y + 4, text_anchor="end")
    for number in numbers:
        yield el("text", str(number), x=scale.x(number), y=bottom + 16, text_anchor="middle")
    yield el("path", class_="grid", d=f"M{_LEFT} {bottom}H{right}")
    yield el("text", "devices", x=(_LEFT + right) / 2, y=_HEIGHT - 6, text_anchor="middle")


def _marks(curve: Curve, scale: _Scale, colour: str) -> Iterator[Element]:
    points = curve.points
    first = points[0]
    one_s = first.step_time_s * first.num_devices
    last = min(points[-1].num_devices, one_s / scale.least_s)  # the line ends at the edge of the drawing
    yield el("path", class_="even", d=_path([(first.num_devices, first.step_time_s), (last, one_s / last)], scale))
    start = next((n for n, point in enumerate(points) if not point.uses_all), None)
    if start is not None:
        on_all = [(p.num_devices, p.on_all.prediction.step_time_s) for p in points[max(0, start - 1) :]]
        yield el("path", class_=f"all {colour}", d=_path(on_all, scale))
    yield el("path", class_=f"line {colour}", d=_path([(p.num_devices, p.step_time_s) for p in points], scale))
    for point in points:
        used = "used " if point.uses_all else ""
        text = " ".join(filter(None, (f"{point.num_devices}: {human_seconds(point.step_time_s)}", used_text(point))))
        at = {"cx": scale.x(point.num_devices), "cy": scale.y(point.step_time_s)}
        yield el("circle", el("title", text), class_=f"{used}{colour}", r=4, **at)


def _path(points: Sequence[tuple[float, float]], scale: _Scale) -> str:
    return "M" + "L".join(f"{scale.x(number)} {scale.y(seconds)}" for number, seconds in points)
