"""Plot a comparison of kinds and numbers of devices.

In: a `GridComparison`. Out: an image file, drawn by matplotlib.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.comparison.device_curve import Point, curves
from autopar.errors import PlotError

if TYPE_CHECKING:
    from autopar.comparison.by_hardware import Compared, GridComparison

#: Markers that distinguish the lines of a plot without colour.
_MARKERS = "osD^vPX*"


def plot_grid(comparison: GridComparison, path: str) -> None:
    """Plot step time and memory over the number of devices: one line per kind of device, one row per step.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    grids = [one for one in comparison.grids if any(cell.plan for cell in one.cells)]
    priced = any(cell.usd_per_step is not None for one in grids for cell in one.cells)
    columns = 3 if priced else 2
    rows = max(1, len(grids))
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(4.6 * columns, 0.9 + 3.6 * rows), layout="constrained", dpi=110
    )
    panels = figure.subplots(rows, columns, squeeze=False)
    for grid, row in zip(grids, panels, strict=False):
        _draw(grid, row)
    if grids:
        lines, names = panels[0][0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=min(4, len(names)))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: a file extension that matplotlib does not support
        raise PlotError(
            f"cannot draw into {path!r}: {error}; give a .png, .svg or .pdf file in a writable folder"
        ) from error


def _draw(grid: Compared, panels: Any) -> None:
    names = list(dict.fromkeys(cell.profile.name for cell in grid.cells))
    numbers = sorted({cell.num_devices for cell in grid.cells})
    points = {curve.profile.name: curve.points for curve in curves(grid)}
    for n, name in enumerate(names):
        cells = sorted((c for c in grid.cells if c.profile.name == name and c.plan), key=lambda c: c.num_devices)
        at = [cell.num_devices for cell in cells]
        plans = [cell.plan.prediction for cell in cells if cell.plan is not None]
        style = {"marker": _MARKERS[n % len(_MARKERS)], "markerfacecolor": "none", "color": f"C{n}", "label": name}
        _draw_times(panels[0], points.get(name, ()), style)
        panels[1].plot(at, [prediction.peak_bytes / 1e9 for prediction in plans], **style)
        usable = next(cell.profile.usable_bytes for cell in grid.cells if cell.profile.name == name)
        panels[1].axhline(usable / 1e9, color=f"C{n}", linestyle=":", linewidth=1.0)
        if len(panels) > 2:
            costs = [(c.num_devices, 1e3 * c.usd_per_step) for c in cells if c.usd_per_step is not None]
            panels[2].plot([number for number, _ in costs], [cost for _, cost in costs], **style)
    tickers = importlib.import_module("matplotlib.ticker")
    titles = (
        f"{grid.target}\nstep time, ms (dashed: on all devices,\nwhere fewer are as fast)",
        "peak memory of a device, GB\n(dotted: usable)",
        "1,000 steps, $",
    )
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_xticks(numbers, [str(number) for number in numbers])
        panel.set_xlabel("devices")
        panel.grid(visible=True, which="major", color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[1:]:
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
    panels[0].set_yscale("log")  # linear scaling is a straight line
    panels[0].yaxis.set_major_locator(tickers.LogLocator(subs=(1.0, 2.0, 5.0)))
    panels[0].yaxis.set_major_formatter("{x:,g}")
    panels[0].yaxis.set_minor_formatter(tickers.NullFormatter())


def _draw_times(panel: Any, points: Sequence[Point], style: Mapping[str, Any]) -> None:
    """Plot the step time of the plans, and of the plans that use all devices where fewer are as fast."""
    panel.plot([point.num_devices for point in points], [1e3 * point.step_time_s for point in points], **style)
    first = next((n for n, point in enumerate(points) if not point.uses_all), None)
    if first is not None:
        others = points[max(0, first - 1) :]
        times = [1e3 * point.on_all.prediction.step_time_s for point in others]
        panel.plot([point.num_devices for point in others], times, color=style["color"], linestyle="--", linewidth=1.0)
