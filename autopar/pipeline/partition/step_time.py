"""What a step in stages takes, by the prices of its stages.

In: a schedule, the price of each stage, what stages send each other. Out: the simulated `PipelineTimeline`; the bytes that
each stage holds at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.schedule.in_flight import held_most
from autopar.pipeline.schedule.simulate import Seconds, simulate
from autopar.pipeline.schedule.tasks import Schedule, Task
from autopar.pipeline.schedule.timeline import PipelineTimeline


@dataclass(frozen=True, slots=True)
class Send:
    """What one stage makes and another reads.

    Args:
        source, target: stages, the lower one first.
        num_bytes: of one microbatch, from all devices together; 0 where both stand on the same ones.
        seconds: of that, and of the gradients that come back: either way.
    """

    source: int
    target: int
    num_bytes: float
    seconds: float


def task_seconds(costs: Sequence[StageCost]) -> Seconds:
    """What each task takes, by the costs of stages."""

    def seconds(task: Task) -> float:
        own = costs[task.stage]
        if task.phase == "forward":
            return own.forward_s
        if task.phase == "update":
            return own.update_s
        return own.weight_s if task.phase == "weight" else own.backward_s

    return seconds


def staged_timeline(schedule: Schedule, costs: Sequence[StageCost], sends: Iterable[Send]) -> PipelineTimeline:
    """When the tasks of a step run.

    Args:
        costs: of each stage. Where its backward pass is not split and the schedule does not split it, `weight_s` is 0.
        sends: between all stages that wait for one another.
    """
    sent_s = {(one.source, one.target): one.seconds for one in sends}

    def transfer_s(source: Task, target: Task) -> float:
        stages = (source.stage, target.stage)
        return sent_s[min(stages), max(stages)]

    return simulate(schedule, task_seconds(costs), transfer_s)


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
