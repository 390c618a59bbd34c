"""Run the stages of a step on their submeshes, in one process or in several.

In: `PlannedStage`s and a schedule.
Out: `Pipeline.run`, which maps the leaves of the step's arguments to the leaves of its results. Each piece of a stage
is a jitted program; `jax.device_put` transfers arrays between stages with a sharding that suits both sides. Dispatch is
asynchronous: instructions are dispatched in the order in which the planned timeline starts them, so that the submesh
that needs its work first gets it first, and devices run them as their inputs arrive. Every process uses the same order, runs the pieces of its own stages, and takes part in every
transfer between processes. This order excludes deadlock: the earliest unfinished instruction depends only on finished
ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding

from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.cut.pieces import Layout, pieces_of
from autopar.pipeline.cut.stage_programs import carried_leaves
from autopar.pipeline.run.arguments import PipelineArguments, Values
from autopar.pipeline.run.instances import Instances
from autopar.pipeline.run.instructions import Instructions, by_leaf, instructions_of
from autopar.pipeline.run.levels import levels_of
from autopar.pipeline.run.piece_programs import PlannedStage, StagePieces
from autopar.pipeline.run.stacked_leaves import assembled, over_replicas, sharding_of_parts
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.tasks import Schedule
from autopar.pipeline.schedule.timeline import PipelineTimeline

__all__ = ["Pipeline", "PlannedStage"]


class Pipeline:
    """A step that runs stage by stage.

    Every process builds it from the same stages and calls `run` the same number of times.

    Args:
        stages: the stages in program order.
        schedule: a schedule for that number of stages, with a replica of each stage for each of its meshes.
        num_outputs: the number of outputs of the traced step.
        literals: the outputs that are scalar constants of the program, by position.
        homes: the stage that holds each argument; by default the one that updates it, else the first that uses it.
        donated: positions of arguments whose memory the step may reuse; by default the carried ones.
        may_take: whether the step may also reuse the memory of arrays that the user made; else it copies them.
        timeline: the planned timeline of the schedule, equal in all processes; by default all tasks take equally long.
        compiler_options: the option of the same name of `jax.jit`.
        own: of the microbatches into which the stages divide the batch, those that run, and how many there are: the schedule's n-th
            microbatch is the n-th of these. The results are those of these microbatches. By default all of the schedule.
        broadcasts: whether every process gets small results.

    Raises:
        ProcessError: a value would pass between two submeshes that have some but not all processes in common.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        schedule: Schedule,
        num_outputs: int,
        literals: Mapping[int, Any],
        *,
        homes: Mapping[LeafKey, int] | None = None,
        donated: Collection[int] | None = None,
        may_take: bool = False,
        timeline: PipelineTimeline | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        own: tuple[Sequence[int], int] | None = None,
        broadcasts: bool = True,
    ) -> None:
        self.stages, self.schedule = tuple(stages), schedule
        self.num_outputs, self.literals = num_outputs, dict(literals)
        splits_backward = schedule.splits_backward
        layouts = [Layout(one.program.program.of(one.plan).trace, one.program.inputs) for one in stages]
        levels = levels_of([one.program for one in stages], layouts)
        taken = [pieces_of(layout, level, splits_backward) for layout, level in zip(layouts, levels, strict=True)]
        self.instances = Instances(schedule)
        #: Of each instance of a stage.
        self.pieces = [
            StagePieces(_on_replica(stages[s], replica), taken[s], layouts[s]) for s, replica in self.instances
        ]
        self.carried = carried_leaves([one.program for one in stages])
        self.homes = _homes(stages, homes or {})
        may_donate = {leaf for leaf in self.homes if (leaf in self.carried if donated is None else leaf[0] in donated)}
        self.arguments = PipelineArguments(self.pieces, self.instances, self.homes, may_donate, may_take=may_take)
        planned = timeline or simulate(schedule, lambda task: 1)
        self.instructions: Instructions = instructions_of(
            self.pieces,
            self.instances,
            planned.tasks_by_start(),
            self.arguments,
            self.carried,
            compiler_options,
            own=own,
            broadcasts=broadcasts,
        )

    @property
    def in_shardings(self) -> dict[int, NamedSharding]:
        """The sharding of each argument that a stage uses, over all replicas of that stage. An argument whose layers are on
        several submeshes is left out if no `NamedSharding` describes it."""
        return _whole(
            {
                leaf: over_replicas([self.pieces[n].shardings[port] for n in self.instances.of(s)])
                for leaf, (s, port) in self.homes.items()
            }
        )

    @property
    def out_shardings(self) -> dict[int, NamedSharding]:
        """The sharding of each result that a stage produces. Carried state keeps its argument's sharding."""
        return _whole({leaf: result.sharding for leaf, result in self.instructions.results.items()})

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Run the step.

        Args:
            leaves: the leaves of the step's arguments. State is sharded as `in_shardings`, without local shards in
                other processes. All other leaves are whole and equal in every process; state may be so, too.

        Returns:
            The leaves of the results. Arrays of other processes have no local shards. Small results that are not
            carried, such as a loss, have a copy in every process.
        """
        values = self.begin(leaves)
        for one in self.instructions.steps:
            one.run(values)
        return self.end(values)

    def begin(self, leaves: Sequence[Any]) -> Values:
        """The registers before the first instruction."""
        values: Values = [None] * self.instructions.num_registers
        self.arguments.place(leaves, values)
        return values

    def end(self, values: Values) -> list[Any]:
        """The results, from the registers after the last instruction."""
        parts = by_leaf({leaf: result.read(values) for leaf, result in self.instructions.results.items()})
        # A scalar constant becomes a new array in each step, because the caller may donate it.
        return [assembled(parts[i]) if i in parts else jnp.array(self.literals[i]) for i in range(self.num_outputs)]


def _whole(parts: Mapping[LeafKey, NamedSharding]) -> dict[int, NamedSharding]:
    """The shardings of whole leaves, given those of their parts; without leaves that no `NamedSharding` describes."""
    whole = {position: sharding_of_parts(own) for position, own in by_leaf(parts).items()}
    return {position: sharding for position, sharding in whole.items() if sharding is not None}


def _on_replica(stage: PlannedStage, replica: int) -> PlannedStage:
    """A stage as one of its replicas has it: on its own mesh, with those of the others."""
    meshes = (stage.mesh, *stage.replicas)
    others = tuple(mesh for n, mesh in enumerate(meshes) if n != replica)
    return replace(stage, mesh=meshes[replica], replicas=others)


def _homes(stages: Sequence[PlannedStage], given: Mapping[LeafKey, int]) -> dict[LeafKey, tuple[int, Any]]:
    """The home stage of each argument and its port: the stage that updates it, else the given one if it uses it, else
    the first that does."""
    homes: dict[LeafKey, tuple[int, Any]] = {}
    for s, stage in enumerate(stages):
        carried = {position for position, _ in stage.program.program.graph.carried}
        for position, port in enumerate(stage.program.inputs):
            if port.kind != "argument":
                continue
            if port.leaf not in homes or position in carried or given.get(port.leaf) == s:
                homes[port.leaf] = (s, port)
    return homes
