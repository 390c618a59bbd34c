"""Cases in which model parallelism must not be chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.placement import Layout, ModelSpec, StepTimes
from autopar.placement.search import place
from benchmarks.inference.rows import row
from benchmarks.placement import settings

Row = dict[str, Any]
_ALPHAS = (0.5, 1.0, 2.0)
_BOUNDS = (5.0, 10.0)
#: Nearly as much as one device serves, so that an overhead is one too many.
_UTILIZATION = 0.7
_DURATION_S = 120.0


def slowed(times: StepTimes, alone: StepTimes, alpha: float) -> StepTimes:
    """A layout whose devices together take 1 + alpha times the time of one device."""
    share = (1 + alpha) / times.layout.num_devices
    stages = times.layout.pipeline
    stage_s = {shape: (sum(seconds) * share,) * stages for shape, seconds in alone.stage_s.items()}
    return replace(times, stage_s=stage_s)


def measure() -> list[Row]:
    times = settings.predicted_times()
    alone = times[Layout()]
    rate = _UTILIZATION / alone.latency_s(settings.PROMPT, settings.OUTPUT)
    trace = settings.trace_with(1.0, settings.SEARCH_SEED, rate, _DURATION_S)
    rows: list[Row] = []
    for alpha in _ALPHAS:
        slow = {layout: each if layout == Layout() else slowed(each, alone, alpha) for layout, each in times.items()}
        for bound in _BOUNDS:
            models = [
                ModelSpec(name=each.name, slo=each.slo, times=slow) for each in settings.models_with(times, bound)
            ]
            found = place(models, trace, settings.NUM_DEVICES, settings.BUDGET_BYTES, effort=40_000)
            parallel = sum(group.layout.num_devices > 1 for group in found.placement.groups)
            where = f"CV 1, overhead {alpha:g}, bound {bound:g}x"
            rows += [
                row(f"{where}: goodput", found.outcome.goodput),
                row(f"{where}: groups of more than one device", parallel, at_most=0),
            ]
    return rows
