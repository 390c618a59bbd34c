"""The plan of a step in stages, as plain data: which layers on which devices, the schedule, and a `Plan` for each stage.

In: filled by `planning`. Out: run by `staged_step`, told by `explain`, kept as JSON like any plan.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from autopar.ir.placement import Lies, Part
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.partition.cluster import Cluster, Submesh
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.partition.step_time import Send, staged_timeline, task_seconds
from autopar.pipeline.schedule import dag as any_edges
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import Schedule, chain
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.plans.columnar_numbers import in_columns, reader, write_document
from autopar.plans.json_codec import MaybeInfinite, WrongFieldError, as_it_is, decoder, encode, read_document, without
from autopar.plans.plan import Plan
from autopar.plans.records import Efficiency, ProgramSignature, TensorPlan
from autopar.plans.validate import check_plan, check_positions, check_sharding

#: What the file of such a plan says it is; from each version of its fields to the next, as in `plan`.
FORMAT = "autopar-pipeline-plan"


def _second_to_third(body: dict[str, Any]) -> dict[str, Any]:
    """Times of the search are in no file."""
    body = without("search_time_s", of="outcome")(body)
    of_stage = without("solve_time_s", of="outcome")
    stages = body.get("stages")
    if not isinstance(stages, list):
        return body
    known = [isinstance(stage, dict) and isinstance(stage.get("plan"), dict) for stage in stages]
    return body | {
        "stages": [
            stage | {"plan": of_stage(stage["plan"])} if is_one else stage
            for stage, is_one in zip(stages, known, strict=True)
        ]
    }


MIGRATIONS = (as_it_is, _second_to_third, as_it_is, as_it_is, as_it_is)
VERSION = len(MIGRATIONS) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A run of layers on a submesh.

    Args:
        first_layer, last_layer: both included.
        cost: the price that it was chosen by; bytes are per device.
        plan: of the stage's own program.
    """

    first_layer: int
    last_layer: int
    submesh: Submesh
    cost: StageCost
    plan: Plan

    @property
    def devices(self) -> range:
        """Their numbers, host after host."""
        return self.submesh.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafPart:
    """An array of the step's arguments or results on the submesh of a stage, or some of its rows.

    Args:
        rows: the dim that counts layers, the first layer, and the one after the last; None for all of it.
    """

    stage: int
    sharding: TensorSharding
    rows: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePrediction:
    """What is expected of a step in stages.

    Args:
        step_time_s: by the simulator. bubble_fraction: the share of all devices' time in which they wait.
        stage_bytes: on one device of each submesh, at most.
    """

    step_time_s: float
    bubble_fraction: float
    stage_bytes: tuple[float, ...]

    @property
    def peak_bytes(self) -> float:
        """On the device that holds most."""
        return max(self.stage_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesTried:
    """Another way to run the step; `step_time_s` is `inf` where nothing fitted.

    Args:
        schedule: "" for one program on all devices.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    step_time_s: MaybeInfinite
    peak_bytes: MaybeInfinite


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """How the stages were found.

    Args:
        gap: (cost - lower bound) / cost of the partition, by its objective.
        num_planned: runs of layers that were planned to be priced.
        search_time_s: of this run: no file holds it.
    """

    status: str
    gap: float
    num_layers: int
    num_planned: int
    search_time_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Everything decided about a step in stages. `in_tree` / `out_tree` are JAX tree structures, absent from files.

    Args:
        program: of the step as traced.
        starts: where in the forward pass each layer begins; where branches are layers of their own, where each run of
            units of one layer does.
        run_layers: of each such run, its layer; by default one after another.
        sends: what stages send each other in a microbatch: in a chain each to the next.
        virtual: stages on each submesh of a chain.
        own_statistics: where the batch feeds back, each microbatch has its own statistics.
        inputs, outputs: of the step. Their `sharding` is that of their first part.
        input_parts, output_parts: on which submeshes each lies: on that of one stage, or a stack of layers on several.
        carried: positions of inputs and outputs that hold the same state.
        efficiency: what MFU and throughput are computed from; None in plans of older files.
    """

    program: ProgramSignature
    cluster: Cluster
    memory_budget_bytes: float | None
    words: str
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
    own_statistics: bool = False
    tried: tuple[StagesTried, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    in_tree: Any = field(default=None, compare=False, repr=False)
    out_tree: Any = field(default=None, compare=False, repr=False)

    @property
    def hardware(self) -> str:
        """The kinds of device, for people."""
        return " + ".join(self.cluster.kinds)

    @property
    def num_devices(self) -> int:
        """Of the cluster."""
        return self.cluster.num_devices

    def lies(self, position: int) -> Lies:
        """Where an input lies."""
        return tuple(
            Part(part.sharding, self.stages[part.stage].plan.mesh, self.stages[part.stage].devices.start, part.rows)
            for part in self.input_parts[position]
        )

    @property
    def submesh_of(self) -> tuple[int, ...]:
        """Of each stage, the number of the submesh that it stands on."""
        found: dict[range, int] = {}
        return tuple(found.setdefault(stage.devices, len(found)) for stage in self.stages)

    @property
    def is_chain(self) -> bool:
        """Whether each stage feeds the next, and no other."""
        return self.schedule not in any_edges.WORDS

    @property
    def stage_of(self) -> tuple[int, ...]:
        """Of each layer, its stage."""
        return tuple(s for s, stage in enumerate(self.stages) for _ in range(stage.first_layer, stage.last_layer + 1))

    def layers_of_units(self, num_units: int) -> list[int]:
        """By unit of the forward pass, its layer.

        Args:
            num_units: of the forward pass.
        """
        layers = self.run_layers or range(len(self.starts))
        runs = zip(self.starts, [*self.starts[1:], num_units], layers, strict=True)
        return [layer for start, stop, layer in runs for _ in range(start, stop)]

    def tasks(self) -> Schedule:
        """The schedule, task by task."""
        if self.is_chain:
            return build(self.schedule, len(self.stages) // self.virtual, self.num_microbatches, virtual=self.virtual)
        return any_edges.as_they_come(
            [(one.source, one.target) for one in self.sends],
            self.submesh_of,
            self.num_microbatches,
            seconds=task_seconds([one.cost for one in self.stages]),
            backward=any_edges.backward_in(self.schedule),
        )

    def side_by_side(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Stages that do not wait for one another: of each place where branches run side by side, the stages of each
        branch."""
        return any_edges.side_by_side(len(self.stages), [(one.source, one.target) for one in self.sends])

    def timeline(self) -> PipelineTimeline:
        """One step, simulated."""
        return staged_timeline(self.tasks(), [one.cost for one in self.stages], self.sends)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types: what `save` writes. `in_tree` and `out_tree` are left out."""
        body = {f.name: encode(getattr(self, f.name)) for f in fields(self) if f.compare}
        return {"format": FORMAT, "version": VERSION, **in_columns(body)}

    @classmethod
    def from_json(cls, data: Any) -> PipelinePlan:
        """The inverse of `to_json`.

        Raises:
            PlanFileError: naming the field that is missing, unknown, ill-typed or inconsistent.
        """
        return read_document(data, FORMAT, MIGRATIONS, reader(decoder(cls), _check))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, as `Plan.save` does.

        Raises:
            PlanFileError: where it cannot be written.
        """
        write_document(self.to_json(), path)


def _check(plan: PipelinePlan) -> None:
    """Refuse what is well typed but points nowhere."""
    check_positions(plan)
    if not plan.stages or len(plan.stages) % plan.virtual:
        raise WrongFieldError("stages", f"has {len(plan.stages)} entries, which is no multiple of {plan.virtual}")
    layer = 0
    for number, stage in enumerate(plan.stages):
        if stage.first_layer != layer or stage.last_layer < layer:
            raise WrongFieldError(f"stages[{number}].first_layer", f"must be {layer}, and last_layer at least that")
        layer = stage.last_layer + 1
        if stage.devices.stop > plan.cluster.num_devices:
            raise WrongFieldError(f"stages[{number}].submesh", f"goes beyond {plan.cluster}")
        if stage.plan.mesh.num_devices != len(stage.devices):
            raise WrongFieldError(f"stages[{number}].plan.mesh", f"is not of {len(stage.devices)} devices")
        try:
            check_plan(stage.plan)
        except WrongFieldError as wrong:
            raise WrongFieldError(f"stages[{number}].plan.{wrong.place}", wrong.words) from None
    _check_layers(plan, layer)
    _check_sends(plan)
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


def _check_layers(plan: PipelinePlan, num_layers: int) -> None:
    """Refuse layers that are not those of the stages."""
    layers = plan.run_layers or range(len(plan.starts))
    if len(layers) != len(plan.starts):
        raise WrongFieldError("run_layers", f"must have an entry for each of {len(plan.starts)} starts")
    if set(layers) != set(range(num_layers)):
        raise WrongFieldError("starts", f"has {len(set(layers))} layers, but the stages have {num_layers}")
    if list(plan.starts) != sorted(set(plan.starts)):
        raise WrongFieldError("starts", "must increase")


def _check_sends(plan: PipelinePlan) -> None:
    """Refuse what does not pass from a stage to a later one, and stages that share some of their devices only."""
    count, edges = len(plan.stages), [(one.source, one.target) for one in plan.sends]
    if len(set(edges)) < len(edges) or any(not 0 <= source < target < count for source, target in edges):
        raise WrongFieldError("sends", f"must go from stages to later ones, up to {count - 1}, once each")
    if plan.is_chain and sorted(edges) != list(chain(count)):
        raise WrongFieldError("sends", f"must go from each of {count} stages to the next")
    places = sorted({(stage.devices.start, stage.devices.stop) for stage in plan.stages})
    for (_, stop), (start, _) in pairwise(places):
        if start < stop:
            raise WrongFieldError("stages", f"stand on submeshes that have device {start} in common")


def _in_range(rows: tuple[int, int, int] | None, shape: tuple[int, ...]) -> bool:
    if rows is None:
        return True
    dim, start, stop = rows
    return 0 <= dim < len(shape) and 0 <= start < stop <= shape[dim]


#: Of one program, or of several.
AnyPlan = Plan | PipelinePlan
