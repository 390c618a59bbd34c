"""Export a step's timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

In: `PipelineTimeline`s.
Out: the trace as JSON types, in Chrome's trace event format: a process per timeline, a thread per submesh, a slice per
task, with times in microseconds from the start of the step. Other traces use the same events (`named`, `slice_of`).
"""

from __future__ import annotations

from typing import Any

from autopar.pipeline.draw.palette import label
from autopar.pipeline.schedule.timeline import PipelineTimeline


def perfetto_trace(*timelines: PipelineTimeline) -> dict[str, Any]:
    """The trace, ready for `json.dump`."""
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append(named("process_name", process, 0, timeline.title))
        for submesh in range(timeline.num_submeshes):
            events.append(named("thread_name", process, submesh, f"submesh {submesh}"))
            stages = timeline.stages_on(submesh)
            events += [
                slice_of(
                    label(span.task, stages),
                    span.task.phase,
                    (process, submesh),
                    (1e6 * (span.start_s - timeline.start_s), 1e6 * span.seconds),
                    {"stage": span.task.stage, "microbatch": span.task.microbatch, "task": str(span.task)},
                )
                for span in timeline.on(submesh)
            ]
    return trace_of(events)


def trace_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A complete trace."""
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def slice_of(
    name: str, kind: str, place: tuple[int, int], times_us: tuple[float, float], about: dict[str, Any]
) -> dict[str, Any]:
    """A slice: something that runs for a while.

    Args:
        place: process and thread.
        times_us: start and duration.
    """
    where = {"pid": place[0], "tid": place[1], "ts": times_us[0], "dur": times_us[1]}
    return {"ph": "X", "name": name, "cat": kind, **where, "args": about}


def named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
