"""Print a comparison of hardware as tables, and convert it to JSON.

In: a `Comparison` or a `GridComparison`. Out: one table per step, on a console; JSON types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.comparison.device_curve import Curve, Point, curves
from autopar.plans.plan import Plan
from autopar.system.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from autopar.comparison.by_hardware import Cell, Compared, Comparison, GridComparison
    from autopar.comparison.least_devices import Fit, Refused, TrainingState

#: Length of the longest bar.
_BAR = 32
_LEGEND = (
    "`on one`: whether the step fits on one device. `least`: the least number that fits, of 1, 2, 4, ... devices of a"
    " host and 1, 2, 4, ... whole hosts; `peak` and `usable` are bytes of one device. The plan is the one with the"
    " fewest microbatches that fits; `autopar plan TARGET --mesh MESH --hardware NAME --num-microbatches auto` looks"
    " for a faster one. `before`: the next smaller number, and what it would need on each device at the least."
    " Training state is read off the step's arguments: parameters and optimizer state are carried; of each floating"
    " parameter a gradient is counted, in its dtype."
)


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Print a table for each step."""
    for one in comparison.compared:
        if one.state is None:
            continue
        console.print(Text(f"{one.target}: `{one.name}`, {_state(one.state)}", "bold"))
        if one.fits:
            console.print(Padding(_fits_table(one, comparison.max_devices), (0, 0, 0, 2)))
        console.print()
    if any(one.fits for one in comparison.compared):
        console.print(Text(_LEGEND))


def _state(state: TrainingState) -> str:
    return (
        f"{state.num_parameters:,} parameters; training state {human_bytes(state.total_bytes)}: parameters"
        f" {human_bytes(state.parameter_bytes)}, gradients {human_bytes(state.gradient_bytes)}, optimizer state"
        f" {human_bytes(state.optimizer_bytes)}"
    )


def _fits_table(one: Compared, max_devices: int) -> Table:
    names = ("hardware", "usable", "on one", "least", "mesh", "step", "peak")
    table = _table(names, left=("hardware", "on one", "mesh"))
    for fit in one.fits:
        head = (Text(fit.profile.name), Text(human_bytes(fit.budget_bytes)), Text("yes" if fit.on_one else "no"))
        if fit.plan is None:
            why = Text(f"none of at most {max_devices} devices: {_before(fit)}")
            table.add_row(*head, Text("-"), Text("-"), Text("-"), Text("-"), why)
            continue
        prediction = fit.plan.prediction
        text = Text(f"{_plan_text(fit.plan)}{'; ' if fit.refused else ''}{_before(fit)}")
        numbers = (str(fit.num_devices), str(fit.plan.mesh), human_seconds(prediction.step_time_s))
        table.add_row(*head, *map(Text, numbers), Text(human_bytes(prediction.peak_bytes)), text)
    return table


def _before(fit: Fit) -> str:
    if not fit.refused:
        return ""
    last = fit.refused[-1]
    return f"before: {last.num_devices} need {_need(last)}"


def _need(refused: Refused) -> str:
    if refused.without_plan:
        return f"an unknown amount ({refused.without_plan})"
    least = human_bytes(refused.least_bytes)
    return f"{least}" if refused.planned else f"{least} for parameters and optimizer state alone"


def render_grid(comparison: GridComparison, console: Console) -> None:
    """Print a table for each step."""
    for one in comparison.grids:
        if one.state is None:
            continue
        size = human_bytes(one.state.total_bytes)
        head = f"{one.target}: `{one.name}`, {one.state.num_parameters:,} parameters, training state {size}"
        console.print(Text(head, "bold"))
        if one.cells:
            console.print(Padding(_grid_table(one), (0, 0, 0, 2)))
            console.print(Text(f"  Least that fit: {', '.join(_least(one))}."))
        for curve in curves(one):
            if len(curve.points) > 1:
                console.print(Text(f"\n  Step time over the devices, {curve.profile.name}"))
                console.print(Padding(_curve_table(curve), (0, 0, 0, 2)))
        console.print()
    if any(one.cells for one in comparison.grids):
        console.print(Text(_legend(comparison)))


def _grid_table(grid: Compared) -> Table:
    priced = any(cell.usd_per_step is not None for cell in grid.cells)
    names = ("hardware", "devices", "mesh", "step", "peak", "usable", *(["a step"] if priced else []))
    table = _table(names, left=("hardware", "mesh"))
    before = ""
    for cell in grid.cells:
        name, before = "" if cell.profile.name == before else cell.profile.name, cell.profile.name
        table.add_row(*map(Text, (name, str(cell.num_devices), *_figures(cell, priced=priced))))
    return table


def _curve_table(curve: Curve) -> Table:
    """The step time with each number of devices, and the speed as a bar."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("devices", "step", "speedup", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("speed", no_wrap=True)
    table.add_column("")
    fastest_s = min(point.step_time_s for point in curve.points)
    for point in curve.points:
        share = fastest_s / point.step_time_s if point.step_time_s else 1.0
        figures = (str(point.num_devices), human_seconds(point.step_time_s), f"{curve.speedup(point):.1f}x")
        bar = "#" * max(1, round(_BAR * share))
        table.add_row(*map(Text, (*figures, f"{100 * curve.efficiency(point):.0f} %", bar, used_text(point))))
    return table


def used_text(point: Point) -> str:
    """How many of the devices a plan uses, if fewer are as fast; else empty."""
    if point.uses_all:
        return ""
    on_all = human_seconds(point.on_all.prediction.step_time_s)
    return f"uses {point.used.num_devices} of {point.num_devices}; on all {point.num_devices}: {on_all}"


def _figures(cell: Cell, *, priced: bool) -> list[str]:
    usable = human_bytes(cell.profile.usable_bytes)
    if cell.plan is None:
        least = cell.refused
        known = least is not None and math.isfinite(least.least_bytes) and least.num_devices == cell.num_devices
        why = f"does not fit: {human_bytes(least.least_bytes)} at the least" if known and least else "does not fit"
        return ["-", "-", "-", usable, *(["-"] if priced else []), why]
    prediction = cell.plan.prediction
    cost = "-" if cell.usd_per_step is None else f"${cell.usd_per_step:.2g}"
    figures = [str(cell.plan.mesh), human_seconds(prediction.step_time_s), human_bytes(prediction.peak_bytes), usable]
    return [*figures, *([cost] if priced else []), _plan_text(cell.plan)]


def _least(grid: Compared) -> list[str]:
    return [
        f"{fit.profile.name} {fit.num_devices if fit.num_devices is not None else 'none of these numbers'}"
        for fit in grid.fits
    ]


def _legend(comparison: GridComparison) -> str:
    legend = (
        "`peak` and `usable` are bytes of one device. Of each number the fastest plan with the fewest microbatches that fit is"
        " shown. All of it is predicted. `speedup` and `efficiency` are relative to the fewest devices that fit; with more"
        " devices than help, `autopar plan` uses the fewest that are as fast."
    )
    if any(cell.usd_per_step is not None for one in comparison.grids for cell in one.cells):
        return f"{legend} `a step`: what all devices cost for as long as it takes, by the profile's price."
    return f"{legend} No profile here has a price: `[price]` with `usd_per_device_hour` in a profile of yours gives a step's."


def _table(names: Sequence[str], left: Sequence[str]) -> Table:
    """A table with the columns `names`, right-aligned except those in `left`, and a column for the plan."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name != "hardware")
    table.add_column("plan")
    return table


def _plan_text(plan: Plan) -> str:
    """Describe a plan in one line: strategy, gradient accumulation, rematerialization."""
    parts = [plan.strategy if plan.mesh.num_devices > 1 else ""]
    if plan.microbatches is not None:
        parts.append(f"{plan.microbatches.count} microbatches")
    if plan.rematerialized:
        seconds = sum(one.time_s for one in plan.rematerialized)
        parts.append(f"values computed again, {100 * seconds / plan.prediction.step_time_s:.0f} % of the step")
    return "; ".join(part for part in parts if part) or "as it is"


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON types, in seconds and bytes; null for infinite or missing figures."""
    return {
        "format": "autopar-comparison",
        "version": 1,
        "interrupted": comparison.interrupted,
        "max_devices": comparison.max_devices,
        "targets": [_target_json(one) for one in comparison.compared],
    }


def _target_json(one: Compared) -> dict[str, Any]:
    state = one.state
    return {
        "target": one.target,
        "program": one.name,
        "error": one.error or None,
        "training_state": None if state is None else asdict(state) | {"total_bytes": state.total_bytes},
        "hardware": [_fit_json(fit) for fit in one.fits],
    }


def _fit_json(fit: Fit) -> dict[str, Any]:
    return {
        "name": fit.profile.name,
        "memory_bytes": fit.profile.hbm_bytes,
        "budget_bytes": fit.budget_bytes,
        "fits_on_one": fit.on_one,
        "least_num_devices": fit.num_devices,
        "plan": None if fit.plan is None else _plan_json(fit.plan),
        "refused": [
            asdict(one) | {"least_bytes": one.least_bytes if math.isfinite(one.least_bytes) else None}
            for one in fit.refused
        ],
    }


def _plan_json(plan: Plan) -> dict[str, Any]:
    prediction = plan.prediction
    return {
        "mesh": plan.mesh.size_of,
        "strategy": plan.strategy,
        "num_microbatches": plan.num_microbatches,
        "recomputed": [
            {"path": one.path, "saved_bytes": one.saved_bytes, "time_s": one.time_s} for one in plan.rematerialized
        ],
        "prediction": asdict(prediction) | {"peak_bytes": prediction.peak_bytes},
        "status": plan.outcome.status,
        "gap": plan.outcome.gap if math.isfinite(plan.outcome.gap) else None,
    }


def grid_json(comparison: GridComparison) -> dict[str, Any]:
    """The comparison as JSON types, in seconds and bytes; null for missing figures."""
    return {
        "format": "autopar-hardware-grid",
        "version": 1,
        "interrupted": comparison.interrupted,
        "targets": [
            {
                "target": one.target,
                "program": one.name,
                "error": one.error or None,
                "least": {fit.profile.name: fit.num_devices for fit in one.fits},
                "cells": [_cell_json(cell, _point_of(cell, one)) for cell in one.cells],
            }
            for one in comparison.grids
        ],
    }


def _point_of(cell: Cell, grid: Compared) -> Point | None:
    """The point of a cell on its curve; None if the step does not fit."""
    return next((point for curve in curves(grid) for point in curve.points if point.on_all is cell.plan), None)


def _cell_json(cell: Cell, point: Point | None) -> dict[str, Any]:
    plan = cell.plan
    prediction = plan.prediction if plan is not None else None
    return {
        "hardware": cell.profile.name,
        "num_devices": cell.num_devices,
        "usable_bytes": cell.profile.usable_bytes,
        "fits": plan is not None,
        "mesh": None if plan is None else plan.mesh.size_of,
        "strategy": None if plan is None else plan.strategy,
        "num_microbatches": None if plan is None else plan.num_microbatches,
        "prediction": None if prediction is None else asdict(prediction) | {"peak_bytes": prediction.peak_bytes},
        "usd_per_step": cell.usd_per_step,
        "used_num_devices": None if point is None else point.used.num_devices,
        "used_step_time_s": None if point is None else point.step_time_s,
    }
