"""Number the instances of stages: one for each stage and submesh that runs it.

In: a schedule.
Out: `Instances`. Most schedules run each stage on one submesh; then an instance is a stage. Others have replicas of
each stage, which divide the microbatches among them and hold equal state. A microbatch runs on the same replica of every
stage, so stages send to stages of their own replica. The instances of the first replicas come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.pipeline.schedule.tasks import Schedule, Task


@dataclass(frozen=True)
class Instances:
    """The instances of the stages of a schedule.

    Args:
        schedule: a schedule whose stages have equally many replicas, with equal microbatches (`verifier.check_replicas`).
    """

    schedule: Schedule

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    @property
    def num_replicas(self) -> int:
        return self.schedule.num_replicas

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The stage and the replica of each instance."""
        return ((stage, replica) for replica in range(self.num_replicas) for stage in range(self.num_stages))

    def of(self, stage: int) -> range:
        """The instances of a stage, by replica."""
        return range(stage, self.num_stages * self.num_replicas, self.num_stages)

    def of_task(self, task: Task) -> int:
        """The instance that runs a task of a microbatch."""
        submesh = self.schedule.place_of[task.stage, task.microbatch]
        return self.of(task.stage)[self.schedule.replicas[task.stage].index(submesh)]

    def stage(self, instance: int) -> int:
        """The stage of an instance."""
        return instance % self.num_stages

    def replica(self, instance: int) -> int:
        """The replica of its stage that an instance is."""
        return instance // self.num_stages

    def submesh(self, instance: int) -> int:
        """The submesh of an instance, by its number in the schedule."""
        return self.schedule.replicas[self.stage(instance)][self.replica(instance)]

    def peers(self, instance: int) -> list[int]:
        """The other instances of its stage."""
        return [other for other in self.of(self.stage(instance)) if other != instance]
