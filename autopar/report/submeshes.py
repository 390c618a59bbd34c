"""Summarize the use of each submesh of a pipeline plan in a step: time by phase, and memory over the step.

In: a `PipelinePlan` and its timeline. Out: `SubmeshUse`s, which every report of a pipeline plan reads.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.pipeline.partition.cluster import submeshes_of
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.schedule.in_flight import bytes_during_tasks
from autopar.pipeline.schedule.tasks import PHASES, Phase
from autopar.pipeline.schedule.timeline import PipelineTimeline


@dataclass(frozen=True, slots=True)
class SubmeshUse:
    """The use of one submesh in a step. Bytes are per device; at the peak, state, working and in-flight bytes sum up to
    the peak memory.

    Args:
        devices: the first and the last device.
        stages: the stages on the submesh.
        phases: the seconds of each phase; together with `idle_s` they sum up to the step time.
        state_bytes: bytes held throughout the step.
        working_bytes: bytes of the temporaries of one microbatch.
        in_flight: for each task, its start in seconds and the bytes during it of in-flight microbatches, and of what
            other replicas of its stages accumulated.
    """

    devices: tuple[int, int]
    stages: tuple[int, ...]
    phases: tuple[tuple[Phase, float], ...]
    idle_s: float
    state_bytes: float
    working_bytes: float
    in_flight: tuple[tuple[float, float], ...]

    @property
    def peak_bytes(self) -> float:
        return self.state_bytes + self.working_bytes + max((flight for _, flight in self.in_flight), default=0.0)


def submesh_uses(plan: PipelinePlan, timeline: PipelineTimeline) -> tuple[SubmeshUse, ...]:
    """The use of each submesh, in the order of the timeline.

    Args:
        timeline: the simulated timeline of the plan.
    """
    costs = [stage.cost for stage in plan.stages]
    streamed, submeshes = plan.streamed(), submeshes_of(plan.stages)
    schedule = plan.tasks() if streamed is None else streamed.schedule
    versions = [one.further_bytes for one in plan.weight_versions] or [0.0] * len(costs)
    flight_bytes = bytes_during_tasks(schedule, costs)
    uses = []
    for submesh, (order, during_tasks) in enumerate(zip(schedule.orders, flight_bytes, strict=True)):
        starts = {span.task: span.start_s - timeline.start_s for span in timeline.on(submesh)}
        seconds: dict[Phase, float] = defaultdict(float)
        for span in timeline.on(submesh):
            seconds[span.task.phase] += span.seconds
        stages = schedule.stages_on(submesh)
        devices = submeshes[submesh].devices
        uses.append(
            SubmeshUse(
                devices=(devices.start, devices.stop - 1),
                stages=tuple(stages),
                phases=tuple((phase, seconds[phase]) for phase in PHASES if seconds[phase]),
                idle_s=timeline.idle_s[submesh],
                state_bytes=sum(costs[stage].state_bytes + versions[stage] for stage in stages),
                working_bytes=max((costs[stage].working_bytes for stage in stages), default=0.0),
                in_flight=tuple((starts[task], bytes_) for task, bytes_ in zip(order, during_tasks, strict=True)),
            )
        )
    return tuple(uses)
