"""Run the stages of a step, each on devices of its own, which may be other processes'.

In: `PlannedStage`s and a schedule. Out: `Pipeline.run`, from the leaves of the step's arguments to those of its results.
Each piece of a stage is a jitted program; arrays pass from stage to stage by `jax.device_put`, laid as both sides agree.
Nothing waits: what is to be done is dispatched one after another, in the order in which a simulated step would start it,
and devices do it as their inputs arrive. That order is the same in every process; each runs the pieces of the stages
whose devices are its own, and takes part in every transfer between processes. So nothing waits in a circle: the first in
the order that has not ended waits for what came before it alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax.sharding import NamedSharding

from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.cut.pieces import Layout, pieces_of
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.run.arguments import PipelineArguments
from autopar.pipeline.run.instructions import Instructions, Values, instructions_of
from autopar.pipeline.run.levels import levels_of
from autopar.pipeline.run.piece_programs import PlannedStage, StagePieces
from autopar.pipeline.run.stacked_leaves import joined, sharding_of_parts
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.tasks import Schedule, Task

__all__ = ["Pipeline", "PlannedStage"]


class Pipeline:
    """A step that runs stage by stage.

    Every process makes it alike, of the same stages, and calls `run` alike.

    Args:
        stages: in the order of the program.
        schedule: over as many stages.
        num_outputs: of the step as traced. literals: by position, those outputs that are scalars of the program.
        donated: positions of arguments whose memory may be used again; by default those that are carried.
        may_take: whether that goes for arrays that the user made, too; else they are copied.
        compiler_options: as `jax.jit` takes them.

    Raises:
        ProcessError: a value would pass between submeshes that share a process, but not all.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        schedule: Schedule,
        num_outputs: int,
        literals: Mapping[int, Any],
        *,
        donated: Collection[int] | None = None,
        may_take: bool = False,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.stages, self.schedule = tuple(stages), schedule
        self.num_outputs, self.literals = num_outputs, dict(literals)
        splits_backward = any(task.phase == "input" for task in schedule.tasks)
        layouts = [Layout(one.program.program.of(one.plan).trace, one.program.inputs) for one in stages]
        levels = levels_of([one.program for one in stages], layouts)
        taken = [pieces_of(layout, level, splits_backward) for layout, level in zip(layouts, levels, strict=True)]
        self.pieces = [StagePieces(*one) for one in zip(stages, taken, layouts, strict=True)]
        self.carried = _carried(stages)
        self.homes = _homes(stages)
        may_donate = {leaf for leaf in self.homes if (leaf in self.carried if donated is None else leaf[0] in donated)}
        self.arguments = PipelineArguments(self.pieces, self.homes, may_donate, may_take=may_take)
        self.instructions: Instructions = instructions_of(
            self.pieces, _dispatched(schedule), self.arguments, self.carried, compiler_options
        )

    @property
    def in_shardings(self) -> dict[int, NamedSharding]:
        """By argument that a stage takes, where it lies; not of one whose layers lie on several submeshes in parts that no
        sharding says."""
        return _whole({leaf: self.pieces[s].shardings[port] for leaf, (s, port) in self.homes.items()})

    @property
    def out_shardings(self) -> dict[int, NamedSharding]:
        """By result that a stage makes, where it lies. What is carried lies as it is taken."""
        return _whole(self.instructions.out_shardings)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """The step, from the leaves of its arguments to those of its results.

        Args:
            leaves: state lies as `in_shardings` say, in other processes without local shards, or is given whole, equal on
                every process. So is everything else.

        Returns:
            State as it was given, sharded over the submeshes: of what lies in other processes alone, arrays without local
            shards. Small results that are not carried on, as a loss, have a copy in every process.
        """
        values = self.begin(leaves)
        for one in self.instructions.steps:
            one.run(values)
        return self.end(values)

    def begin(self, leaves: Sequence[Any]) -> Values:
        """What there is before the first instruction, by register."""
        values: Values = [None] * self.instructions.num_registers
        self.arguments.place(leaves, values)
        return values

    def end(self, values: Values) -> list[Any]:
        """The results, of what there is after the last instruction."""
        made = _by_leaf({leaf: result.read(values) for leaf, result in self.instructions.results.items()})
        # A scalar of the program has JAX's dtype, and is an array of its own in each step: a caller may donate it.
        return [joined(made[i]) if i in made else jnp.array(self.literals[i]) for i in range(self.num_outputs)]


_T = TypeVar("_T")


def _by_leaf(parts: Mapping[LeafKey, _T]) -> dict[int, dict[Rows | None, _T]]:
    """By position, the parts of a leaf."""
    found: dict[int, dict[Rows | None, _T]] = {}
    for (position, rows), part in parts.items():
        found.setdefault(position, {})[rows] = part
    return found


def _whole(parts: Mapping[LeafKey, NamedSharding]) -> dict[int, NamedSharding]:
    """How leaves lie whose parts lie so; not of those that no sharding describes."""
    whole = {position: sharding_of_parts(own) for position, own in _by_leaf(parts).items()}
    return {position: sharding for position, sharding in whole.items() if sharding is not None}


def _carried(stages: Sequence[PlannedStage]) -> dict[LeafKey, LeafKey]:
    """By argument, the result that takes its place."""
    found: dict[LeafKey, LeafKey] = {}
    for stage in stages:
        inputs, outputs = stage.program.inputs, stage.program.outputs
        for position, result in stage.program.program.graph.carried:
            if inputs[position].kind == "argument":
                found[inputs[position].leaf] = outputs[result].leaf
    return found


def _homes(stages: Sequence[PlannedStage]) -> dict[LeafKey, tuple[int, Any]]:
    """By argument, the stage whose own it is, and its port: whoever gives it back, else the first that takes it."""
    homes: dict[LeafKey, tuple[int, Any]] = {}
    for s, stage in enumerate(stages):
        carried = {position for position, _ in stage.program.program.graph.carried}
        for position, port in enumerate(stage.program.inputs):
            if port.kind == "argument" and (port.leaf not in homes or position in carried):
                homes[port.leaf] = (s, port)
    return homes


def _dispatched(schedule: Schedule) -> list[Task]:
    """The tasks in an order in which they may be dispatched: that in which they would start if all took as long."""
    spans = simulate(schedule, lambda task: 1).spans
    return [span.task for span in sorted(spans, key=lambda span: (span.start_s, span.submesh))]
