"""The search against all placements, each simulated."""

from __future__ import annotations

import time
from typing import Any

from autopar.placement import Layout, ModelSpec, Slo, Traffic, synthetic_trace
from autopar.placement.evaluate import Evaluator
from autopar.placement.placements import by_name
from autopar.placement.search import place
from benchmarks.inference.rows import row
from benchmarks.placement import settings
from benchmarks.placement.every_placement import every_placement

Row = dict[str, Any]
_BOUND, _CV, _RATE_PER_S = 4.0, 4.0, 3.0
#: (models, devices, seconds of the trace)
CASES = {
    "2 models, 4 devices": (2, 4, 20.0),
    "3 models, 4 devices": (3, 4, 15.0),
    "4 models, 4 devices": (4, 4, 12.0),
    "3 models, 8 devices": (3, 8, 8.0),
    "4 models, 8 devices": (4, 8, 4.0),
}


def measure(case: str) -> list[Row]:
    num_models, num_devices, seconds = CASES[case]
    times = settings.predicted_times()
    layouts = [layout for layout in settings.LAYOUTS if layout.pipeline == 1 and layout.num_devices <= num_devices]
    own: dict[Layout, Any] = {layout: times[layout] for layout in layouts}
    alone = times[Layout()].latency_s(settings.PROMPT, settings.OUTPUT)
    names = settings.NAMES[:num_models]
    models = [ModelSpec(name=name, slo=Slo(latency_s=_BOUND * alone), times=own) for name in names]
    traffic = [
        Traffic(
            model=name, rate_per_s=_RATE_PER_S, cv=_CV, prompt_tokens=settings.PROMPT, output_tokens=settings.OUTPUT
        )
        for name in names
    ]
    trace = synthetic_trace(traffic, seconds, settings.SEARCH_SEED)
    started = time.process_time()
    found = place(models, trace, num_devices, settings.BUDGET_BYTES)
    search_s = time.process_time() - started
    evaluator = Evaluator(by_name(models), trace, settings.BUDGET_BYTES)
    started, num, best = time.process_time(), 0, (-1, 0)
    for each in every_placement(by_name(models), layouts, num_devices, settings.BUDGET_BYTES):
        if {name for group in each.groups for name in group.models} == set(names):  # as the search wants it
            num += 1
            # A simulation ends when more requests are lost than with the best placement so far.
            score = evaluator.score_if(each, max(0, best[0]))
            if score is not None:
                best = max(best, (score.num_good, -each.num_devices))
    mine_is = (found.outcome.num_good, -found.placement.num_devices)
    return [
        row(f"{case}: placements", num),
        row(f"{case}: requests", trace.num_requests),
        row(f"{case}: requests within bounds, of the best placement", best[0]),
        row(f"{case}: of the one that is found, fewer", best[0] - mine_is[0], at_most=0),
        row(f"{case}: devices more than the best", best[1] - mine_is[1] if best[0] == mine_is[0] else 0, at_most=0),
        row(f"{case}: brute force", time.process_time() - started, "CPU s"),
        row(f"{case}: search", search_s, "CPU s"),
    ]
