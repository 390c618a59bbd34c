"""The placement that is found against CP-SAT's bound, in requests per second without queueing."""

from __future__ import annotations

from typing import Any

from autopar.placement import ModelSpec, Traffic, simulate, synthetic_trace
from autopar.placement.expected import Demand
from autopar.placement.placements import by_name
from autopar.placement.rate_bound import largest_rates
from autopar.placement.search import place
from benchmarks.inference.rows import row
from benchmarks.placement import settings

Row = dict[str, Any]
#: (models, devices, requests per second of the first model, of which each further one has 0.8 times as many)
CASES = {
    "4 models, 4 devices": (4, 4, 9.0),
    "8 models, 8 devices": (8, 8, 18.0),
    "12 models, 8 devices": (12, 8, 18.0),
    "12 models, 16 devices": (12, 16, 30.0),
}
_BOUND = 10.0


def measure(case: str) -> list[Row]:
    num_models, num_devices, rate = CASES[case]
    times = settings.predicted_times()
    names = [f"gpt-{number}" for number in range(1, num_models + 1)]
    slo = settings.models_with(times, _BOUND)[0].slo
    models = [ModelSpec(name=name, slo=slo, times=times) for name in names]
    traffic = [
        Traffic(
            model=name,
            rate_per_s=rate * 0.8**number,
            cv=2.0,
            prompt_tokens=settings.PROMPT,
            output_tokens=settings.OUTPUT,
        )
        for number, name in enumerate(names)
    ]
    trace = synthetic_trace(traffic, 20.0, settings.SEARCH_SEED)
    found = place(models, trace, num_devices, settings.BUDGET_BYTES)
    named, demand = by_name(models), Demand(by_name(models), trace)
    solved = largest_rates(named, demand, num_devices, settings.BUDGET_BYTES)
    mine = largest_rates(named, demand, num_devices, settings.BUDGET_BYTES, only=found.placement)
    theirs = simulate(solved.placement, named, trace, settings.BUDGET_BYTES).goodput
    return [
        row(f"{case}: rate of the trace", sum(demand.rate_per_s.values()), "requests/s"),
        row(f"{case}: CP-SAT's placement", solved.rate_per_s, "requests/s"),
        row(f"{case}: CP-SAT's bound", solved.bound_per_s, "requests/s"),
        row(f"{case}: the placement that is found", mine.rate_per_s, "requests/s"),
        row(f"{case}: found over CP-SAT's", mine.rate_per_s / solved.rate_per_s, at_least=0.97),
        row(f"{case}: simulated goodput of CP-SAT's placement", theirs),
        row(f"{case}: simulated goodput of the one that is found", found.outcome.goodput),
    ]
