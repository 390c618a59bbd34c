"""Two models on two devices: M/D/1 queues in the simulator.

The mean latency of two traces differs from the formula by sampling: its standard deviation is 1.2 %. The recursion of Lindley, which is
exact for M/D/1, is computed on the same traces and on many more, and their difference corrects the simulated mean (a control variate).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.inference.schedule.requests import Options
from autopar.placement import (
    Group,
    Layout,
    ModelSpec,
    Placement,
    Slo,
    StepTimes,
    Trace,
    Traffic,
    simulate,
    synthetic_trace,
)
from benchmarks.inference.rows import row

Row = dict[str, Any]
_ALONE_S, _RATE_PER_S, _DURATION_S = 0.4, 2.0, 20_000.0
_SEEDS = (1, 2)
#: Traces on which the recursion is computed.
_MANY = range(1, 41)


def mean_wait_s(rate_per_s: float, latency_s: float, slowest_stage_s: float) -> float:
    """The mean latency of an M/D/1 queue: W = D + rate D_m^2 / (2 (1 - rate D_m)).

    >>> round(mean_wait_s(2, 0.4, 0.4), 6), round(mean_wait_s(4, 0.4, 0.2), 6)
    (1.2, 0.8)
    """
    return latency_s + rate_per_s * slowest_stage_s**2 / (2 * (1 - rate_per_s * slowest_stage_s))


def lindley_s(trace: Trace, models: Sequence[str], slowest_stage_s: float) -> float:
    """The mean latency of the requests of some models that share a queue, by W = max(0, W - interval + D_m) from one to the next."""
    arrivals = trace.of_models(models).arrival_s
    work = slowest_stage_s * np.arange(arrivals.size)
    starts = np.maximum.accumulate(arrivals - work) + work
    return float(np.mean(starts - arrivals)) + _ALONE_S


def measure() -> list[Row]:
    options = Options(num_slots=4, max_length=128, chunks=((1, 64),), steps=1)
    apart, shared = Layout(), Layout(1, 2)
    times = {
        layout: StepTimes(
            layout=layout,
            options=options,
            stage_s=dict.fromkeys(options.shapes, (_ALONE_S / layout.pipeline,) * layout.pipeline),
        )
        for layout in (apart, shared)
    }
    models = {name: ModelSpec(name=name, slo=Slo(latency_s=1e9), times=times) for name in "ab"}
    traffic = [Traffic(model=name, rate_per_s=_RATE_PER_S, prompt_tokens=64, output_tokens=1) for name in "ab"]
    cases = {
        "a device for each": (
            Placement((Group(apart, ("a",)), Group(apart, ("b",)))),
            mean_wait_s(_RATE_PER_S, _ALONE_S, _ALONE_S),
        ),
        "two stages for both": (
            Placement((Group(shared, ("a", "b")),)),
            mean_wait_s(2 * _RATE_PER_S, _ALONE_S, _ALONE_S / 2),
        ),
    }
    rows: list[Row] = []
    for name, (placement, formula) in cases.items():
        traces = [synthetic_trace(traffic, _DURATION_S, seed) for seed in _MANY]
        queues = [group.models for group in placement.groups]
        slowest_s = _ALONE_S / placement.groups[0].layout.pipeline
        exact = [np.mean([lindley_s(trace, each, slowest_s) for each in queues]) for trace in traces]
        own = [number for number, seed in enumerate(_MANY) if seed in _SEEDS]
        means = [simulate(placement, models, traces[n], drops_late=False).mean_latency_s for n in own]
        mean, same = float(np.mean(means)), float(np.mean([exact[n] for n in own]))
        corrected = mean - same + float(np.mean(exact))
        rows += [
            row(f"{name}: formula", formula, "s"),
            row(f"{name}: simulated, mean of two traces", mean, "s"),
            row(f"{name}: the recursion on these traces", same, "s"),
            row(f"{name}: difference of both", 100 * abs(mean / same - 1), "%", at_most=0.1),
            row(f"{name}: simulated, corrected by the recursion on {len(_MANY)} traces", corrected, "s"),
            row(f"{name}: difference from the formula", 100 * abs(corrected / formula - 1), "%", at_most=2.0),
        ]
    return rows
