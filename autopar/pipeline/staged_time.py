"""What a step in stages takes, by the prices of its stages.

In: a schedule, the price of each stage, seconds between neighbours. Out: the simulated `PipelineTimeline`; the bytes that
each stage holds at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.in_flight import held_most
from autopar.pipeline.partition_problem import StageCost
from autopar.pipeline.simulate import simulate
from autopar.pipeline.spans import PipelineTimeline
from autopar.pipeline.tasks import Schedule, Task


def staged_timeline(schedule: Schedule, costs: Sequence[StageCost], sends_s: Sequence[float]) -> PipelineTimeline:
    """When the tasks of a step run.

    Args:
        costs: of each stage. Where its backward pass is not split and the schedule does not split it, `weight_s` is 0.
        sends_s: seconds of what one microbatch sends from each stage to the next, either way; one less than stages.
    """
    submesh_of = schedule.submesh_of()

    def seconds(task: Task) -> float:
        own = costs[task.stage]
        if task.phase == "forward":
            return own.forward_s
        if task.phase == "update":
            return own.update_s
        return own.weight_s if task.phase == "weight" else own.backward_s

    def transfer_s(source: Task, target: Task) -> float:
        if submesh_of[source] == submesh_of[target]:
            return 0.0
        first, last = sorted((source.stage, target.stage))
        return sum(sends_s[first:last])

    return simulate(schedule, seconds, transfer_s)


def staged_peaks(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[float, ...]:
    """Bytes on one device of each submesh of a schedule, at most: what its stages hold always, what the largest works
    with, and what microbatches in flight hold."""
    held = held_most(schedule, lambda stage: costs[stage].flight_bytes)
    return tuple(
        sum(costs[stage].state_bytes for stage in stages)
        + max((costs[stage].working_bytes for stage in stages), default=0.0)
        + most
        for stages, most in zip(map(schedule.stages_on, range(schedule.num_submeshes)), held, strict=True)
    )
