"""A step's timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing load.

In: `PipelineTimeline`s. Out: the trace as JSON types, in Chrome's trace event format: a process for each timeline, a
thread for each submesh, a slice for each task, times in microseconds from the start of the step.
"""

from __future__ import annotations

from typing import Any

from autopar.pipeline.draw.palette import label
from autopar.pipeline.schedule.timeline import PipelineTimeline


def perfetto_trace(*timelines: PipelineTimeline) -> dict[str, Any]:
    """To be written by `json.dump`."""
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append(_named("process_name", process, 0, timeline.title))
        for submesh in range(timeline.num_submeshes):
            events.append(_named("thread_name", process, submesh, f"submesh {submesh}"))
            stages = timeline.stages_on(submesh)
            events += [
                {
                    "ph": "X",
                    "name": label(span.task, stages),
                    "cat": span.task.phase,
                    "pid": process,
                    "tid": submesh,
                    "ts": 1e6 * (span.start_s - timeline.start_s),
                    "dur": 1e6 * span.seconds,
                    "args": {"stage": span.task.stage, "microbatch": span.task.microbatch, "task": str(span.task)},
                }
                for span in timeline.on(submesh)
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
