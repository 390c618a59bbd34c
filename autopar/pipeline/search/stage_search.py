"""The stages, their devices and the schedule of a step, found together.

In: prices of runs of layers, a cluster, a number of microbatches. Out: the `StagedStep` whose simulated step is shortest
among those that fit. For each schedule the partition is found by its objective (`objectives.py`), which knows no more
than a sum and a maximum; the best of its partitions are then simulated, task by task. All layers as one stage are
looked at by themselves: that is one program, and is priced so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.cost.hardware_profile import HardwareProfile
from autopar.pipeline.partition.cluster import Cluster, Line, Submesh, SubmeshShape, lines
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.interleaved import InterleavedPartitioner
from autopar.pipeline.partition.objectives import forward_only, gpipe, interleaved, one_at_a_time, one_f_one_b, zb_h1
from autopar.pipeline.partition.problem import (
    Growth,
    Objective,
    Partition,
    Partitioner,
    PartitionProblem,
    Shortage,
    Stage,
    StageCost,
)
from autopar.pipeline.partition.step_time import Send, staged_peaks, staged_timeline
from autopar.pipeline.schedule.kind import PipelineShape
from autopar.pipeline.schedule.table import build, find, unmet
from autopar.pipeline.schedule.tasks import Schedule
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.solve.problem import Status

#: Of each schedule that stages may be cut for, what it makes of their prices.
OBJECTIVES: Mapping[str, Callable[[int], Objective]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "zb-h1": zb_h1,
    "inference": forward_only,
    "none": one_at_a_time,
}
#: Those that are tried: gpipe takes as long as 1f1b, and holds more.
SCHEDULES = ("1f1b", "zb-h1", "interleaved")
#: How many stages a submesh has where a schedule has several.
_VIRTUAL = 2
#: Of the partitions for one schedule so many are simulated.
_MOST_SIMULATED = 3

Cost = Callable[[int, int, SubmeshShape], StageCost | None]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step in stages.

    Args:
        stages, costs: in order.
        sends: between stages.
        timeline: of the step, simulated.
        peak_bytes: of each submesh, on one of its devices.
        partition: what the partitioner said of the stages.
        layer_of: where branches are stages of their own, the layer of each unit of the forward pass.
    """

    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    sends: tuple[Send, ...]
    schedule: Schedule
    timeline: PipelineTimeline
    peak_bytes: tuple[float, ...]
    partition: Partition
    layer_of: tuple[int, ...] | None = None

    @property
    def step_time_s(self) -> float:
        """Seconds of one step."""
        return self.timeline.makespan_s

    def over(self, budget_bytes: Mapping[str, float]) -> float:
        """How many times what a device of its kind may hold the fullest one does."""
        held = enumerate(self.peak_bytes)
        return max(peak / budget_bytes[self._on(submesh).submesh.shape.kind] for submesh, peak in held)

    def _on(self, submesh: int) -> Stage:
        return self.stages[self.schedule.stages_on(submesh)[0]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search found.

    Args:
        step: None where nothing fits.
        reason: why nothing does.
        one_stage_s: of the quickest step in one stage, whether it fits or not, where one was looked at.
    """

    step: StagedStep | None
    reason: str = ""
    one_stage_s: float = math.inf


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
        alone: price of all layers as one stage; by default as any other run.
        bound: as in `PartitionProblem`; with it, all prices of a shape are asked together.
        relative_gap, time_limit_s: of the search for each schedule's partition.
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
    alone: Callable[[SubmeshShape], StageCost | None] | None = None
    bound: Callable[[int, int, SubmeshShape], StageCost] | None = None
    relative_gap: float = 5e-3
    time_limit_s: float = math.inf

    def best(self, schedules: Sequence[str] = SCHEDULES, partitioner: Partitioner | None = None) -> StagedStep | None:
        """The shortest step that fits; None where nothing does."""
        return self.outcome(schedules, partitioner).step

    def outcome(self, schedules: Sequence[str] = SCHEDULES, partitioner: Partitioner | None = None) -> Outcome:
        """The same, or why there is none. Stages on one device each are looked at by themselves, too: what is best by a
        schedule's objective need not be when it is simulated.

        Args:
            schedules: names of those to try.
            partitioner: by default the package's.
        """
        found, reasons = [], []
        several = self.shapes
        if partitioner is None and self.num_stages != 1:  # all devices as one submesh are `one_stage`'s
            several = tuple(shape for shape in self.shapes if shape.num_devices < self.cluster.num_devices)
        single = tuple(shape for shape in several if shape.num_devices == 1 and self._may_fit_each(shape))
        among = [several, *([single] if single != several and partitioner is None else [])]
        searches = [replace(self, shapes=shapes) for shapes in among if shapes]
        outcomes = [search._of_schedule(name, partitioner) for name in schedules for search in reversed(searches)]
        alone = [self.one_stage()] if self.num_stages in (None, 1) and partitioner is None else []
        for outcome in (*alone, *outcomes):
            found += [] if outcome.step is None else [outcome.step]
            reasons += [outcome.reason] if outcome.reason else []
        best = min(found, key=lambda step: step.step_time_s, default=None)
        one_stage_s = min((outcome.one_stage_s for outcome in alone), default=math.inf)
        return Outcome(best, reasons[-1] if reasons and best is None else "", one_stage_s)

    def one_stage(self) -> Outcome:
        """All layers as one stage, on any of the shapes: intra-operator parallelism alone."""
        found: list[StagedStep] = []
        least: Shortage | None = None
        quickest: dict[SubmeshShape, float] = {}  # of a shape, its first option; the others only save memory
        for shape in sorted(self.shapes, key=lambda shape: (-shape.num_devices, shape.option)):
            at_least = max(self._least_s(shape), quickest.get(replace(shape, option=0), 0.0))
            if found and at_least >= min(step.step_time_s for step in found) / (1 + self.relative_gap):
                continue
            if self.bound is not None and not self._may_fit(shape):
                continue
            mesh = _first_place(self.cluster, shape, self.shapes)
            cost = self.cost(0, len(self.keys) - 1, shape) if self.alone is None else self.alone(shape)
            if mesh is None or cost is None:
                continue
            stage = Stage(0, len(self.keys) - 1, mesh)
            step = self._simulated("1f1b", (stage,), (joined(cost),), _settled(stage, cost, self.num_microbatches))
            quickest.setdefault(replace(shape, option=0), step.step_time_s)
            budget = self.budget_bytes[shape.kind]
            if step.peak_bytes[0] <= budget:
                found.append(step)
            elif least is None or step.peak_bytes[0] - budget < least.missing_bytes:
                least = Shortage(stage, 1.0, step.peak_bytes[0], budget)
        best = min(found, key=lambda step: step.step_time_s, default=None)
        reason = str(least) if least and best is None else ""
        return Outcome(best, reason, min(quickest.values(), default=math.inf))

    def one_device_each(self, schedules: Sequence[str] = SCHEDULES) -> Outcome:
        """Inter-operator parallelism alone: every stage on one device."""
        return replace(self, shapes=tuple(shape for shape in self.shapes if shape.num_devices == 1)).outcome(schedules)

    def with_costs(self, step: StagedStep, costs: Sequence[StageCost]) -> StagedStep:
        """The same stages and schedule at other prices: of their own plans, say."""
        submeshes = len(step.schedule.orders)
        if find(step.schedule.name).backward != "split":
            costs = [joined(cost) for cost in costs]
        return self._simulated(step.schedule.name, step.stages, costs, step.partition, len(step.stages) // submeshes)

    def transfer_s(self, boundary: int, source: SubmeshShape, target: SubmeshShape, same_host: bool) -> float:
        """Seconds of one microbatch there and back."""
        return 2 * sent_s(self.boundary_bytes[boundary], source, target, same_host, self.profiles)

    def sends(self, stages: Sequence[Stage]) -> tuple[Send, ...]:
        """What one microbatch sends from each stage to the next."""
        sizes = [self.boundary_bytes[stage.first] for stage in stages[1:]]
        ends = enumerate(pairwise(stage.submesh for stage in stages))
        return tuple(sent(n, n + 1, size, *pair, self.profiles) for (n, pair), size in zip(ends, sizes, strict=True))

    # -- inside ------------------------------------------------------------------------------

    def _may_fit_each(self, shape: SubmeshShape) -> bool:
        """Whether every layer may fit on a shape by itself."""
        if self.bound is None:
            return True
        least = (self.bound(layer, layer, shape).state_bytes for layer in range(len(self.keys)))
        return all(state <= self.budget_bytes[shape.kind] for state in least)

    def _may_fit(self, shape: SubmeshShape) -> bool:
        """Whether all layers may fit on a shape, or it is the largest, which says what is missing."""
        assert self.bound is not None
        largest = max(group.num_devices for group in self.cluster.groups)
        least = self.bound(0, len(self.keys) - 1, shape).state_bytes
        return shape.num_devices == largest or least <= self.budget_bytes[shape.kind]

    def _least_s(self, shape: SubmeshShape) -> float:
        """Seconds that all layers take on a shape at the least."""
        if self.bound is None:
            return 0.0
        least = self.bound(0, len(self.keys) - 1, shape)
        return self.num_microbatches * (least.forward_s + least.backward_s + least.weight_s)

    def _of_schedule(self, name: str, partitioner: Partitioner | None) -> Outcome:
        kind = find(name)
        virtual = _VIRTUAL if name == "interleaved" else 1
        cost = self.cost if kind.backward == "split" else _joined(self.cost)
        count, gap, limit_s = self.num_microbatches, self.relative_gap, self.time_limit_s
        if partitioner is None and virtual == 1:
            partitioner = ExactPartitioner(time_limit_s=limit_s, relative_gap=gap)
        elif partitioner is None:
            partitioner = InterleavedPartitioner(virtual, time_limit_s=limit_s, relative_gap=gap)
        problem = PartitionProblem(
            num_layers=len(self.keys),
            cluster=self.cluster,
            cost=cost,
            transfer_s=self.transfer_s,
            objective=OBJECTIVES[name](count) if virtual == 1 else interleaved(count, virtual),
            budget_bytes=self.budget_bytes,
            growth=Growth.SUPERADDITIVE if self.bound is None else Growth.UNKNOWN,
            together=self.bound is not None,
            layer_keys=self.keys,
            shapes=self.shapes,
            bound=self.bound,
            num_stages=self.num_stages,
        )
        partition = partitioner.partition(problem)
        steps = list(self._steps(name, virtual, partition, cost))
        if steps:
            return Outcome(min(steps, key=lambda step: step.step_time_s))
        return Outcome(None, partition.reason)

    def _steps(self, name: str, virtual: int, partition: Partition, cost: Cost) -> Iterator[StagedStep]:
        """The best partitions that a schedule can run, simulated."""
        simulated = 0
        for stages in dict.fromkeys((partition.stages, *partition.others)):
            if len(stages) < 2 or simulated == _MOST_SIMULATED:
                continue
            if unmet(find(name), PipelineShape(len(stages) // virtual, self.num_microbatches, virtual)):
                continue
            simulated += 1
            costs = [cost(stage.first, stage.last, stage.submesh.shape) for stage in stages]
            priced = [one for one in costs if one is not None]
            assert len(priced) == len(stages), "they are part of a partition"
            step = self._simulated(name, stages, priced, partition, virtual)
            if step.over(self.budget_bytes) <= 1:
                yield step

    def _simulated(
        self, name: str, stages: Sequence[Stage], costs: Sequence[StageCost], partition: Partition, virtual: int = 1
    ) -> StagedStep:
        schedule = build(name, len(stages) // virtual, self.num_microbatches, virtual=virtual)
        sends = self.sends(stages)
        timeline, peaks = staged_timeline(schedule, costs, sends), staged_peaks(schedule, costs)
        return StagedStep(tuple(stages), tuple(costs), sends, schedule, timeline, peaks, partition)


def sent(
    source: int,
    target: int,
    num_bytes: float,
    here: Submesh,
    there: Submesh,
    profiles: Mapping[str, HardwareProfile],
) -> Send:
    """What a stage sends another for one microbatch: nothing where both stand on the same devices."""
    if here.devices == there.devices:
        return Send(source, target, 0.0, 0.0)
    seconds = sent_s(num_bytes, here.shape, there.shape, here.shares_host(there), profiles)
    return Send(source, target, num_bytes, seconds)


def sent_s(
    num_bytes: float,
    source: SubmeshShape,
    target: SubmeshShape,
    same_host: bool,
    profiles: Mapping[str, HardwareProfile],
) -> float:
    """Seconds from one submesh to another. Inside a host each device of the smaller side sends its part; between hosts,
    those of the smaller side share all that joins a host to the network."""
    ends = (profiles[source.kind], profiles[target.kind])
    links = [end.host_link if same_host else end.network_link for end in ends]
    rate, latency = min(link.bytes_per_s for link in links), max(link.latency_s for link in links)
    senders = min(source.num_devices, target.num_devices)
    if not same_host:
        hosts = min(source.num_hosts, target.num_hosts)
        senders = max(senders, hosts * min(end.devices_per_host for end in ends))
    return num_bytes / senders / rate + latency


def _first_place(cluster: Cluster, shape: SubmeshShape, shapes: Sequence[SubmeshShape]) -> Submesh | None:
    """Where a shape can stand alone."""
    line: Line = lines(cluster, tuple(shapes))[0]
    return next((submesh for submesh in line.submeshes if submesh.shape == shape), None)


def _settled(stage: Stage, cost: StageCost, num_microbatches: int) -> Partition:
    """One stage, which needs no search."""
    seconds = num_microbatches * (cost.forward_s + cost.backward_s + cost.weight_s) + cost.update_s
    return Partition(
        stages=(stage,), cost_s=seconds, lower_bound_s=seconds, status=Status.OPTIMAL, num_queries=1, others=()
    )


def joined(cost: StageCost) -> StageCost:
    """A price with its backward pass in one."""
    return replace(cost, backward_s=cost.backward_s + cost.weight_s, weight_s=0.0)


def _joined(cost: Cost) -> Cost:
    """Prices of a backward pass that is not split."""

    def of(first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        found = cost(first, last, shape)
        return found and joined(found)

    return of
