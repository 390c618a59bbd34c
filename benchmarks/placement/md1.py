"""Two models on two devices: M/D/1 queues in the simulator."""

from __future__ import annotations

from typing import Any

from autopar.inference.schedule.requests import Options
from autopar.placement import Group, Layout, ModelSpec, Placement, Slo, StepTimes, Traffic, simulate, synthetic_trace
from benchmarks.inference.rows import row

Row = dict[str, Any]
_ALONE_S, _RATE_PER_S, _DURATION_S = 0.4, 2.0, 20_000.0
_SEEDS = (1, 2)


def mean_wait_s(rate_per_s: float, latency_s: float, slowest_stage_s: float) -> float:
    """The mean latency of an M/D/1 queue: W = D + rate D_m^2 / (2 (1 - rate D_m)).

    >>> round(mean_wait_s(2, 0.4, 0.4), 6), round(mean_wait_s(4, 0.4, 0.2), 6)
    (1.2, 0.8)
    """
    return latency_s + rate_per_s * slowest_stage_s**2 / (2 * (1 - rate_per_s * slowest_stage_s))


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
        means = [
            simulate(placement, models, synthetic_trace(traffic, _DURATION_S, seed), drops_late=False).mean_latency_s
            for seed in _SEEDS
        ]
        mean = sum(means) / len(means)
        rows += [row(f"{name}: formula", formula, "s"), row(f"{name}: simulated, mean of two traces", mean, "s")]
        rows.append(row(f"{name}: difference", 100 * abs(mean / formula - 1), "%", at_most=2.0))
    return rows
