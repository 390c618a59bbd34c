"""A comparison of hardware for people and for programs.

In: a `Comparison`. Out: a table for each step, on a console; or JSON types.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.plans.plan import Plan
from autopar.system.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from autopar.comparison.by_hardware import Compared, Comparison
    from autopar.comparison.least_devices import Fit, Refused, TrainingState

_LEGEND = (
    "`on one`: whether the step fits on one device. `least`: the least number that fits, of 1, 2, 4, ... devices of a"
    " host and 1, 2, 4, ... whole hosts; `peak` and `usable` are bytes of one device. The plan is the one with the"
    " fewest microbatches that fits; `autopar plan TARGET --mesh MESH --hardware NAME --num-microbatches auto` looks"
    " for a faster one. `before`: the next smaller number, and what it would need on each device at the least."
    " Training state is read off the step's arguments: parameters and optimizer state are carried; of each floating"
    " parameter a gradient is counted, in its dtype."
)


def render_comparison(told: Comparison, console: Console) -> None:
    """Print a table for each step."""
    for one in told.compared:
        if one.state is None:
            continue
        console.print(Text(f"{one.target}: `{one.name}`, {_state(one.state)}", "bold"))
        if one.fits:
            console.print(Padding(_table(one, told.max_devices), (0, 0, 0, 2)))
        console.print()
    if any(one.fits for one in told.compared):
        console.print(Text(_LEGEND))


def _state(state: TrainingState) -> str:
    return (
        f"{state.num_parameters:,} parameters; training state {human_bytes(state.total_bytes)}: parameters"
        f" {human_bytes(state.parameter_bytes)}, gradients {human_bytes(state.gradient_bytes)}, optimizer state"
        f" {human_bytes(state.optimizer_bytes)}"
    )


def _table(one: Compared, max_devices: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("hardware", "usable", "on one", "least", "mesh", "step", "peak"):
        right = name in ("usable", "least", "step", "peak")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "hardware")
    table.add_column("plan")
    for fit in one.fits:
        head = (Text(fit.profile.name), Text(human_bytes(fit.budget_bytes)), Text("yes" if fit.on_one else "no"))
        if fit.plan is None:
            why = Text(f"none of at most {max_devices} devices: {_before(fit)}")
            table.add_row(*head, Text("-"), Text("-"), Text("-"), Text("-"), why)
            continue
        told = fit.plan.prediction
        words = Text(f"{plan_words(fit.plan)}{'; ' if fit.refused else ''}{_before(fit)}")
        numbers = (str(fit.num_devices), str(fit.plan.mesh), human_seconds(told.step_time_s))
        table.add_row(*head, *map(Text, numbers), Text(human_bytes(told.peak_bytes)), words)
    return table


def plan_words(plan: Plan) -> str:
    """A plan in a line: what is split, how often the batch is split over time, what is computed again."""
    parts = [plan.words if plan.mesh.num_devices > 1 else ""]
    if plan.microbatches is not None:
        parts.append(f"{plan.microbatches.count} microbatches")
    if plan.recomputed:
        seconds = sum(one.time_s for one in plan.recomputed)
        parts.append(f"values computed again, {100 * seconds / plan.prediction.step_time_s:.0f} % of the step")
    return "; ".join(part for part in parts if part) or "as it is"


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


def comparison_json(told: Comparison) -> dict[str, Any]:
    """The comparison as JSON types: raw seconds and bytes, null for what is infinite or was not found."""
    return {
        "format": "autopar-comparison",
        "version": 1,
        "interrupted": told.interrupted,
        "max_devices": told.max_devices,
        "targets": [_target_json(one) for one in told.compared],
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
    told = plan.prediction
    return {
        "mesh": dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True)),
        "strategy": plan.words,
        "num_microbatches": plan.microbatches.count if plan.microbatches else 1,
        "recomputed": [
            {"path": one.path, "saved_bytes": one.saved_bytes, "time_s": one.time_s} for one in plan.recomputed
        ],
        "prediction": asdict(told) | {"peak_bytes": told.peak_bytes},
        "status": plan.outcome.status,
        "gap": plan.outcome.gap if math.isfinite(plan.outcome.gap) else None,
    }
