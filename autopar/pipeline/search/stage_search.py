"""Search for the stages, their submeshes and the schedule of a step together.

In: the costs of runs of layers, a cluster, and a number of microbatches.
Out: the fastest simulated `StagedStep` that fits. For each schedule, the partition minimizes the schedule's objective
(`schedule.objective`), a sum plus a maximum. The best partitions are then simulated task by task. All layers as one stage
are searched separately, because one stage is one program with its own cost.

An objective prices transfers at boundaries between consecutive stages. At first, a value with a distant reader counts at
each boundary that it crosses, as if stages relayed it. If stages that were found send such values directly, they are searched
again, with each value's bytes divided among the boundaries that it crosses there. Simulations price the pairs of
stages that exchange values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.cut.exchanges import Passing, crossing_bytes, exchanges_of_layers
from autopar.pipeline.partition.cluster import Cluster, Line, Submesh, SubmeshShape, lines, submeshes_of
from autopar.pipeline.partition.equal_submeshes import EqualSubmeshPartitioner
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.planned_order import in_planned_order
from autopar.pipeline.partition.problem import (
    CostTables,
    Growth,
    Partition,
    Partitioner,
    PartitionProblem,
    Shortage,
    Stage,
    StageCost,
)
from autopar.pipeline.partition.sends import Exchange, Send, edges_between
from autopar.pipeline.partition.step_time import staged_peaks, staged_timeline
from autopar.pipeline.partition.streamed_time import StreamedTime, streamed_time
from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind, in_turn
from autopar.pipeline.schedule.one_forward_one_backward import ONE_F_ONE_B
from autopar.pipeline.schedule.table import build, find, objective_of, searched, shapes_with, stage_numbers, unmet
from autopar.pipeline.schedule.tasks import Schedule, chain_with
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.pipeline.search.check_schedule import unmet_by_partitioner
from autopar.pipeline.search.schedule_costs import (
    Cost,
    combining,
    exchanging,
    keeping_versions,
    unsplit_backward,
    unsplit_costs,
    unsplit_tables,
)
from autopar.pipeline.search.transfer_prices import (
    direct_bytes,
    exchange_s,
    sends_of,
    stage_of,
    there_and_back_s,
)
from autopar.solve.problem import Status

#: The number of partitions to simulate per schedule.
_MOST_SIMULATED = 3

#: Partitions whose objective is above the limit by this factor are not simulated. Simulations were at most 10 % faster than
#: the objective, for GPT-2, LLaMA 7B and a mixture of experts on 8 and 16 GPUs under all schedules.
FAR = 1.15
_UNLIMITED_BYTES = 1e30
SLOW = "no stages are fast enough, by a bound"

Schedules = Sequence[str | ScheduleKind]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A pipelined step.

    Args:
        stages: the stages in order.
        costs: the cost of each stage.
        sends: the transfers between stages.
        timeline: the simulated timeline of the step.
        peak_bytes: the peak per device of each submesh.
        partition: the partitioner's result.
        layer_of: the layer of each unit of the forward pass, if branches have their own stages.
        kind: the entry of the schedule; None if branches have their own stages.
        streamed: the stream of batches, if the schedule is asynchronous.
    """

    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    sends: tuple[Send, ...]
    schedule: Schedule
    timeline: PipelineTimeline
    peak_bytes: tuple[float, ...]
    partition: Partition
    layer_of: tuple[int, ...] | None = None
    kind: ScheduleKind | None = None
    streamed: StreamedTime | None = None

    @property
    def step_time_s(self) -> float:
        """Seconds of one step; of an asynchronous schedule after filling."""
        return self.timeline.makespan_s if self.streamed is None else self.streamed.step_s

    @property
    def bubble_fraction(self) -> float:
        """The idle fraction of all submeshes' time."""
        return self.timeline.bubble_fraction if self.streamed is None else self.streamed.bubble_fraction

    def over(self, budget_bytes: Mapping[str, float]) -> float:
        """The largest ratio of a device's peak memory to its budget."""
        held = enumerate(self.peak_bytes)
        return max(peak / budget_bytes[self._on(submesh).submesh.shape.kind] for submesh, peak in held)

    def _on(self, submesh: int) -> Stage:
        return self.stages[self.schedule.stages_on(submesh)[0]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a search.

    Args:
        step: the best step; None if nothing fits.
        reason: why nothing fits.
        one_stage_s: seconds of the fastest step with one stage, whether it fits or not; `inf` if none was searched.
        is_slow: whether steps may fit, but none that is fast enough.
        bound_s: a lower bound of the objective of steps that are not fast enough.
    """

    step: StagedStep | None
    reason: str = ""
    one_stage_s: float = math.inf
    is_slow: bool = False
    bound_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSearch:
    """A search for stages.

    Args:
        cost: costs with a split backward pass; a schedule that does not split it adds the parts.
        keys: numbers of layers; equal for equal layers.
        passing: the values that pass between layers in the forward pass, with the bytes of one microbatch, on all
            devices together.
        profiles: the hardware profile of each kind of device.
        budget_bytes: the memory budget of a device of each kind.
        shapes: the shapes of submeshes.
        num_stages: the exact number of stages; None for any.
        alone: the cost of all layers as one stage; by default `cost`.
        bound: see `PartitionProblem`; with it, all costs of a shape are queried together.
        tables: `cost` and `bound` of all runs at once.
        relative_gap, time_limit_s: limits of the search for each schedule's partition.
        trains: whether gradients return.
        limit_s: the step time from which on steps are of no use.
    """

    cost: Cost
    keys: Sequence[int]
    passing: Sequence[Passing]
    cluster: Cluster
    profiles: Mapping[str, HardwareProfile]
    budget_bytes: Mapping[str, float]
    shapes: tuple[SubmeshShape, ...]
    num_microbatches: int
    num_stages: int | None = None
    alone: Callable[[SubmeshShape], StageCost | None] | None = None
    bound: Callable[[int, int, SubmeshShape], StageCost] | None = None
    tables: CostTables | None = None
    relative_gap: float = 5e-3
    time_limit_s: float = math.inf
    trains: bool = True
    limit_s: float = math.inf

    def best(self, schedules: Schedules = (), partitioner: Partitioner | None = None) -> StagedStep | None:
        """The fastest step that fits; None if nothing fits."""
        return self.outcome(schedules, partitioner).step

    def outcome(
        self, schedules: Schedules = (), partitioner: Partitioner | None = None, *, usual: bool = True
    ) -> Outcome:
        """Find the fastest step that fits, or the reason if none does. Stages on one device each are also searched
        separately, because the optimum of a schedule's objective need not be the fastest when simulated.

        Args:
            schedules: the schedules to search; by default those of `schedule="auto"`.
            partitioner: by default the package's partitioners.
            usual: whether only the usual number of virtual stages per submesh of each schedule is searched.
        """
        several = self.shapes
        if partitioner is None and self.num_stages != 1:  # `one_stage` covers all devices as one submesh
            several = tuple(shape for shape in self.shapes if shape.num_devices < self.cluster.num_devices)
        single = tuple(shape for shape in several if shape.num_devices == 1 and self._may_fit_each(shape))
        among = [several, *([single] if single != several and partitioner is None else [])]
        searches = [replace(self, shapes=shapes) for shapes in among if shapes]
        outcomes = [
            search._of_schedule(kind, virtual, partitioner)
            for kind, virtual in self._kinds(schedules, usual)
            for search in reversed(searches)
        ]
        # With a limit, one program on all devices is planned already, which one stage would be too.
        may_be_one = self.num_stages in (None, 1) and partitioner is None and math.isinf(self.limit_s)
        alone = [self.one_stage()] if may_be_one else []
        return fastest([*alone, *outcomes])

    def one_stage(self) -> Outcome:
        """All layers as one stage, on any of the shapes: intra-operator parallelism only."""
        found: list[StagedStep] = []
        least: Shortage | None = None
        is_slow = False
        quickest: dict[SubmeshShape, float] = {}  # by the first option of a shape; other options only save memory
        for shape in sorted(self.shapes, key=lambda shape: (-shape.num_devices, shape.option)):
            at_least = max(self._least_s(shape), quickest.get(replace(shape, option=0), 0.0))
            enough = min([self.limit_s, *(step.step_time_s for step in found)]) / (1 + self.relative_gap)
            if at_least >= enough:
                is_slow = True
                continue
            if self.bound is not None and not self._may_fit(shape):
                continue
            mesh = _first_place(self.cluster, shape, self.shapes)
            cost = self.cost(0, len(self.keys) - 1, shape) if self.alone is None else self.alone(shape)
            if mesh is None or cost is None:
                continue
            stage = Stage(0, len(self.keys) - 1, mesh)
            partition = _settled(stage, cost, self.num_microbatches)
            step = self._simulated(ONE_F_ONE_B, 1, (stage,), (unsplit_backward(cost),), partition)
            quickest.setdefault(replace(shape, option=0), step.step_time_s)
            budget = self.budget_bytes[shape.kind]
            if step.peak_bytes[0] <= budget:
                found.append(step)
            elif least is None or step.peak_bytes[0] - budget < least.missing_bytes:
                least = Shortage(stage, 1.0, step.peak_bytes[0], budget)
        best = min(found, key=lambda step: step.step_time_s, default=None)
        reason = str(least) if least and best is None else ""
        return Outcome(best, reason, min(quickest.values(), default=math.inf), is_slow)

    def one_device_each(self, schedules: Schedules = ()) -> Outcome:
        """Inter-operator parallelism only: every stage on one device."""
        return replace(self, shapes=tuple(shape for shape in self.shapes if shape.num_devices == 1)).outcome(schedules)

    def with_costs(
        self, step: StagedStep, costs: Sequence[StageCost], exchanges: Sequence[Exchange] | None = None
    ) -> StagedStep:
        """The same stages and schedule with other costs, such as those of the final plans.

        Args:
            exchanges: what the stages send to each other, known once they are cut.
        """
        assert step.kind is not None, "stages of branches are simulated elsewhere"
        if step.kind.backward != "split":
            costs = [unsplit_backward(cost) for cost in costs]
        virtual = len(step.stages) // step.schedule.num_submeshes
        return self._simulated(step.kind, virtual, step.stages, costs, step.partition, exchanges)

    def exchanges(self, stages: Sequence[Stage]) -> tuple[Exchange, ...]:
        """What stages send to each other in each microbatch, as far as it is known before they are cut."""
        return exchanges_of_layers(self.passing, stage_of(stages), trains=self.trains)

    # -- helpers -----------------------------------------------------------------------------

    def _may_fit_each(self, shape: SubmeshShape) -> bool:
        """Whether every single layer may fit on a shape."""
        if self.bound is None:
            return True
        least = (self.bound(layer, layer, shape).state_bytes for layer in range(len(self.keys)))
        return all(state <= self.budget_bytes[shape.kind] for state in least)

    def _may_fit(self, shape: SubmeshShape) -> bool:
        """Whether all layers may fit on a shape; true for the largest shape, so that its shortage is reported."""
        assert self.bound is not None
        largest = max(group.num_devices for group in self.cluster.groups)
        least = self.bound(0, len(self.keys) - 1, shape).state_bytes
        return shape.num_devices == largest or least <= self.budget_bytes[shape.kind]

    def _least_s(self, shape: SubmeshShape) -> float:
        """A lower bound of the seconds of all layers on a shape."""
        if self.bound is None:
            return 0.0
        least = self.bound(0, len(self.keys) - 1, shape)
        return self.num_microbatches * (least.forward_s + least.backward_s + least.weight_s)

    def _kinds(self, schedules: Schedules, usual: bool) -> list[tuple[ScheduleKind, int]]:
        """Schedules with the numbers of virtual stages per submesh to search: those that make the requested number of stages.
        If none does, all are searched, for the reason."""
        kinds = [find(one) for one in schedules] or searched(trains=self.trains)
        every = [(kind, virtual) for kind in kinds for virtual in (kind.virtuals[:1] if usual else kind.virtuals)]
        if self.num_stages is None:
            return every
        possible: list[tuple[ScheduleKind, int]] = []
        for kind in kinds:
            shapes = shapes_with(kind, self.num_stages, self.cluster.num_devices, self.num_microbatches)
            possible += [(kind, virtual) for virtual in dict.fromkeys(shape.virtual for shape in shapes)]
        return [one for one in possible if not usual or one in every] or every

    def _of_schedule(self, kind: ScheduleKind, virtual: int, partitioner: Partitioner | None) -> Outcome:
        cost, tables = self.cost, self.tables if partitioner is None else None  # another may replace the cost function
        if kind.backward != "split":
            cost, tables = unsplit_costs(cost), tables and unsplit_tables(tables)
        count, gap, limit_s = self.num_microbatches, self.relative_gap, self.time_limit_s

        def shape(num_submeshes: int) -> PipelineShape:
            return PipelineShape(num_submeshes, count, virtual)

        reason = _why_not(kind, shape(self.cluster.num_devices), self.num_stages)
        if reason or (reason := unmet_by_partitioner(kind, partitioner)):
            return Outcome(None, reason)
        partitioner = partitioner or _partitioner_of(kind, shape, limit_s, gap)
        relayed = [crossing_bytes(self.passing, layer) for layer in range(len(self.keys))]
        exchanged_s = exchange_s(self.cluster, self.profiles)
        priced, tables = exchanging(cost, tables, exchanged_s) if kind.has_replicas else (cost, tables)
        problem = PartitionProblem(
            num_layers=len(self.keys),
            cluster=self.cluster,
            cost=priced,
            transfer_s=there_and_back_s(relayed, self.cluster, self.profiles),
            objective=objective_of(kind, count, virtual),
            budget_bytes=self.budget_bytes,
            growth=Growth.SUPERADDITIVE if self.bound is None else Growth.UNKNOWN,
            together=self.bound is not None,
            tables=tables,
            layer_keys=self.keys,
            shapes=self.shapes,
            bound=self.bound,
            num_stages=self.num_stages,
            limit_s=FAR * self.limit_s,
            may_have=lambda num_submeshes: unmet(kind, shape(num_submeshes)) is None,
        )
        if kind.is_asynchronous:
            problem = keeping_versions(problem, kind, count)
        chosen = _with_free_memory(problem) if math.isfinite(self.limit_s) else problem
        partition = partitioner.partition(chosen)
        steps = list(self._steps(kind, virtual, partition, cost))
        if chosen is not problem and partition.stages and partition.stages not in [step.stages for step in steps]:
            chosen, partition = problem, partitioner.partition(problem)
            steps = list(self._steps(kind, virtual, partition, cost))
        direct = direct_bytes(self.passing, len(self.keys), max((partition.stages, *partition.others), key=len))
        if any(not math.isclose(*pair, rel_tol=1e-9) for pair in zip(direct, relayed, strict=True)):
            again = partitioner.partition(
                replace(chosen, transfer_s=there_and_back_s(direct, self.cluster, self.profiles))
            )
            steps += self._steps(kind, virtual, again, cost)
        if steps:
            return Outcome(min(steps, key=lambda step: step.step_time_s))
        is_slow = math.isfinite(self.limit_s) and partition.status is not Status.INFEASIBLE
        bound_s = partition.lower_bound_s if is_slow else math.inf
        return Outcome(None, partition.reason or (SLOW if is_slow else ""), is_slow=is_slow, bound_s=bound_s)

    def _steps(self, kind: ScheduleKind, virtual: int, partition: Partition, cost: Cost) -> Iterator[StagedStep]:
        """The best partitions that a schedule can run, simulated."""
        simulated = 0
        for stages in dict.fromkeys((partition.stages, *partition.others)):
            if len(stages) < 2 or simulated == _MOST_SIMULATED:
                continue
            simulated += 1
            costs = [cost(stage.first, stage.last, stage.submesh.shape) for stage in stages]
            priced = [one for one in costs if one is not None]
            assert len(priced) == len(stages), "they are part of a partition"
            step = self._simulated(kind, virtual, stages, priced, partition)
            if step.over(self.budget_bytes) <= 1:
                yield step

    def _simulated(
        self,
        kind: ScheduleKind,
        virtual: int,
        stages: Sequence[Stage],
        costs: Sequence[StageCost],
        partition: Partition,
        exchanges: Sequence[Exchange] | None = None,
    ) -> StagedStep:
        costs = combining(costs, stages, self.profiles, kind)
        given = self.exchanges(stages) if exchanges is None else exchanges
        sends = sends_of(given, stages, self.cluster, self.profiles, costs)
        edges = chain_with(len(stages), edges_between(sends))
        schedule = build(kind, len(stages) // virtual, self.num_microbatches, virtual=virtual, edges=edges)
        if kind.is_asynchronous:
            streamed = streamed_time(kind, self.num_microbatches, edges, costs, sends, submeshes_of(stages))
            return _streamed(streamed, kind, stages, costs, sends, schedule, partition)
        schedules = [schedule]
        if kind.in_planned_order:
            budgets = {stage.submesh: self.budget_bytes[stage.submesh.shape.kind] for stage in stages}
            schedules += in_planned_order(schedule, edges, costs, sends, list(budgets.values()))
        steps: list[StagedStep] = []
        for one in schedules:
            timeline, peaks = staged_timeline(one, costs, sends, submeshes_of(stages)), staged_peaks(one, costs)
            steps.append(StagedStep(tuple(stages), tuple(costs), sends, one, timeline, peaks, partition, kind=kind))
        return min(steps, key=lambda step: (step.over(self.budget_bytes) > 1, step.step_time_s))


def _partitioner_of(
    kind: ScheduleKind, shape: Callable[[int], PipelineShape], time_limit_s: float, relative_gap: float
) -> Partitioner:
    """The package's partitioner for a schedule.

    Args:
        shape: the pipeline on a number of submeshes.
    """
    if shape(1).virtual == 1 and kind.placement is in_turn:
        return ExactPartitioner(time_limit_s=time_limit_s, relative_gap=relative_gap)
    return EqualSubmeshPartitioner(
        lambda num_submeshes: kind.placement(shape(num_submeshes)), time_limit_s=time_limit_s, relative_gap=relative_gap
    )


def _with_free_memory(problem: PartitionProblem) -> PartitionProblem:
    """The problem without budgets. The first option of each shape is the fastest then, so that the others need no plans; their
    forward, backward or weight part alone may be faster, by much less than `FAR`. If nothing is fast enough, or the best
    fits, the budgets do not matter."""
    first = {kind: min(one.option for one in problem.all_shapes if one.kind == kind) for kind in problem.budget_bytes}
    shapes = tuple(shape for shape in problem.all_shapes if shape.option == first[shape.kind])
    return replace(problem, shapes=shapes, budget_bytes=dict.fromkeys(problem.budget_bytes, _UNLIMITED_BYTES))


def fastest(outcomes: Sequence[Outcome]) -> Outcome:
    """The best of several outcomes; if nothing fits, the last reason."""
    best = min((one.step for one in outcomes if one.step), key=lambda step: step.step_time_s, default=None)
    one_stage_s = min((one.one_stage_s for one in outcomes), default=math.inf)
    if best is not None:
        return Outcome(best, one_stage_s=one_stage_s)
    return Outcome(
        None,
        next((one.reason for one in reversed(outcomes) if one.reason), ""),
        one_stage_s,
        is_slow=any(one.is_slow for one in outcomes),
        bound_s=min((one.bound_s for one in outcomes), default=math.inf),
    )


def _streamed(
    streamed: StreamedTime,
    kind: ScheduleKind,
    stages: Sequence[Stage],
    costs: Sequence[StageCost],
    sends: tuple[Send, ...],
    schedule: Schedule,
    partition: Partition,
) -> StagedStep:
    """An asynchronous step. A version of the weights takes about as many bytes as gradients."""
    held = zip(streamed.peak_bytes, streamed.further_copies(), costs, strict=True)
    peaks = tuple(peak + copies * cost.accumulated_bytes for peak, copies, cost in held)
    return StagedStep(
        stages=tuple(stages),
        costs=tuple(costs),
        sends=sends,
        schedule=schedule,
        timeline=streamed.timeline,
        peak_bytes=peaks,
        partition=partition,
        kind=kind,
        streamed=streamed,
    )


def _why_not(kind: ScheduleKind, most: PipelineShape, num_stages: int | None) -> str:
    """Why a schedule cannot have several submeshes, up to a number, or so many stages on them; "" if it can."""
    shapes = [replace(most, num_submeshes=p) for p in range(2, most.num_submeshes + 1)]
    reasons = [unmet(kind, one) for one in shapes]
    if reasons and all(reasons):
        return reasons[0] or ""
    if num_stages in (None, 1) or shapes_with(kind, num_stages, most.num_submeshes, most.num_microbatches):
        return ""
    numbers = ", ".join(map(str, stage_numbers(kind, most.num_submeshes, most.num_microbatches))) or "none"
    return (
        f"schedule {kind.name!r} cannot have {num_stages} stages on {most.num_submeshes} devices: choose a number that it"
        f" has ({numbers}, ...), or another schedule"
    )


def _first_place(cluster: Cluster, shape: SubmeshShape, shapes: Sequence[SubmeshShape]) -> Submesh | None:
    """The first place where a shape fits."""
    line: Line = lines(cluster, tuple(shapes))[0]
    return next((submesh for submesh in line.submeshes if submesh.shape == shape), None)


def _settled(stage: Stage, cost: StageCost, num_microbatches: int) -> Partition:
    """The trivial partition into one stage."""
    seconds = num_microbatches * (cost.forward_s + cost.backward_s + cost.weight_s) + cost.update_s
    return Partition(
        stages=(stage,), cost_s=seconds, lower_bound_s=seconds, status=Status.OPTIMAL, num_queries=1, others=()
    )
