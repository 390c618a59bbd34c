"""Define the plan of a pipelined step as data: layers on devices, the schedule, and a `Plan` for each stage.

In: built by `search.plan_stages`.
Out: read by `run.step` and the reports; saved as JSON like every plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

from autopar.errors import ScheduleError
from autopar.ir.placement import Part, Parts
from autopar.pipeline.partition.cluster import Cluster, submeshes_of
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.partition.sends import Send, edges_between
from autopar.pipeline.partition.step_time import staged_timeline, task_seconds
from autopar.pipeline.partition.streamed_time import StreamedTime, streamed_time
from autopar.pipeline.plan_records import (
    LeafPart,
    PipelinePrediction,
    SearchOutcome,
    StagePlan,
    StagesTried,
    WeightVersions,
)
from autopar.pipeline.schedule import dag as any_edges
from autopar.pipeline.schedule.own_schedule import OwnSchedule
from autopar.pipeline.schedule.table import KINDS, build
from autopar.pipeline.schedule.tasks import Schedule, Shares, chain_with
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.pipeline.schedule.token_slices import TERAPIPE, terapipe
from autopar.pipeline.schedule.verifier import check_replicas
from autopar.plans.columnar_numbers import in_columns, reader, write_document
from autopar.plans.considered import Considered
from autopar.plans.json_codec import WrongFieldError, as_it_is, decoder, encode, read_document, without
from autopar.plans.plan import Plan, sixth_to_seventh
from autopar.plans.records import Efficiency, ProgramSignature, TensorPlan
from autopar.plans.validate import check_plan, check_positions, check_sharding

#: The format name in such a plan's file. `MIGRATIONS` convert from each version to the next, as in `plan`.
FORMAT = "autopar-pipeline-plan"


def _in_stages(body: dict[str, Any], migrate: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Migrate the plans of the stages; the decoder rejects entries that are no stages."""
    stages = body.get("stages")
    if not isinstance(stages, list):
        return body
    known = [isinstance(stage, dict) and isinstance(stage.get("plan"), dict) for stage in stages]
    return body | {
        "stages": [
            stage | {"plan": migrate(stage["plan"])} if is_one else stage
            for stage, is_one in zip(stages, known, strict=True)
        ]
    }


def _second_to_third(body: dict[str, Any]) -> dict[str, Any]:
    """Drop the times of the search, in the stages too."""
    return _in_stages(without("search_time_s", of="outcome")(body), without("solve_time_s", of="outcome"))


def _sixth_to_seventh(body: dict[str, Any]) -> dict[str, Any]:
    """Rename fields and reword statuses, in the stages too."""
    return _in_stages(sixth_to_seventh(body), sixth_to_seventh)


def _seventh_to_eighth(body: dict[str, Any]) -> dict[str, Any]:
    """Add the transfers of gradients, which were priced like those of activations; the decoder rejects other entries."""
    sends = body.get("sends")
    forward_only = body.get("schedule") in ("inference", any_edges.NAMES["none"])
    if not isinstance(sends, list) or forward_only:
        return body
    known = [one for one in sends if isinstance(one, dict) and {"source", "target"} <= one.keys()]
    back = [one | {"source": one["target"], "target": one["source"]} for one in known]
    ends = [(one["source"], one["target"]) for one in known]
    return body | {"sends": sends + [one for one in back if (one["source"], one["target"]) not in ends]}


MIGRATIONS = (as_it_is, _second_to_third, as_it_is, as_it_is, as_it_is, _sixth_to_seventh, _seventh_to_eighth)
VERSION = len(MIGRATIONS) + 1


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Everything decided about a pipelined step. `in_tree` / `out_tree` are JAX tree structures and not saved.

    Args:
        program: the signature of the traced step.
        starts: the first unit of the forward pass of each layer; with branches, of each run of units of one layer.
        run_layers: the layer of each such run; by default consecutive numbers.
        sends: the transfers between stages: activations to later ones, gradients to earlier ones.
        virtual: the number of virtual stages per submesh of a chain.
        own_schedule: the tasks of a schedule that is not one of the package, or in another order.
        own_statistics: whether each microbatch has its own batch statistics.
        inputs, outputs: the step's arguments and results. Their `sharding` is that of their first part.
        input_parts, output_parts: the submeshes that hold each; several for a stack of layers.
        carried: positions of inputs and outputs that hold the same state.
        splits_loops: whether loops of the backward pass are split into an input part and a weight part.
        token_slices: the tokens of each slice, if microbatches run in slices of tokens (`terapipe`).
        slice_shares: the share of each slice in the seconds of a microbatch's forward pass, and of its backward pass.
        read_state: positions of inputs that are state of another step, in whose stages this one runs (`like`).
        weight_versions: what each stage keeps in an asynchronous schedule; empty in others.
        tried: the stages that were searched.
        considered: with `everything="auto"`, this plan and the alternatives, each with the reason why it was not chosen.
        efficiency: the data for MFU and throughput; None in plans of older files.
    """

    program: ProgramSignature
    cluster: Cluster
    memory_budget_bytes: float | None
    strategy: str
    schedule: str
    num_microbatches: int
    starts: tuple[int, ...]
    stages: tuple[StagePlan, ...]
    sends: tuple[Send, ...]
    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    input_parts: tuple[tuple[LeafPart, ...], ...]
    output_parts: tuple[tuple[LeafPart, ...], ...]
    carried: tuple[tuple[int, int], ...]
    donated: tuple[int, ...]
    prediction: PipelinePrediction
    outcome: SearchOutcome
    efficiency: Efficiency | None = None
    run_layers: tuple[int, ...] = ()
    virtual: int = 1
    own_schedule: OwnSchedule | None = None
    own_statistics: bool = False
    splits_loops: bool = False
    token_slices: tuple[int, ...] = ()
    slice_shares: Shares = ()
    read_state: tuple[int, ...] = ()
    weight_versions: tuple[WeightVersions, ...] = ()
    tried: tuple[StagesTried, ...] = ()
    considered: tuple[Considered, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    in_tree: Any = field(default=None, compare=False, repr=False)
    out_tree: Any = field(default=None, compare=False, repr=False)

    @property
    def hardware(self) -> str:
        """The kinds of devices, as text."""
        return " + ".join(self.cluster.kinds)

    @property
    def num_devices(self) -> int:
        """The number of devices of the cluster."""
        return self.cluster.num_devices

    def parts_of(self, position: int) -> Parts:
        """The shardings and submeshes of an input; of a stack of layers, those of the first replicas."""
        parts = self.input_parts[position]
        return tuple(
            Part(part.sharding, self.stages[part.stage].plan.mesh, submesh.first_device, part.rows)
            for part in parts
            for submesh in self.stages[part.stage].places[: None if len(parts) == 1 else 1]
        )

    @property
    def submesh_of(self) -> tuple[int, ...]:
        """The number of the submesh of each stage, that of its first replica."""
        return tuple(places[0] for places in self.submeshes_of)

    @property
    def submeshes_of(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the submeshes of each stage, one for each replica."""
        number = {submesh.devices: n for n, submesh in enumerate(submeshes_of(self.stages))}
        return tuple(tuple(number[submesh.devices] for submesh in stage.places) for stage in self.stages)

    @property
    def is_chain(self) -> bool:
        """Whether each stage depends on the one before it."""
        return self.schedule not in any_edges.DESCRIPTIONS

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each layer."""
        return tuple(s for s, stage in enumerate(self.stages) for _ in range(stage.first_layer, stage.last_layer + 1))

    def layers_of_units(self, num_units: int) -> list[int]:
        """The layer of each unit of the forward pass.

        Args:
            num_units: the number of units.
        """
        layers = self.run_layers or range(len(self.starts))
        runs = zip(self.starts, [*self.starts[1:], num_units], layers, strict=True)
        return [layer for start, stop, layer in runs for _ in range(start, stop)]

    def with_first(self, num_microbatches: int) -> PipelinePlan:
        """The plan for fewer microbatches of the same size."""
        own = self.own_schedule and self.own_schedule.of_first(num_microbatches)
        return replace(self, num_microbatches=num_microbatches, own_schedule=own)

    def tasks(self) -> Schedule:
        """The schedule, task by task."""
        edges = edges_between(self.sends)
        if self.is_chain:
            count = len(self.stages)
            edges = chain_with(count, edges)
            if self.own_schedule is not None:
                return self.own_schedule.schedule(self.schedule, edges)
            kind = terapipe(self.token_slices, self.slice_shares) if self.token_slices else self.schedule
            return build(kind, count // self.virtual, self.num_microbatches, virtual=self.virtual, edges=edges)
        return any_edges.list_schedule(
            edges,
            self.submesh_of,
            self.num_microbatches,
            seconds=task_seconds([one.cost for one in self.stages]),
            backward=any_edges.backward_in(self.schedule),
        )

    def side_by_side(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Stages that do not depend on each other: for each fork of the program, the stages of each branch."""
        return any_edges.side_by_side(len(self.stages), edges_between(self.sends))

    def timeline(self) -> PipelineTimeline:
        """The simulated timeline of one step; of an asynchronous schedule, of one batch alone."""
        costs = [one.cost for one in self.stages]
        return staged_timeline(self.tasks(), costs, self.sends, submeshes_of(self.stages))

    def streamed(self, costs: Sequence[StageCost] | None = None) -> StreamedTime | None:
        """The simulated stream of batches of an asynchronous schedule; None of another one.

        Args:
            costs: of the stages; by default as planned.
        """
        kind = KINDS.get(self.schedule)
        if kind is None or not kind.is_asynchronous:
            return None
        used = [one.cost for one in self.stages] if costs is None else costs
        edges = chain_with(len(self.stages), edges_between(self.sends))
        return streamed_time(kind, self.num_microbatches, edges, used, self.sends, submeshes_of(self.stages))

    def shown_timeline(self) -> PipelineTimeline:
        """The simulated timeline that shows the schedule: of a step, or of the first batches of a stream."""
        streamed = self.streamed()
        return self.timeline() if streamed is None else replace(streamed.timeline, versions=streamed.reads)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types, as `save` writes it, without `in_tree` and `out_tree`."""
        body = {f.name: encode(getattr(self, f.name)) for f in fields(self) if f.compare}
        for name in (
            "considered",
            "own_schedule",
            "splits_loops",
            "token_slices",
            "slice_shares",
            "weight_versions",
        ):  # newer than version 8
            if not body[name]:
                del body[name]
        return {"format": FORMAT, "version": VERSION, **in_columns(body)}

    @classmethod
    def from_json(cls, data: Any) -> PipelinePlan:
        """The inverse of `to_json`.

        Raises:
            PlanFileError: a field is missing, unknown, ill-typed or inconsistent; the text names it.
        """
        return read_document(data, FORMAT, MIGRATIONS, reader(decoder(cls), _check))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, like `Plan.save`.

        Raises:
            PlanFileError: the file cannot be written.
        """
        write_document(self.to_json(), path)


def _check(plan: PipelinePlan) -> None:
    """Refuse fields that are well typed but inconsistent."""
    check_positions(plan)
    renewed = {position for position, _ in plan.carried}
    if any(not 0 <= n < len(plan.inputs) or n in renewed for n in plan.read_state):
        raise WrongFieldError("read_state", "must name inputs that are not carried")
    if plan.virtual < 1:
        raise WrongFieldError("virtual", f"is {plan.virtual}, but must be at least 1")
    if not plan.stages or len(plan.stages) % plan.virtual:
        raise WrongFieldError("stages", f"has {len(plan.stages)} entries, which is not a multiple of {plan.virtual}")
    layer = 0
    for number, stage in enumerate(plan.stages):
        _check_places(plan, number)
        if stage.first_layer != layer or stage.last_layer < layer:
            raise WrongFieldError(f"stages[{number}].first_layer", f"must be {layer}, and last_layer at least that")
        layer = stage.last_layer + 1
        try:
            check_plan(stage.plan)
        except WrongFieldError as wrong:
            raise WrongFieldError(f"stages[{number}].plan.{wrong.place}", wrong.problem) from None
    _check_layers(plan, layer)
    _check_sends(plan)
    _check_schedule(plan)
    _check_versions(plan)
    _check_prices(plan)
    for name, leaves, tensors in (
        ("input_parts", plan.input_parts, plan.inputs),
        ("output_parts", plan.output_parts, plan.outputs),
    ):
        if len(leaves) != len(tensors):
            raise WrongFieldError(name, f"must have an entry for each of {len(tensors)}")
        for position, (parts, tensor) in enumerate(zip(leaves, tensors, strict=True)):
            if not parts or any(not 0 <= part.stage < len(plan.stages) for part in parts):
                raise WrongFieldError(f"{name}[{position}]", f"must name stages from 0 to {len(plan.stages) - 1}")
            for part in parts:
                check_sharding(part.sharding, plan.stages[part.stage].plan.mesh, f"{name}[{position}]")
            dims = {len(part.sharding.dims) for part in parts}
            in_range = all(_in_range(part.rows, tensor.shape) for part in parts)
            if dims != {len(tensor.shape)} or not in_range:
                raise WrongFieldError(f"{name}[{position}]", f"does not fit a tensor of shape {tensor.shape}")


def _check_places(plan: PipelinePlan, number: int) -> None:
    """Refuse submeshes of a stage that the cluster lacks, or that differ from its mesh or from each other."""
    stage = plan.stages[number]
    if max(submesh.devices.stop for submesh in stage.places) > plan.cluster.num_devices:
        raise WrongFieldError(f"stages[{number}].submesh", f"goes beyond {plan.cluster}")
    if stage.plan.mesh.num_devices != len(stage.devices):
        raise WrongFieldError(f"stages[{number}].plan.mesh", f"must have {len(stage.devices)} devices")
    if any(submesh.shape != stage.submesh.shape for submesh in stage.replicas):
        raise WrongFieldError(f"stages[{number}].replicas", f"must have the shape {stage.submesh.shape}")


def _check_layers(plan: PipelinePlan, num_layers: int) -> None:
    """Refuse layers that differ from those of the stages."""
    layers = plan.run_layers or range(len(plan.starts))
    if len(layers) != len(plan.starts):
        raise WrongFieldError("run_layers", f"must have an entry for each of {len(plan.starts)} starts")
    if len(set(layers)) != num_layers or set(layers) != set(range(num_layers)):  # the number may be huge
        raise WrongFieldError("starts", f"has {len(set(layers))} layers, but the stages have {num_layers}")
    if list(plan.starts) != sorted(set(plan.starts)):
        raise WrongFieldError("starts", "must increase")


def _check_schedule(plan: PipelinePlan) -> None:
    """Refuse a schedule that is unknown, or that does not run these stages on their submeshes."""
    if not plan.is_chain:
        return
    if plan.token_slices and (plan.schedule != TERAPIPE.name or min(plan.token_slices) < 1):
        raise WrongFieldError("token_slices", f"must be positive, and belong to schedule {TERAPIPE.name!r}")
    if plan.slice_shares and (
        len(plan.slice_shares) != len(plan.token_slices) or any(min(one) < 0 for one in plan.slice_shares)
    ):
        raise WrongFieldError("slice_shares", "must have a pair of shares, none negative, for each slice of tokens")
    if plan.own_schedule is None and plan.schedule not in KINDS:
        raise WrongFieldError("schedule", f"is {plan.schedule!r}, which is none of {', '.join(KINDS)}")
    field = "schedule" if plan.own_schedule is None else "own_schedule"
    try:
        tasks = plan.tasks()
        check_replicas(tasks)
    except ScheduleError as error:
        raise WrongFieldError(field, f"is not legal: {error}") from None
    parts = max(1, len(plan.token_slices))
    if (tasks.num_stages, tasks.num_microbatches) != (len(plan.stages), parts * plan.num_microbatches):
        raise WrongFieldError(
            field,
            f"has {tasks.num_stages} stages and {tasks.num_microbatches} microbatches, but the plan {len(plan.stages)} and"
            f" {plan.num_microbatches}",
        )
    if tasks.replicas != plan.submeshes_of:
        raise WrongFieldError("stages", f"must be on the submeshes on which {plan.schedule!r} runs them")


def _check_versions(plan: PipelinePlan) -> None:
    """Refuse versions of weights of a synchronous schedule, or impossible ones."""
    kept, kind = plan.weight_versions, KINDS.get(plan.schedule)
    if bool(kept) != (kind is not None and kind.is_asynchronous) or (kept and len(kept) != len(plan.stages)):
        raise WrongFieldError(
            "weight_versions", "must have an entry for each stage of an asynchronous schedule, else none"
        )
    if any(
        one.copies < 1
        or min(one.num_bytes, one.kept_bytes, one.velocity_bytes, one.corrected_bytes) < 0
        or not 0 <= one.least_delay <= one.most_delay
        for one in kept
    ):
        raise WrongFieldError("weight_versions", "must have a copy at least, and no negative bytes or delays")


def _check_prices(plan: PipelinePlan) -> None:
    """Refuse negative seconds, by which a task could start before what it depends on."""
    for number, stage in enumerate(plan.stages):
        cost = stage.cost
        if min(cost.forward_s, cost.backward_s, cost.weight_s, cost.update_s) < 0:
            raise WrongFieldError(f"stages[{number}].cost", "has negative seconds")
    if any(one.seconds < 0 for one in plan.sends):
        raise WrongFieldError("sends", "has negative seconds")


def _check_sends(plan: PipelinePlan) -> None:
    """Refuse impossible transfers, and submeshes that overlap without being equal."""
    count, ends = len(plan.stages), [(one.source, one.target, one.when) for one in plan.sends]
    wrong = any(
        not (0 <= one.source < count and 0 <= one.target < count)
        or (one.source == one.target and not (one.when == "end" and plan.stages[one.source].replicas))
        for one in plan.sends
    )
    if wrong or len(set(ends)) < len(ends):
        raise WrongFieldError("sends", f"must go from stages to others, up to {count - 1}, once each")
    every = (submesh.devices for stage in plan.stages for submesh in stage.places)
    places = sorted({(devices.start, devices.stop) for devices in every})
    for (_, stop), (start, _) in pairwise(places):
        if start < stop:
            raise WrongFieldError("stages", f"overlap: several submeshes have device {start}")


def _in_range(rows: tuple[int, int, int] | None, shape: tuple[int, ...]) -> bool:
    if rows is None:
        return True
    dim, start, stop = rows
    return 0 <= dim < len(shape) and 0 <= start < stop <= shape[dim]


#: A plan of one program or of a pipelined step.
AnyPlan = Plan | PipelinePlan
