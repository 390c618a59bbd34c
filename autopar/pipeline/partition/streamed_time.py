"""Compute the step time, the timeline and the memory of an asynchronous pipeline from the costs of its stages.

In: an asynchronous schedule, the cost of each stage, and the transfers between stages.
Out: `StreamedTime`. A stream is simulated with one number of batches and with one more: the difference is the time of a step
after filling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.pipeline.partition.cluster import Submesh
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.partition.sends import Send
from autopar.pipeline.partition.step_time import staged_peaks, staged_timeline
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import Edges, Phase, Schedule, Task
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.pipeline.schedule.versions import (
    alive_during,
    delays_of,
    distances_of,
    mean_by_stage,
    most_corrected,
    most_kept,
    read_between,
    versions_read,
)


@dataclass(frozen=True, slots=True)
class ReadBy:
    """What reads a value of each version.

    Args:
        phases: the passes that read it.
        is_converted: whether it is computed from the weights when a pass first reads it; else it is one of them.
    """

    phases: frozenset[Phase]
    is_converted: bool


@dataclass(frozen=True, slots=True)
class StreamedTime:
    """A stream of batches.

    Args:
        schedule: the tasks of enough batches to fill the pipeline and some more.
        timeline: these tasks, simulated.
        reads: the version that each reads.
        step_s: seconds of a step after filling.
        bubble_fraction: the idle fraction of all submeshes' time after filling.
        peak_bytes: the peak per device of each submesh, with one version of the weights.
        corrects: whether backward passes move the weights that they read back to the version of their forward pass.
    """

    schedule: Schedule
    timeline: PipelineTimeline
    reads: dict[Task, int]
    step_s: float
    bubble_fraction: float
    peak_bytes: tuple[float, ...]
    corrects: bool = False

    def copies(self) -> tuple[int, ...]:
        """The most versions of each stage's weights that are alive at once."""
        return most_kept(self.schedule, self.reads)

    def corrected(self) -> tuple[int, ...]:
        """The most versions of each stage's weights, moved back for backward passes, that are alive at once."""
        return most_corrected(self.schedule, self.reads) if self.corrects else (0,) * self.schedule.num_stages

    def further_copies(self) -> tuple[int, ...]:
        """The copies of each stage's weights beside one: further versions, those moved back, and velocities."""
        each = zip(self.copies(), self.corrected(), strict=True)
        return tuple(copies - 1 + corrected + bool(corrected) for copies, corrected in each)

    def most_bytes(self, stage: int, sizes: Mapping[ReadBy, float]) -> float:
        """The most bytes of all versions together.

        Args:
            sizes: bytes of one version, by what reads it.
        """
        counts = [(size, self._alive(by)) for by, size in sizes.items()]
        tasks = (task for task in self.reads if task.stage == stage)
        return max(sum(size * len(alive[task]) for size, alive in counts) for task in tasks)

    def _alive(self, by: ReadBy) -> dict[Task, tuple[int, ...]]:
        moved = (
            {task for task, distance in distances_of(self.reads).items() if distance} if self.corrects else set[Task]()
        )

        def is_reader(task: Task) -> bool:
            return task.phase in by.phases and task not in moved

        alive = read_between if by.is_converted else alive_during
        return alive(self.schedule, self.reads, is_reader)

    def delays(self, per_update: int) -> tuple[tuple[int, int], ...]:
        """For each stage the least and the largest delay of a gradient after filling, in updates."""
        first = self.schedule.num_stages + per_update
        found: list[list[int]] = [[] for _ in range(self.schedule.num_stages)]
        for task, delay in delays_of(self.reads, per_update).items():
            if task.microbatch >= first:
                found[task.stage].append(delay)
        return tuple((min(own), max(own)) for own in found)


def num_filling(num_stages: int, num_microbatches: int) -> int:
    """The number of batches after which every version, and every lifetime of one, is that of a filled pipeline."""
    return -(-2 * num_stages // num_microbatches) + 3


def lateness(kind: ScheduleKind, num_stages: int, num_microbatches: int) -> tuple[tuple[float, float], ...]:
    """For each stage, means over the microbatches of a batch after filling, in updates: the delay of gradients, and the distance
    between the versions that backward and forward pass read."""
    count = num_filling(num_stages, num_microbatches)
    reads = versions_read(build(kind, num_stages, num_microbatches, num_updates=count), kind.reads, num_microbatches)
    delays, distances = delays_of(reads, num_microbatches), distances_of(reads)
    means = (mean_by_stage(one, num_stages, num_microbatches) for one in (delays, distances))
    return tuple(zip(*means, strict=True))


def streamed_time(
    kind: ScheduleKind,
    num_microbatches: int,
    edges: Edges,
    costs: Sequence[StageCost],
    sends: Sequence[Send],
    submeshes: Sequence[Submesh],
) -> StreamedTime:
    """Simulate a stream of batches.

    Args:
        kind: an asynchronous schedule.
        num_microbatches: the number of microbatches per batch, which is one update.
        edges, sends: between stages. costs, submeshes: of each stage.
    """
    p = len(costs)
    count = num_filling(p, num_microbatches)
    shorter, longer = (build(kind, p, num_microbatches, edges=edges, num_updates=n) for n in (count, count + 1))
    before, timeline = (staged_timeline(one, costs, sends, submeshes) for one in (shorter, longer))
    step_s = timeline.makespan_s - before.makespan_s
    busy_s = sum(num_microbatches * cost.pass_s + cost.update_s for cost in costs)
    bubble = max(0.0, 1 - busy_s / (p * step_s)) if step_s else 0.0
    reads = versions_read(longer, kind.reads, num_microbatches)
    peaks = staged_peaks(longer, costs)
    return StreamedTime(longer, timeline, reads, step_s, bubble, peaks, kind.reads.corrects)
