"""Make a pipelined step callable.

In: a `PipelinePlan`, the traced program, and devices.
Out: `PipelinedStep`, which maps the step's arguments, as pytrees, to its results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import PlanMismatchError
from autopar.frontend.equations import LiteralOperand
from autopar.jax_interop.partition_spec import named_shardings
from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.cut.stage_programs import Cuttable, StageProgram
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.plan import LeafPart, PipelinePlan
from autopar.pipeline.run.executor import Pipeline, PlannedStage
from autopar.pipeline.run.measured import run_measured
from autopar.pipeline.run.stacked_leaves import over_replicas, sharding_of_parts
from autopar.pipeline.run.stream import StreamedPipeline
from autopar.pipeline.schedule.corrections import Corrections
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.runtime import jit as execute
from autopar.runtime.own_arrays import OwnArguments, items, make_own
from autopar.transforms.program import Program


def stage_programs(plan: PipelinePlan, program: Program) -> tuple[StageProgram, ...]:
    """The programs of a plan's stages, in the form in which each was planned.

    Raises:
        PlanMismatchError: the plan was made by another version of autopar or for another program.
    """
    cuttable = Cuttable.of(
        program,
        own_statistics=plan.own_statistics,
        read_state=plan.read_state,
        splits_loops=plan.splits_loops,
        token_slices=plan.token_slices,
    )
    layer_of = plan.layers_of_units(len(cuttable.flow.forward))
    stages = cuttable.settled(layer_of, plan.stage_of, plan.num_microbatches)
    for number, (stage, planned) in enumerate(zip(stages, plan.stages, strict=True)):
        here = stage.program.of(planned.plan)
        difference = planned.plan.program.difference(here.signature)
        if difference is not None:
            raise PlanMismatchError(
                f"stage {number} of the plan of `{plan.program.name}` differs from the step's stage:"
                f" {difference}. Plan again."
            )
    return stages


class PipelinedStep:
    """A pipelined step on the devices of this cluster.

    Attributes:
        meshes: of each stage, that of its first replica.

    Args:
        devices: the devices, ordered by host; as many as the plan's cluster has.
        may_take: whether donated arrays that the user made may be overwritten.
        own: the microbatches that this pipeline computes, where others compute the rest: the results are those of these alone, and
            stay with the stages that make them.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        program: Program,
        devices: Sequence[Any],
        *,
        may_take: bool = False,
        own: Sequence[int] | None = None,
    ) -> None:
        self.plan = plan
        trace = program.as_traced.trace
        self.in_tree, self.out_tree = trace.in_tree, trace.out_tree
        # No `carried` here: `PipelineArguments` decides later which arrays autopar owns.
        structs = jax.tree.leaves(trace.arguments)
        self.own_arguments = OwnArguments(self.in_tree, structs, plan.donated, {}, may_take=may_take)
        self._renewed = items([output for position, output in plan.carried if position in set(plan.donated)])
        self.replica_meshes = [
            [execute.make_mesh(stage.plan.mesh, [devices[i] for i in submesh.devices]) for submesh in stage.places]
            for stage in plan.stages
        ]
        self.meshes = [meshes[0] for meshes in self.replica_meshes]
        stages = [
            PlannedStage(stage, planned.plan, mesh, tuple(replicas))
            for stage, planned, (mesh, *replicas) in zip(
                stage_programs(plan, program), plan.stages, self.replica_meshes, strict=True
            )
        ]
        literals = {i: out.value for i, out in enumerate(trace.outputs) if isinstance(out, LiteralOperand)}
        run = plan if own is None else plan.with_first(len(own))
        self.pipeline = Pipeline(
            stages,
            run.tasks(),
            len(trace.outputs),
            literals,
            homes=_homes(plan),
            donated=plan.donated,
            may_take=may_take,
            timeline=run.timeline(),
            own=None if own is None else (own, plan.num_microbatches),
            broadcasts=own is None,
        )

    @property
    def in_shardings(self) -> list[NamedSharding]:
        """The sharding of each argument; for layer stacks whose parts no `NamedSharding` describes, that of the assembled
        array: on the first replicas, or if parts are unequal, on the first stage."""
        known = self.pipeline.in_shardings
        unread = NamedSharding(self.meshes[0], PartitionSpec())
        return [
            known.get(position)
            or sharding_of_parts(self._parts(position))
            or sharding_of_parts(self._parts(position, replicas=1))
            or unread
            for position in range(len(self.plan.inputs))
        ]

    @property
    def uneven(self) -> dict[int, dict[Rows, NamedSharding]]:
        """The shardings of the parts of layer stacks that are in unequal parts on several submeshes."""
        known = self.pipeline.in_shardings
        several = [n for n, parts in enumerate(self.plan.input_parts) if len(parts) > 1 and n not in known]
        places = {n: self._parts(n) for n in several}
        return {
            n: {rows: place for rows, place in parts.items() if rows is not None}
            for n, parts in places.items()
            if sharding_of_parts(parts) is None
        }

    def _parts(self, position: int, replicas: int | None = None) -> dict[Rows | None, NamedSharding]:
        """The shardings of an argument's parts, as planned.

        Args:
            replicas: how many replicas of each stage; by default all.
        """
        return {
            _rows(part): over_replicas(
                [named_shardings([part.sharding], mesh)[0] for mesh in self.replica_meshes[part.stage][:replicas]]
            )
            for part in self.plan.input_parts[position]
        }

    def __call__(self, *trees: Any) -> Any:
        """Run the step on pytrees with the structure that it was planned for."""
        return self.dispatch(jax.tree.leaves(trees))

    def dispatch(self, leaves: Sequence[Any]) -> Any:
        """Run the step on the leaves of its arguments. Later calls may reuse the memory of the returned state."""
        return self._returned(self.pipeline.run(leaves))

    def measured(self, *trees: Any) -> tuple[Any, PipelineTimeline]:
        """Run a step that has run before, and time each task."""
        leaves, timeline = run_measured(self.pipeline, jax.tree.leaves(trees))
        return self._returned(leaves), timeline

    def streamed(
        self, kind: ScheduleKind, of_batch: Collection[int], corrections: Corrections | None = None
    ) -> StreamedPipeline:
        """The step as a pipeline that streams batches.

        Args:
            kind: an asynchronous schedule.
            of_batch: positions of arguments that are new in each batch.
            corrections: of updates and backward passes; None for none.

        Raises:
            ScheduleError: the step cannot run asynchronously.
        """
        paths = [tensor.path for tensor in self.plan.inputs]
        return StreamedPipeline(
            self.pipeline, kind, self.plan.num_microbatches, of_batch, paths, corrections=corrections
        )

    def renewed(self, leaves: Sequence[Any]) -> None:
        """Let later calls reuse the memory of state, given all leaves of a result."""
        make_own(self._renewed(leaves))

    def _returned(self, leaves: Sequence[Any]) -> Any:
        self.renewed(leaves)
        return jax.tree.unflatten(self.out_tree, leaves)


def _homes(plan: PipelinePlan) -> dict[LeafKey, int]:
    """The stage that holds each argument or part of one."""
    return {(n, _rows(part)): part.stage for n, parts in enumerate(plan.input_parts) for part in parts}


def _rows(part: LeafPart) -> Rows | None:
    return None if part.rows is None else Rows(*part.rows)
