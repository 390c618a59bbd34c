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
    counts with its first transfer only. Replicas send within their replica; what a stage sends to itself passes between
    its replicas.

    Args:
        costs: the cost of each stage. `weight_s` is 0 unless the schedule splits the backward pass.
        sends: the transfers between stages; stages without one send nothing.
        submeshes: the submeshes of the schedule (`cluster.submeshes_of`).
    """
    times = {(one.source, one.target, one.when): one for one in sends}
    ends = _Ends(schedule)
    at_start = [
        (ends.first[target, there], one.seconds, links_of(one, submeshes[here], submeshes[there]))
        for (source, target, when), one in times.items()
        if when == "start"
        for here, there in ends.ways(source, target)
    ]
    at_end = [
        (ends.updates[target, there], ends.last[source, here])
        for source, target, when in times
        if when == "end" and source != target
        for here, there in ends.ways(source, target)
        if (target, there) in ends.updates
    ]
    if at_end:
        needs = dict(schedule.needs)
        for update, after in at_end:
            needs[update] = (*needs[update], after)
        schedule = replace(schedule, needs=needs)
    place, last = schedule.place_of, set(ends.last.values())

    def sent(source: Task, target: Task) -> Send | None:
        if source.stage == target.stage and source not in last:  # replicas exchange what all microbatches accumulate
            return None
        return times.get((source.stage, target.stage, "end" if target.phase == "update" else "microbatch"))

    def transfer_s(source: Task, target: Task) -> float:
        one = sent(source, target)
        share = 1 if target.phase == "update" else schedule.share(source)
        return share * one.seconds if one is not None else 0

    def links(source: Task, target: Task) -> tuple[Hashable, ...]:
        one, here = sent(source, target), place[source.stage, source.microbatch]
        if one is None:
            return ()
        return links_of(one, submeshes[here], submeshes[place[target.stage, target.microbatch]])

    return simulate(schedule, task_seconds(costs, schedule.share), transfer_s, links, at_start)


class _Ends:
    """The first and the last task of each stage on each of its submeshes, and its update there.

    Attributes:
        first, last, updates: by stage and submesh.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.replicas = schedule.replicas
        self.first: dict[tuple[int, int], Task] = {}
        self.last: dict[tuple[int, int], Task] = {}
        self.updates: dict[tuple[int, int], Task] = {}
        for submesh, order in enumerate(schedule.orders):
            for task in order:
                place = task.stage, submesh
                if task.phase == "update":
                    self.updates[place] = task
                else:
                    self.first.setdefault(place, task)
                    self.last[place] = task

    def ways(self, source: int, target: int) -> list[tuple[int, int]]:
        """The submeshes of two stages, replica by replica."""
        return list(zip(self.replicas[source], self.replicas[target], strict=False))


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
