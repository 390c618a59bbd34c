"""Export one device's step as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

In: a plan. Out: the trace as JSON types in Chrome's trace event format, or a file: a thread of kernels, a thread of
collectives, and a counter of live memory; times in microseconds from the start of the step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.errors import PlotError
from autopar.pipeline.draw.file import write_drawing
from autopar.plans.plan import Plan
from autopar.plans.step_trace import StepTrace
from autopar.report.breakdown import MemoryUse, memory_use
from autopar.system.chrome_trace import named, slice_of, trace_of

_KERNELS, _COLLECTIVES = 0, 1


def write_step(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write the trace atomically.

    Raises:
        PlotError: the file cannot be written, does not end in `.json`, or the plan's file is too old to have a
            timeline.
    """
    if plan.trace is None:
        raise PlotError(
            f"the plan of `{plan.program.name}` does not say what runs when: its file is of an older version, or it runs"
            " nothing. Plan again"
        )
    if Path(path).suffix != ".json":
        raise PlotError(
            f"cannot draw one program into {str(path)!r}: give a file that ends in .json, which ui.perfetto.dev shows,"
            " or `autopar explain --html FILE`"
        )
    write_drawing(path, json.dumps(step_perfetto(plan.trace, memory_use(plan), plan)))


def step_perfetto(trace: StepTrace, memory: MemoryUse, plan: Plan) -> dict[str, Any]:
    """The trace as JSON types."""
    title = f"one device of `{plan.program.name}`, predicted"
    events = [
        named("process_name", 0, 0, title),
        named("thread_name", 0, _KERNELS, "kernels"),
        named("thread_name", 0, _COLLECTIVES, "collectives"),
        *_kernels(trace),
        *_collectives(trace),
        *_memory(memory, plan.prediction.step_time_s),
    ]
    return trace_of(events)


def _kernels(trace: StepTrace) -> Iterator[dict[str, Any]]:
    kernels = trace.kernels
    for place, start, ns in zip(kernels.place, kernels.start_ns, kernels.ns, strict=True):
        phase, path = trace.places[place]
        about = {"phase": phase, "iterations": _iterations(trace, start)}
        yield slice_of(path or phase, phase, (0, _KERNELS), (start / 1e3, ns / 1e3), about)


def _collectives(trace: StepTrace) -> Iterator[dict[str, Any]]:
    sent = trace.collectives
    columns = (sent.kind, sent.place, sent.start_ns, sent.ns, sent.exposed_ns, sent.num_bytes, sent.count)
    for kind, place, start, ns, exposed, size, count in zip(*columns, strict=True):
        name, axes = trace.kinds[kind]
        phase, path = trace.places[place]
        about = {"phase": phase, "path": path, "bytes": size, "count": count, "exposed_us": exposed / 1e3}
        yield slice_of(f"{name} over {', '.join(axes)}", name, (0, _COLLECTIVES), (start / 1e3, ns / 1e3), about)


def _iterations(trace: StepTrace, start_ns: int) -> int:
    """The trip count of the loops that contain a time: all iterations are drawn as one."""
    times = 1
    for start, end, count in trace.loops:
        if start <= start_ns < end:
            times *= count
    return times


def _memory(memory: MemoryUse, step_time_s: float) -> Iterator[dict[str, Any]]:
    count = len(memory.over_step)
    for n, held in enumerate(memory.over_step):
        at = 1e6 * step_time_s * n / count
        yield {"ph": "C", "name": "memory", "pid": 0, "ts": at, "args": {"bytes": held}}
