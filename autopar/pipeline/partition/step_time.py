"""Compute the step time and the peak memory of a pipeline from the costs of its stages.

In: a schedule, the cost of each stage, and the transfers between stages.
Out: the simulated `PipelineTimeline`, and the peak bytes of each submesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.schedule.in_flight import peak_held
from autopar.pipeline.schedule.simulate import Seconds, simulate
from autopar.pipeline.schedule.tasks import Schedule, Task
from autopar.pipeline.schedule.timeline import PipelineTimeline


@dataclass(frozen=True, slots=True)
class Send:
    """The values that one stage sends to another.

    Args:
        source, target: the stages, the lower one first.
        num_bytes: the bytes of one microbatch, from all devices together; 0 if both stages use the same devices.
        seconds: the seconds of the transfer, and equally of the gradients' transfer back.
    """

    source: int
    target: int
    num_bytes: float
    seconds: float


def task_seconds(costs: Sequence[StageCost]) -> Seconds:
    """The duration of each task, by the costs of stages."""

    def seconds(task: Task) -> float:
        own = costs[task.stage]
        if task.phase == "forward":
            return own.forward_s
        if task.phase == "update":
            return own.update_s
        return own.weight_s if task.phase == "weight" else own.backward_s

    return seconds


def staged_timeline(schedule: Schedule, costs: Sequence[StageCost], sends: Iterable[Send]) -> PipelineTimeline:
    """Simulate the tasks of a step.

    Args:
        costs: the cost of each stage. `weight_s` is 0 unless the schedule splits the backward pass.
        sends: the transfers between all stages that depend on each other.
    """
    sent_s = {(one.source, one.target): one.seconds for one in sends}

    def transfer_s(source: Task, target: Task) -> float:
        stages = (source.stage, target.stage)
        return sent_s[min(stages), max(stages)]

    return simulate(schedule, task_seconds(costs), transfer_s)


def staged_peaks(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[float, ...]:
    """Peak bytes per device of each submesh: the state of all its stages, the largest working set, and the stashed
    activations of in-flight microbatches."""
    flight_bytes = peak_held(schedule, lambda stage: costs[stage].flight_bytes)
    return tuple(
        sum(costs[stage].state_bytes for stage in stages)
        + max((costs[stage].working_bytes for stage in stages), default=0.0)
        + most
        for stages, most in zip(map(schedule.stages_on, range(schedule.num_submeshes)), flight_bytes, strict=True)
    )
