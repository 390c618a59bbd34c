"""Plan a step in the stages of another step's plan, so that the state of both stays where it is.

In: a traced step, and a `PipelinePlan` of a step with the same state (`like`). Out: a `PipelinePlan` on the same
submeshes with the same meshes. A leaf of the state that both steps have is on the stage and in the sharding that the
other plan gives it (`stages_of_state.py`). The schedule and the number of microbatches are this step's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import BudgetError, PlanMismatchError, ScheduleError
from autopar.pipeline.cut.exchanges import exchanges_of
from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.cut.stage_programs import Cuttable, Layers, StageProgram
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.partition.cluster import submeshes_of
from autopar.pipeline.partition.problem import Partition, Stage, StageCost
from autopar.pipeline.partition.sends import Send, edges_between
from autopar.pipeline.partition.step_time import staged_peaks, staged_timeline, task_seconds
from autopar.pipeline.plan import LeafPart, PipelinePlan
from autopar.pipeline.schedule.dag import Backward, list_schedule
from autopar.pipeline.schedule.kind import PipelineShape, ScheduleKind
from autopar.pipeline.schedule.table import build, find, searched, unmet
from autopar.pipeline.schedule.tasks import Schedule, chain_with
from autopar.pipeline.search.check_schedule import check_schedule
from autopar.pipeline.search.microbatch_search import checked_count
from autopar.pipeline.search.plan_stages import likely_numbers, searches_of
from autopar.pipeline.search.record_stages import recorded, runs_of_layers
from autopar.pipeline.search.request import StageRequest
from autopar.pipeline.search.schedule_costs import unsplit_backward
from autopar.pipeline.search.sent_values import with_sent_values
from autopar.pipeline.search.stage_costs import OPTIONS, PlannedRun, StageCosts
from autopar.pipeline.search.stage_layouts import StageLayouts, pins_by_position
from autopar.pipeline.search.stage_search import StagedStep
from autopar.pipeline.search.stages_of_state import StagesOfUnits, holds, shared_state
from autopar.pipeline.search.transfer_prices import sends_of
from autopar.solve.problem import Status
from autopar.system.units import human_bytes
from autopar.transforms.program import Program


def plan_like(
    program: Program, request: StageRequest, like: PipelinePlan, metadata: Mapping[str, Any] | None = None
) -> PipelinePlan:
    """Plan a step in the stages of another plan.

    Args:
        request: its cluster, number of stages and mesh are those of the other plan; its pins take precedence.
        like: the plan whose state this step shares.
        metadata: pins from sharding metadata, by path, for what the other plan does not have.

    Raises:
        PlanMismatchError: no argument is part of the other step's state, or this step reads it in another order.
        PinError: a pin does not fit a stage's mesh.
        BudgetError: the stages do not fit the memory budget.
        MicrobatchError, ScheduleError: the request is impossible.
    """
    return _Following(program, request, like, metadata or {}).run()


@dataclass(frozen=True, slots=True)
class _Built:
    """The planned stages for one number of microbatches.

    Args:
        over: the largest ratio of a device's peak memory to its budget.
    """

    count: int
    step: StagedStep
    programs: tuple[StageProgram, ...]
    runs: tuple[PlannedRun, ...]
    over: float

    @property
    def score(self) -> tuple[bool, float]:
        """The lower, the better."""
        return self.over > 1, self.step.step_time_s


class _Following:
    """Plans one step."""

    def __init__(
        self, program: Program, request: StageRequest, like: PipelinePlan, metadata: Mapping[str, Any]
    ) -> None:
        self.request, self.like, self.started = request, like, time.perf_counter()
        self.program = program.as_written
        self.shared = shared_state(like, self.program)
        renewed = {position for position, _ in self.program.graph.carried}
        self.read_state = tuple(sorted(self.shared.keys() - renewed))
        self.cuttable = Cuttable.of(program, own_statistics=request.own_statistics, read_state=self.read_state)
        check_schedule(self.cuttable, self.program.signature.name, request)
        graph = self.program.graph
        free = pins_by_position(metadata, graph)
        self.pins = {p: pin for p, pin in free.items() if p not in self.shared} | pins_by_position(request.pins, graph)
        positions = StagesOfUnits(self.cuttable, like, self.shared).run()
        #: The stages of the other plan that this step uses; a stage here is a position in this list.
        self.used = sorted(set(positions))
        self.stage_of_unit = [self.used.index(stage) for stage in positions]
        self.layer_of, self.stage_of = self._layers()
        self.num_planned = 0

    def run(self) -> PipelinePlan:
        best = self._fastest()
        if best.over > 1:
            raise BudgetError(
                f"the stages of `{self.program.signature.name}` do not fit where the plan of `{self.like.program.name}`"
                f" has them: they need {human_bytes(max(best.step.peak_bytes))} on a device, {best.over:.2f} times the"
                " memory budget. Use more microbatches or a larger budget, or plan this step first and the other one `like` it"
            )
        is_chain = best.step.layer_of is None
        starts, run_layers = runs_of_layers(self.layer_of)
        plan = recorded(
            self.program,
            best.step,
            best.programs,
            [run.plan for run in best.runs],
            cluster=self.like.cluster,
            profiles=self.request.profiles,
            memory_budget_bytes=self.request.memory_budget_bytes,
            num_microbatches=best.count,
            starts=starts,
            run_layers=() if is_chain else run_layers,
            num_layers=best.step.stages[-1].last + 1,
            num_planned=self.num_planned,
            own_statistics=self.request.own_statistics,
            tried=(),
            search_time_s=time.perf_counter() - self.started,
            homes=self._homes(best.programs),
            read_state=self.read_state,
        )
        plan = self._with_unread(plan, best.programs)
        self._check_places(plan, best.programs)
        note = f"the state is on the stages of the plan of `{self.like.program.name}`, and sharded as there"
        return replace(plan, notes=(*plan.notes, note))

    # -- where the state is ------------------------------------------------------------------

    def _part(self, leaf: LeafKey) -> LeafPart | None:
        """The part of the other plan that a leaf of the state is, or is in."""
        return next((part for part in self.shared.get(leaf[0], ()) if holds(part, leaf[1])), None)

    def _homes(self, programs: Sequence[StageProgram]) -> dict[LeafKey, int]:
        """The stage of each argument that the other plan has on a stage used here."""
        leaves = {port.leaf for program in programs for port in program.inputs if port.kind == "argument"}
        parts = {leaf: self._part(leaf) for leaf in leaves}
        return {leaf: self.used.index(p.stage) for leaf, p in parts.items() if p is not None and p.stage in self.used}

    def _with_unread(self, plan: PipelinePlan, programs: Sequence[StageProgram]) -> PipelinePlan:
        """The plan with the state that this step does not read where the other plan has it."""
        read = {port.value for program in programs for port in program.inputs if port.kind == "argument"}
        inputs, places = list(plan.inputs), list(plan.input_parts)
        for position, parts in self.shared.items():
            if position not in read and all(part.stage in self.used for part in parts):
                places[position] = tuple(replace(part, stage=self.used.index(part.stage)) for part in parts)
                inputs[position] = replace(inputs[position], sharding=parts[0].sharding)
        return replace(plan, inputs=tuple(inputs), input_parts=tuple(places))

    def _check_places(self, plan: PipelinePlan, programs: Sequence[StageProgram]) -> None:
        """Refuse state that is elsewhere than in the other plan, unless the user pins it."""
        read = {port.value for program in programs for port in program.inputs if port.kind == "argument"}
        for position in sorted(read & self.shared.keys()):
            for part in plan.input_parts[position]:
                there = self._part((position, Rows(*part.rows) if part.rows else None))
                stage = self.used[part.stage]
                if there is None or there.stage != stage or there.rows != part.rows:
                    held = f"stage {there.stage}" if there else "other stages, in other parts"
                    raise PlanMismatchError(
                        f"`{plan.inputs[position].path}` is on {held} of the plan of `{self.like.program.name}`, but"
                        f" `{plan.program.name}` needs it on stage {stage}: leave `like` out, or plan this step first and"
                        " the other one `like` it"
                    )

    # -- the stages --------------------------------------------------------------------------

    def _layers(self) -> tuple[tuple[int, ...], list[int]]:
        """The layer of each unit and the stage of each layer. The layers of a chain are those of any search, cut where
        stages begin too; with branches each stage is one layer."""
        if not self.like.is_chain:
            return tuple(self.stage_of_unit), list(range(len(self.used)))
        starts = set(searches_of(self.cuttable, self.request).clustering.starts)
        layers, stages = [0], [self.stage_of_unit[0]]
        for position in range(1, len(self.stage_of_unit)):
            stage = self.stage_of_unit[position]
            if position in starts or stage != stages[-1]:
                stages.append(stage)
            layers.append(len(stages) - 1)
        return tuple(layers), stages

    def _fastest(self) -> _Built:
        """The fastest number of microbatches that fits, from that of the other plan on until it gets slower."""
        wanted = self.request.num_microbatches
        if wanted != "auto":
            return self._built(checked_count(wanted))
        numbers, start = likely_numbers(self.cuttable, self.like.cluster)
        if self.like.num_microbatches in numbers:
            start = self.like.num_microbatches
        at = numbers.index(start)
        best = self._built(start)
        for by in (1, -1):
            neighbour = at + by
            while 0 <= neighbour < len(numbers) and (other := self._built(numbers[neighbour])).score < best.score:
                best, neighbour = other, neighbour + by
            if best.count != start:
                break
        return best

    def _built(self, count: int) -> _Built:
        """The stages for a number of microbatches, with the first option that fits the memory."""
        if self.request.progress is not None:
            self.request.progress(f"stages for {count} microbatches", 0.5)
        layers = self.cuttable.layered(self.layer_of, count)
        programs = self.cuttable.settled(self.layer_of, self.stage_of, count)
        ends = [[layer for layer, own in enumerate(self.stage_of) if own == s] for s in range(len(self.used))]
        costs = [self._costs(layers, s) for s in range(len(self.used))]
        for one, program, there in zip(
            costs, programs, self.used, strict=True
        ):  # before a pin that does not fit is priced
            one.layouts.pinned(program.inputs, self.like.stages[there].plan.mesh)
        best: _Built | None = None
        for option in range(len(OPTIONS)):
            stages = [
                Stage(of[0], of[-1], self.like.stages[there].submesh) for of, there in zip(ends, self.used, strict=True)
            ]
            runs = tuple(
                one.planned(stage.first, stage.last, replace(stage.submesh.shape, option=option), program)
                for one, stage, program in zip(costs, stages, programs, strict=True)
            )
            priced = {
                splits: with_sent_values(runs, stages, self.request.profiles, count, splits_backward=splits)
                for splits in (False, True)
            }
            step = self._scheduled(stages, priced, programs, count)
            built = _Built(
                count, step, programs, priced[step.schedule.splits_backward], step.over(self.request.budgets)
            )
            best = min(
                (built, best) if best else (built,), key=lambda one: one.score if one.over <= 1 else (True, one.over)
            )
            if best.over <= 1:
                break
        self.num_planned += sum(one.num_planned for one in costs)
        assert best is not None
        return best

    def _costs(self, layers: Layers, s: int) -> StageCosts:
        """The costs of a stage whose mesh and state are fixed."""
        graph, there = self.program.graph, self.used[s]
        mesh = self.like.stages[there].plan.mesh
        held = {p: part.sharding for p, parts in self.shared.items() for part in parts if part.stage == there}
        pins = held | self.pins
        axes = frozenset(mesh.axis_names)
        layouts = StageLayouts(pins, graph, axes, {mesh.num_devices: (mesh,)}, is_one_mesh=True)
        keys = range(layers.num_layers)
        return StageCosts(
            layers, self.request.profiles, keys, splits_backward=True, layouts=layouts, **self.request.planning
        )

    # -- the schedule ------------------------------------------------------------------------

    def _scheduled(
        self,
        stages: Sequence[Stage],
        runs: Mapping[bool, Sequence[PlannedRun]],
        programs: Sequence[StageProgram],
        count: int,
    ) -> StagedStep:
        """The fastest schedule of these stages, of those that fit if some do.

        Args:
            runs: the planned stages, by whether the backward pass is split.
        """
        costs = {splits: [run.cost for run in of] for splits, of in runs.items()}
        steps = [
            _simulated(stages, costs[schedule.splits_backward], schedule, sends, kind, self.layer_of)
            for schedule, sends, kind in self._schedules(stages, costs[True], programs, count)
        ]
        return min(steps, key=lambda step: (step.over(self.request.budgets) > 1, step.step_time_s))

    def _schedules(
        self, stages: Sequence[Stage], costs: Sequence[StageCost], programs: Sequence[StageProgram], count: int
    ) -> Iterator[tuple[Schedule, tuple[Send, ...], ScheduleKind | None]]:
        """The schedules that these stages can run, with the transfers between them, and their entries."""
        places: dict[range, int] = {}
        submesh_of = [places.setdefault(stage.submesh.devices, len(places)) for stage in stages]
        virtual = len(stages) // len(places)
        trains = bool(self.cuttable.flow.backward)
        is_open = self.request.schedule == "auto"
        kinds = searched(trains=trains) if is_open else (find(self.request.schedule),)
        sends = sends_of(exchanges_of(programs), stages, self.like.cluster, self.request.profiles)
        edges, found = edges_between(sends), False
        for kind in kinds if self.like.is_chain else ():
            if kind.is_asynchronous:
                raise ScheduleError(
                    f"schedule {kind.name!r} is asynchronous, and the stages of another plan (`like`) run synchronously only:"
                    " leave `like` out"
                )
            shape = PipelineShape(len(places), count, virtual)
            reason = unmet(kind, shape)
            if reason is not None and not is_open:
                raise ScheduleError(f"{reason}. The stages are those of the plan given as `like`")
            if reason is None and kind.placement(shape) == tuple((submesh,) for submesh in submesh_of):
                found = True
                edges_of_chain = chain_with(len(stages), edges)
                yield build(kind, len(places), count, virtual=virtual, edges=edges_of_chain), sends, kind
        if found:
            return
        if not is_open:
            raise ScheduleError(
                f"schedule {find(self.request.schedule).name!r} has other stages on its submeshes than the plan given as"
                " `like`: leave schedule='auto'"
            )
        ways: tuple[Backward, ...] = ("whole", "split") if trains else ("none",)
        for way in ways:
            seconds = task_seconds(costs if way == "split" else [unsplit_backward(cost) for cost in costs])
            yield list_schedule(edges, submesh_of, count, seconds=seconds, backward=way), sends, None


def _simulated(
    stages: Sequence[Stage],
    costs: Sequence[StageCost],
    schedule: Schedule,
    sends: tuple[Send, ...],
    kind: ScheduleKind | None,
    layer_of: tuple[int, ...] | None,
) -> StagedStep:
    if not schedule.splits_backward:
        costs = [unsplit_backward(cost) for cost in costs]
    timeline = staged_timeline(schedule, costs, sends, submeshes_of(stages))
    partition = Partition(
        stages=tuple(stages),
        cost_s=timeline.makespan_s,
        lower_bound_s=0.0,
        status=Status.UNPROVEN,
        num_queries=len(stages),
    )
    peaks, layer_of = staged_peaks(schedule, costs), layer_of if kind is None else None
    return StagedStep(tuple(stages), tuple(costs), sends, schedule, timeline, peaks, partition, layer_of, kind)
