"""Compute the step time and the peak memory of a pipeline from the costs of its stages.

In: a schedule, the cost of each stage, and the transfers between stages.
Out: the simulated `PipelineTimeline`, and the peak bytes of each submesh.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from autopar.pipeline.partition.cluster import Submesh
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.partition.sends import Send, links_of
from autopar.pipeline.schedule.in_flight import bytes_during_tasks
from autopar.pipeline.schedule.simulate import Seconds, simulate
from autopar.pipeline.schedule.tasks import Schedule, Task
from autopar.pipeline.schedule.timeline import PipelineTimeline


def task_seconds(costs: Sequence[StageCost], share: Seconds = lambda task: 1.0) -> Seconds:
    """The duration of each task, by the costs of stages.

    Args:
        share: the share of a task in a whole microbatch's seconds.
    """

    def seconds(task: Task) -> float:
        own = costs[task.stage]
        if task.phase == "forward":
            return share(task) * own.forward_s
        if task.phase == "update":
            return own.update_s
        return share(task) * (own.weight_s if task.phase == "weight" else own.backward_s)

    return seconds


def staged_timeline(
    schedule: Schedule, costs: Sequence[StageCost], sends: Iterable[Send], submeshes: Sequence[Submesh]
) -> PipelineTimeline:
    """Simulate the tasks of a step.

    What a stage gets at the start delays its first task. What it gets at the end leaves the other stage after its last
    gradient, and delays the update; a value that is computed from several stages and sent on, such as a global norm,
    counts with its first transfer only.

    Args:
        costs: the cost of each stage. `weight_s` is 0 unless the schedule splits the backward pass.
        sends: the transfers between stages; stages without one send nothing.
        submeshes: the submesh of each stage.
    """
    times = {
        (one.source, one.target, one.when): (one.seconds, links_of(one, submeshes[one.source], submeshes[one.target]))
        for one in sends
    }
    first: dict[int, Task] = {}
    last: dict[int, Task] = {}
    updates: dict[int, Task] = {}
    for order in schedule.orders:
        for task in order:
            if task.phase == "update":
                updates[task.stage] = task
            else:
                first.setdefault(task.stage, task)
                last[task.stage] = task
    at_start = [(first[target], *how) for (_, target, when), how in times.items() if when == "start"]
    at_end = [(source, target) for source, target, when in times if when == "end" and target in updates]
    if at_end:
        needs = dict(schedule.needs)
        for source, target in at_end:
            needs[updates[target]] = (*needs[updates[target]], last[source])
        schedule = replace(schedule, needs=needs)
    nothing = (0, ())

    def how(source: Task, target: Task) -> tuple[float, tuple[Hashable, ...]]:
        when = "end" if target.phase == "update" else "microbatch"
        return times.get((source.stage, target.stage, when), nothing)

    return simulate(
        schedule,
        task_seconds(costs, schedule.share),
        lambda source, target: how(source, target)[0] * (1 if target.phase == "update" else schedule.share(source)),
        lambda source, target: how(source, target)[1],
        at_start,
    )


def staged_peaks(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[float, ...]:
    """Peak bytes per device of each submesh: the state of all its stages, the largest working set, and the stashed
    activations of in-flight microbatches, with what waits for their weight parts."""
    flight_bytes = (max(during_tasks, default=0.0) for during_tasks in bytes_during_tasks(schedule, costs))
    return tuple(
        sum(costs[stage].state_bytes for stage in stages)
        + max((costs[stage].working_bytes for stage in stages), default=0.0)
        + most
        for stages, most in zip(map(schedule.stages_on, range(schedule.num_submeshes)), flight_bytes, strict=True)
    )
