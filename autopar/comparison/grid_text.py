"""A comparison of kinds and numbers of devices for people and for programs.

In: a `GridComparison`. Out: a table for each step, on a console; a plot; or JSON types.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.comparison.by_hardware_text import plan_words
from autopar.errors import PlotError
from autopar.system.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from autopar.comparison.by_hardware_and_count import Cell, Grid, GridComparison

#: Lines of a plot: told apart without colour too.
_MARKERS = "osD^vPX*"


def render_grid(told: GridComparison, console: Console) -> None:
    """Print a table for each step."""
    for one in told.grids:
        if one.state is None:
            continue
        size = human_bytes(one.state.total_bytes)
        head = f"{one.target}: `{one.name}`, {one.state.num_parameters:,} parameters, training state {size}"
        console.print(Text(head, "bold"))
        if one.cells:
            console.print(Padding(_table(one), (0, 0, 0, 2)))
            console.print(Text(f"  Least that fit: {', '.join(_least(one))}."))
        console.print()
    if any(one.cells for one in told.grids):
        console.print(Text(_legend(told)))


def _table(grid: Grid) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    priced = any(cell.usd_per_step is not None for cell in grid.cells)
    for name in ("hardware", "devices", "mesh", "step", "peak", "usable", *(["a step"] if priced else [])):
        right = name not in ("hardware", "mesh")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "hardware")
    table.add_column("plan")
    before = ""
    for cell in grid.cells:
        name, before = "" if cell.profile.name == before else cell.profile.name, cell.profile.name
        table.add_row(*map(Text, (name, str(cell.num_devices), *_figures(cell, priced=priced))))
    return table


def _figures(cell: Cell, *, priced: bool) -> list[str]:
    usable = human_bytes(cell.profile.usable_bytes)
    if cell.plan is None:
        least = cell.refused
        known = least is not None and math.isfinite(least.least_bytes) and least.num_devices == cell.num_devices
        why = f"does not fit: {human_bytes(least.least_bytes)} at the least" if known and least else "does not fit"
        return ["-", "-", "-", usable, *(["-"] if priced else []), why]
    told = cell.plan.prediction
    cost = "-" if cell.usd_per_step is None else f"${cell.usd_per_step:.2g}"
    figures = [str(cell.plan.mesh), human_seconds(told.step_time_s), human_bytes(told.peak_bytes), usable]
    return [*figures, *([cost] if priced else []), plan_words(cell.plan)]


def _least(grid: Grid) -> list[str]:
    return [
        f"{fit.profile.name} {fit.num_devices if fit.num_devices is not None else 'none of these numbers'}"
        for fit in grid.least
    ]


def _legend(told: GridComparison) -> str:
    legend = (
        "`peak` and `usable` are bytes of one device. Of each number the fastest plan with the fewest microbatches that fit is"
        " shown. All of it is predicted."
    )
    if any(cell.usd_per_step is not None for one in told.grids for cell in one.cells):
        return f"{legend} `a step`: what all devices cost for as long as it takes, by the profile's price."
    return f"{legend} No profile here has a price: `[price]` with `usd_per_device_hour` in a profile of yours gives a step's."


def plot_grid(told: GridComparison, path: str) -> None:
    """Draw step time and memory over the number of devices, a line for each kind; a row for each step.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    grids = [one for one in told.grids if any(cell.plan for cell in one.cells)]
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
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        raise PlotError(f"cannot draw into {path!r}: {error}") from error


def _draw(grid: Grid, panels: Any) -> None:
    names = list(dict.fromkeys(cell.profile.name for cell in grid.cells))
    numbers = sorted({cell.num_devices for cell in grid.cells})
    for n, name in enumerate(names):
        cells = sorted((c for c in grid.cells if c.profile.name == name and c.plan), key=lambda c: c.num_devices)
        at = [cell.num_devices for cell in cells]
        plans = [cell.plan.prediction for cell in cells if cell.plan is not None]
        style = {"marker": _MARKERS[n % len(_MARKERS)], "markerfacecolor": "none", "color": f"C{n}", "label": name}
        panels[0].plot(at, [1e3 * told.step_time_s for told in plans], **style)
        panels[1].plot(at, [told.peak_bytes / 1e9 for told in plans], **style)
        usable = next(cell.profile.usable_bytes for cell in grid.cells if cell.profile.name == name)
        panels[1].axhline(usable / 1e9, color=f"C{n}", linestyle=":", linewidth=1.0)
        if len(panels) > 2:
            costs = [(c.num_devices, 1e3 * c.usd_per_step) for c in cells if c.usd_per_step is not None]
            panels[2].plot([number for number, _ in costs], [cost for _, cost in costs], **style)
    tickers = importlib.import_module("matplotlib.ticker")
    titles = (f"{grid.target}\nstep time, ms", "peak memory of a device, GB\n(dotted: usable)", "1,000 steps, $")
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_xticks(numbers, [str(number) for number in numbers])
        panel.set_xlabel("devices")
        panel.grid(visible=True, which="major", color="0.9")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[1:]:
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
    panels[0].set_yscale("log")  # half of it for twice the devices is a straight line
    panels[0].yaxis.set_major_locator(tickers.LogLocator(subs=(1.0, 2.0, 5.0)))
    panels[0].yaxis.set_major_formatter("{x:,g}")
    panels[0].yaxis.set_minor_formatter(tickers.NullFormatter())


def grid_json(told: GridComparison) -> dict[str, Any]:
    """As JSON types: plain seconds and bytes, null for what was not found."""
    return {
        "format": "autopar-hardware-grid",
        "version": 1,
        "interrupted": told.interrupted,
        "targets": [
            {
                "target": one.target,
                "program": one.name,
                "error": one.error or None,
                "least": {fit.profile.name: fit.num_devices for fit in one.least},
                "cells": [_cell_json(cell) for cell in one.cells],
            }
            for one in told.grids
        ],
    }


def _cell_json(cell: Cell) -> dict[str, Any]:
    plan = cell.plan
    told = plan.prediction if plan is not None else None
    return {
        "hardware": cell.profile.name,
        "num_devices": cell.num_devices,
        "usable_bytes": cell.profile.usable_bytes,
        "fits": plan is not None,
        "mesh": None if plan is None else dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)),
        "strategy": None if plan is None else plan.words,
        "num_microbatches": None if plan is None else plan.microbatches.count if plan.microbatches else 1,
        "prediction": None if told is None else asdict(told) | {"peak_bytes": told.peak_bytes},
        "usd_per_step": cell.usd_per_step,
    }
