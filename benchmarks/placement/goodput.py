"""Twenty settings of burstiness and bound: the placement that is found, and replication."""

from __future__ import annotations

from typing import Any

from autopar.placement import Layout, ModelSpec, simulate
from autopar.placement.search import place
from benchmarks.inference.rows import row
from benchmarks.placement import settings

Row = dict[str, Any]
_MAX_REQUESTS, _EFFORT = 1500, 60_000
#: The setting in which the difference must be at least 0.2.
_HARD = (4.0, 5.0)


def measure(burstiness: str) -> list[Row]:
    """The rows of one coefficient of variation, such as `CV 4`."""
    cv = float(burstiness.removeprefix("CV "))
    times = settings.predicted_times()
    search, held_out = (settings.trace_with(cv, seed) for seed in (settings.SEARCH_SEED, settings.MEASURE_SEED))
    rows: list[Row] = []
    for bound in settings.BOUNDS:
        models = settings.models_with(times, bound)
        one = {Layout(): times[Layout()]}
        alone = [ModelSpec(name=each.name, slo=each.slo, times=one) for each in models]
        found, copies = (
            place(each, search, settings.NUM_DEVICES, settings.BUDGET_BYTES, max_requests=_MAX_REQUESTS, effort=_EFFORT)
            for each in (models, alone)
        )
        named = {each.name: each for each in models}
        good, copied = (
            simulate(each.placement, named, held_out, settings.BUDGET_BYTES).goodput for each in (found, copies)
        )
        layouts = ", ".join(f"{len(group.models)} on {group.layout.describe()}" for group in found.placement.groups)
        where = f"CV {cv:g}, bound {bound:g}x"
        rows += [row(f"{where}: replication", copied), row(f"{where}: found ({layouts})", good)]
        least = 0.2 if (cv, bound) == _HARD else 0.0
        rows.append(row(f"{where}: gain", good - copied, at_least=least))
    return rows
