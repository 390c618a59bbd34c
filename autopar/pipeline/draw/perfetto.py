"""Export a step's timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

In: `PipelineTimeline`s.
Out: the trace as JSON types, in Chrome's trace event format: a process per timeline, a thread per submesh, a slice per
task, with times in microseconds from the start of the step.
"""

from __future__ import annotations

from typing import Any

from autopar.pipeline.draw.palette import label
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.system.chrome_trace import named, slice_of, trace_of


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
