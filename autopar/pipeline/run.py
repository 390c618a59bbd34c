"""Run the stages of a step, each on devices of its own.

In: `StageProgram`s and their plans, a schedule's tasks in an order in which they may be dispatched, and a mesh for each
stage. Out: `Pipeline.run`, from the leaves of the step's arguments to those of its results. Each piece of a stage is a
jitted program; arrays pass from stage to stage by `jax.device_put`, laid out as the receiver wants them. Nothing waits:
tasks are dispatched one after another and the devices run them as their inputs arrive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.partition_spec import named_shardings
from autopar.pipeline.cutting import StageProgram
from autopar.pipeline.extract import Port
from autopar.pipeline.pieces import Layout, Level, Piece, Pieces, Slot, pieces_of, value_levels
from autopar.plan import Plan
from autopar.replay import Replay


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage and how it is split over its devices."""

    program: StageProgram
    plan: Plan
    mesh: Mesh


class _Runner:
    """One stage: its pieces, jitted, and where its values come from and go to."""

    def __init__(
        self,
        stage: PlannedStage,
        pieces: Pieces,
        layout: Layout,
        num_microbatches: int,
        compiler_options: Mapping[str, Any] | None,
    ) -> None:
        self.compiler_options = dict(compiler_options or {}) or None
        plan, trace = stage.plan, layout.trace
        self.pieces, self.layout, self.num_microbatches = pieces, layout, num_microbatches
        self.replay = Replay(plan, trace, stage.mesh)
        planned = named_shardings([tensor.sharding for tensor in plan.inputs], stage.mesh)
        self.shardings = dict(zip(stage.program.inputs, planned, strict=True))
        for value, inner in pieces.takes_inside.items():
            path = self.replay.at_definition.get(inner, ())
            if path:
                self.shardings[Port("inside", value)] = named_shardings(path[-1:], stage.mesh)[0]
        results = named_shardings([tensor.sharding for tensor in plan.outputs], stage.mesh)
        self.results = dict(zip(stage.program.outputs, results, strict=True))
        self.jitted = {key: self._jitted(piece) for key, piece in (pieces.around | pieces.each).items()}

    def _jitted(self, piece: Piece) -> Callable[..., Any]:
        carries, others = _parted(piece)
        equations = self.layout.trace.equations

        def run(carried: Sequence[Any], given: Sequence[Any]) -> Any:
            values = dict(zip((*carries, *others), (*carried, *given), strict=True))
            part = self.replay.part({slot.value: value for slot, value in values.items()})
            made: dict[Slot, Any] = {}
            for what, start, stop in piece.steps:
                if what == "run":
                    part.run(start, stop)
                elif what == "enter":
                    made[_slot(piece.gives, equations[start].results[0])] = part.enter(start)
                elif piece.name in self.pieces.each:
                    made[_slot(piece.gives, self._left_as(start))] = part.leave(start)
                else:
                    value = values[_slot(piece.takes, self._left_as(start))]
                    part.define(start, jnp.stack(value) if equations[start].piece == "exit_stack" else value)
            gives = [made[slot] if slot in made else part.value(slot.value) for slot in piece.gives]
            return gives, [part.output(i) for i in piece.outputs]

        run.__name__ = f"{self.layout.trace.name} {piece.name}".replace(" ", "_")
        return jax.jit(run, donate_argnums=0, compiler_options=self.compiler_options)

    def _left_as(self, leave: int) -> int:
        """The number of the slot that a piece of the loop leaves by."""
        entered = {leave: enter for enter, leave in self.layout.carries.items()}
        piece = entered.get(leave, leave)
        return self.layout.trace.equations[piece].results[0]


def _parted(piece: Piece) -> tuple[list[Slot], list[Slot]]:
    """What a piece takes: carries that it gives back, and the rest."""
    carries = [slot for slot in piece.takes if slot.kind == "carry" and slot in piece.gives]
    return carries, [slot for slot in piece.takes if slot not in carries]


def _slot(slots: Iterable[Slot], value: int) -> Slot:
    return next(slot for slot in slots if slot.value == value)


class _Values:
    """What a stage has at one moment of a step."""

    def __init__(self, num_microbatches: int) -> None:
        self.once: dict[Slot, Any] = {}
        self.each: list[dict[Slot, Any]] = [{} for _ in range(num_microbatches)]

    def get(self, slot: Slot, microbatch: int | None) -> Any:
        if slot.kind != "each":
            return self.once[slot]
        if microbatch is None:
            return tuple(one[slot] for one in self.each)
        return self.each[microbatch][slot]

    def put(self, slot: Slot, value: Any, microbatch: int | None) -> None:
        if slot.kind != "each":
            self.once[slot] = value
        elif microbatch is None:
            for one, own in zip(self.each, value, strict=True):
                one[slot] = own
        else:
            self.each[microbatch][slot] = value


class Pipeline:
    """A step that runs stage by stage.

    Args:
        tasks: (stage, microbatch, phase) in an order in which they may be dispatched.
        num_inputs, num_outputs: leaves of the step.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        tasks: Sequence[tuple[int, int, str]],
        num_microbatches: int,
        num_outputs: int,
        literals: Mapping[int, Any],
        *,
        splits_backward: bool = False,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.stages, self.tasks, self.num_microbatches = stages, tuple(tasks), num_microbatches
        self.num_outputs, self.literals = num_outputs, dict(literals)
        layouts = [
            Layout(one.program.program.of(one.plan).trace, one.program.inputs, one.program.outputs) for one in stages
        ]
        levels = _levels(stages, layouts)
        self.runners = [
            _Runner(stage, pieces_of(layout, level, splits_backward), layout, num_microbatches, compiler_options)
            for stage, layout, level in zip(stages, layouts, levels, strict=True)
        ]
        self.homes = self._homes()
        self.readers: dict[int, list[int]] = defaultdict(list)
        for s, runner in enumerate(self.runners):
            for value in runner.pieces.takes_inside:
                self.readers[value].append(s)
        self.around = sorted({(level, s) for s, one in enumerate(self.runners) for level in one.pieces.around})

    def _homes(self) -> dict[int, int]:
        """By argument that only some stages take, the one whose own it is: whoever gives it back, else the first."""
        homes: dict[int, int] = {}
        for s, stage in enumerate(self.stages):
            carried = {position for position, _ in stage.program.program.graph.carried}
            for position, port in enumerate(stage.program.inputs):
                if port.kind == "argument" and (port.value not in homes or position in carried):
                    homes[port.value] = s
        return homes

    @property
    def in_shardings(self) -> dict[int, NamedSharding]:
        """By argument, where it lies."""
        return {i: self.runners[s].shardings[Port("argument", i)] for i, s in self.homes.items()}

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """The step, from the leaves of its arguments to those of its results."""
        values = [_Values(self.num_microbatches) for _ in self.runners]
        results: dict[int, Any] = dict(self.literals)
        for s, (runner, own) in enumerate(zip(self.runners, values, strict=True)):
            for position, port in enumerate(self.stages[s].program.inputs):
                if port.kind == "argument":
                    slot = Slot("once", runner.layout.trace.inputs[position])
                    own.once[slot] = jax.device_put(leaves[port.value], runner.shardings[port])
        self._pass_through(values, results)
        loop_done = False
        for level, s in self.around:
            if level[0] and not loop_done:
                self._loop(values)
                loop_done = True
            self._piece(s, level, None, values, results)
        return [results[i] for i in range(self.num_outputs)]

    # -- inside ------------------------------------------------------------------------------

    def _loop(self, values: Sequence[_Values]) -> None:
        for s, microbatch, phase in self.tasks:
            if phase in self.runners[s].pieces.each:
                self._piece(s, phase, microbatch, values, {})

    def _piece(
        self, s: int, key: Level | str, microbatch: int | None, values: Sequence[_Values], results: dict[int, Any]
    ) -> None:
        runner, own = self.runners[s], values[s]
        piece = (runner.pieces.around | runner.pieces.each)[key]
        carries, others = _parted(piece)
        taken = [own.get(slot, microbatch) for slot in others]
        made, outputs = runner.jitted[key]([own.get(slot, microbatch) for slot in carries], taken)
        for slot, value in zip(piece.gives, made, strict=True):
            own.put(slot, value, microbatch)
        for i, value in zip(piece.outputs, outputs, strict=True):
            self._give(self.stages[s].program.outputs[i], value, values, results)
        if microbatch is not None:
            self._send(s, piece, microbatch, values)

    def _send(self, s: int, piece: Piece, microbatch: int, values: Sequence[_Values]) -> None:
        """Send what others wait for."""
        given = {slot.value: slot for slot in piece.gives}
        for value, inner in self.runners[s].pieces.gives_inside.items():
            if inner in given:
                for reader in self.readers[value]:
                    to = self.runners[reader]
                    sent = jax.device_put(
                        values[s].get(given[inner], microbatch), to.shardings[Port("inside", value)]
                    )
                    values[reader].put(Slot("each", to.pieces.takes_inside[value]), sent, microbatch)

    def _give(self, port: Port, value: Any, values: Sequence[_Values], results: dict[int, Any]) -> None:
        if port.kind == "result":
            results[port.value] = value
        elif port.kind == "outside":
            for s, runner in enumerate(self.runners):
                position = next((i for i, one in enumerate(self.stages[s].program.inputs) if one == port), None)
                if position is not None:
                    slot = Slot("once", runner.layout.trace.inputs[position])
                    values[s].once[slot] = jax.device_put(value, runner.shardings[port])

    def _pass_through(self, values: Sequence[_Values], results: dict[int, Any]) -> None:
        """Results that are arguments as they came."""
        for s, stage in enumerate(self.stages):
            trace = self.runners[s].layout.trace
            for port, value in zip(stage.program.outputs, trace.outputs, strict=True):
                if port.kind == "result" and isinstance(value, int) and value in trace.inputs:
                    results[port.value] = values[s].once[Slot("once", value)]


def _levels(stages: Sequence[PlannedStage], layouts: Sequence[Layout]) -> list[dict[int, Level]]:
    """By stage and outer input, when it is there: what has passed between stages is there one level later."""
    start: Level = (0, 0)
    at: dict[int, Level] = {}
    while True:
        given: list[dict[int, Level]] = []
        found: dict[int, Level] = {}
        for stage, layout in zip(stages, layouts, strict=True):
            inputs = zip(layout.trace.inputs, stage.program.inputs, strict=True)
            given.append({v: at.get(port.value, start) for v, port in inputs if port.kind == "outside"})
            known = value_levels(layout, given[-1])
            for port, value in zip(stage.program.outputs, layout.trace.outputs, strict=True):
                if port.kind == "outside" and isinstance(value, int):
                    phase, passed = known.get(value, start)
                    found[port.value] = (phase, passed + 1)
        if found == at:
            return given
        at = found
