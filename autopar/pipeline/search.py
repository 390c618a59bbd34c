"""The stages, their devices and the schedule of a step, found together.

In: prices of runs of layers, a cluster, a number of microbatches. Out: the `StagedStep` whose simulated step is shortest
among those that fit. For each schedule the partition is found by its objective (`objectives.py`), which knows no more
than a sum and a maximum; the best of its partitions are then simulated, task by task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.cost.hardware import HardwareProfile
from autopar.pipeline.cluster import Cluster, SubmeshShape
from autopar.pipeline.objectives import forward_only, gpipe, one_at_a_time, one_f_one_b, zb_h1
from autopar.pipeline.partition import ExactPartitioner
from autopar.pipeline.partition_problem import (
    Growth,
    Objective,
    Partition,
    Partitioner,
    PartitionProblem,
    Stage,
    StageCost,
)
from autopar.pipeline.schedules.kind import PipelineShape
from autopar.pipeline.schedules.table import build, find, unmet
from autopar.pipeline.spans import PipelineTimeline
from autopar.pipeline.staged_time import staged_peaks, staged_timeline
from autopar.pipeline.tasks import Schedule

#: Of each schedule that stages may be cut for, what it makes of their prices.
OBJECTIVES: Mapping[str, Callable[[int], Objective]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "zb-h1": zb_h1,
    "inference": forward_only,
    "none": one_at_a_time,
}

Cost = Callable[[int, int, SubmeshShape], StageCost | None]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step in stages.

    Args:
        stages, costs: in order.
        timeline: of the step, simulated.
        peak_bytes: of each stage, on one of its devices.
        partition: what the partitioner said of the stages.
    """

    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    schedule: Schedule
    timeline: PipelineTimeline
    peak_bytes: tuple[float, ...]
    partition: Partition

    @property
    def step_time_s(self) -> float:
        """Seconds of one step."""
        return self.timeline.makespan_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSearch:
    """What stages are looked for.

    Args:
        cost: prices, their backward pass in two parts; a schedule that does not split it adds them up.
        keys: layers with equal keys are equal.
        boundary_bytes: before each layer, what passes forward there for one microbatch, on all devices together.
        profiles: by kind of device.
        budget_bytes: what a device of each kind may hold.
        shapes: of submeshes.
        num_stages: exactly so many; None: any number.
    """

    cost: Cost
    keys: Sequence[int]
    boundary_bytes: Sequence[float]
    cluster: Cluster
    profiles: Mapping[str, HardwareProfile]
    budget_bytes: Mapping[str, float]
    shapes: tuple[SubmeshShape, ...]
    num_microbatches: int
    num_stages: int | None = None

    def best(
        self, schedules: Sequence[str] = ("1f1b", "gpipe", "zb-h1"), partitioner: Partitioner | None = None
    ) -> StagedStep | None:
        """The shortest step that fits; None where nothing does.

        Args:
            schedules: names of those to try.
            partitioner: by default the package's.
        """
        found = [step for name in schedules for step in self._steps(name, partitioner or ExactPartitioner())]
        return min(found, key=lambda step: step.step_time_s, default=None)

    def transfer_s(self, boundary: int, source: SubmeshShape, target: SubmeshShape, same_host: bool) -> float:
        """Seconds of one microbatch there and back, each device of the smaller side sending its part."""
        ends = (self.profiles[source.kind], self.profiles[target.kind])
        links = [end.host_link if same_host else end.network_link for end in ends]
        rate, latency = min(link.bytes_per_s for link in links), max(link.latency_s for link in links)
        senders = min(source.num_devices, target.num_devices)
        return 2 * (self.boundary_bytes[boundary] / senders / rate + latency)

    def sends_s(self, stages: Sequence[Stage]) -> list[float]:
        """Seconds of what one microbatch sends from each stage to the next, one way."""
        return [
            self.transfer_s(b.first, a.submesh.shape, b.submesh.shape, a.submesh.shares_host(b.submesh)) / 2
            for a, b in pairwise(stages)
        ]

    # -- inside ------------------------------------------------------------------------------

    def _steps(self, name: str, partitioner: Partitioner) -> Iterator[StagedStep]:
        splits = find(name).backward == "split"
        cost = self.cost if splits else _all_joined(self.cost)
        problem = PartitionProblem(
            num_layers=len(self.keys),
            cluster=self.cluster,
            cost=cost,
            transfer_s=self.transfer_s,
            objective=OBJECTIVES[name](self.num_microbatches),
            budget_bytes=self.budget_bytes,
            growth=Growth.SUPERADDITIVE,
            layer_keys=self.keys,
            shapes=self.shapes,
            num_stages=self.num_stages,
        )
        partition = partitioner.partition(problem)
        for stages in dict.fromkeys((partition.stages, *partition.others)):
            if stages and not unmet(find(name), PipelineShape(len(stages), self.num_microbatches)):
                step = self._simulated(name, stages, cost, partition)
                budgets = [self.budget_bytes[stage.submesh.shape.kind] for stage in stages]
                if all(peak <= budget for peak, budget in zip(step.peak_bytes, budgets, strict=True)):
                    yield step

    def _simulated(self, name: str, stages: Sequence[Stage], cost: Cost, partition: Partition) -> StagedStep:
        schedule = build(name, len(stages), self.num_microbatches)
        costs: list[StageCost] = []
        for stage in stages:
            price = cost(stage.first, stage.last, stage.submesh.shape)
            assert price is not None, "it is part of a partition"
            costs.append(price)

        timeline = staged_timeline(schedule, costs, self.sends_s(stages))
        return StagedStep(tuple(stages), tuple(costs), schedule, timeline, staged_peaks(schedule, costs), partition)


def joined(cost: StageCost) -> StageCost:
    """The price of a stage whose backward pass is not split."""
    return replace(cost, backward_s=cost.backward_s + cost.weight_s, weight_s=0.0)


def _all_joined(cost: Cost) -> Cost:
    """Prices of a backward pass that is not split."""

    def of(first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        found = cost(first, last, shape)
        return found and joined(found)

    return of
