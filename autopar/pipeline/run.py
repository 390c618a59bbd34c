"""Run the stages of a step, each on devices of its own.

In: `PlannedStage`s and a schedule. Out: `Pipeline.run`, from the leaves of the step's arguments to those of its results.
Each piece of a stage is a jitted program; arrays pass from stage to stage by `jax.device_put`, laid out as the receiver
wants them. Nothing waits: tasks are dispatched one after another, and devices run them as their inputs arrive. What no
later task of a stage reads is let go as soon as the last one has been dispatched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.partition_spec import named_shardings
from autopar.pipeline.cutting import StageProgram
from autopar.pipeline.extract import Port
from autopar.pipeline.leaves import joined, part_of, sharding_of_parts
from autopar.pipeline.pieces import Layout, Level, Piece, Pieces, Slot, pieces_of, value_levels
from autopar.pipeline.simulate import simulate
from autopar.pipeline.tasks import Schedule, Task
from autopar.pipeline.unstack import Rows
from autopar.plan import Plan
from autopar.replay import Replay

#: By result, its parts.
Results = dict[int, dict[Rows | None, Any]]

#: Within one microbatch, pieces run in this order.
_ORDER = {"forward": 0, "backward": 1, "input": 1, "weight": 2}


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage and how it is split over its devices."""

    program: StageProgram
    plan: Plan
    mesh: Mesh


class Pipeline:
    """A step that runs stage by stage.

    Args:
        stages: in the order of the program.
        schedule: over as many stages.
        outputs: of the step as traced: how many, and those of them that are scalars of the program.
        compiler_options: as `jax.jit` takes them.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        schedule: Schedule,
        num_outputs: int,
        literals: Mapping[int, Any],
        *,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.stages, self.schedule = tuple(stages), schedule
        self.num_outputs, self.literals = num_outputs, dict(literals)
        splits_backward = any(task.phase == "input" for task in schedule.tasks)
        layouts = [Layout(one.program.program.of(one.plan).trace, one.program.inputs) for one in stages]
        pieces = [
            pieces_of(layout, level, splits_backward)
            for layout, level in zip(layouts, _levels(stages, layouts), strict=True)
        ]
        self.runners = [
            _Runner(stage, one, layout, compiler_options)
            for stage, one, layout in zip(stages, pieces, layouts, strict=True)
        ]
        self._connect()
        self.homes = self._homes()
        self.around = sorted({(level, s) for s, one in enumerate(self.runners) for level in one.pieces.around})
        self.loop = [task for task in _dispatched(schedule) if task.phase in self.runners[task.stage].pieces.each]

    def _connect(self) -> None:
        readers: dict[int, list[_Sent]] = defaultdict(list)
        for s, runner in enumerate(self.runners):
            for value, inner in runner.pieces.takes_inside.items():
                sent = _Sent(s, Slot("each", inner), runner.shardings[Port("inside", value)])
                readers[value].append(sent)
        for runner in self.runners:
            for value, inner in runner.pieces.gives_inside.items():
                for prepared in runner.prepared.values():
                    slot = next((slot for slot in prepared.piece.gives if slot.value == inner), None)
                    if slot is not None and readers[value]:
                        prepared.sends.append((slot, readers[value]))

    def _homes(self) -> dict[Port, int]:
        """By argument, or part of one, the stage whose own it is: whoever gives it back, else the first that takes it."""
        homes: dict[Port, int] = {}
        for s, stage in enumerate(self.stages):
            carried = {position for position, _ in stage.program.program.graph.carried}
            for position, port in enumerate(stage.program.inputs):
                if port.kind == "argument" and (port not in homes or position in carried):
                    homes[port] = s
        return homes

    @property
    def in_shardings(self) -> dict[int, NamedSharding]:
        """By argument, where it lies; not of one whose layers lie on several submeshes, and in no equal parts."""
        found: dict[int, dict[Rows | None, NamedSharding]] = defaultdict(dict)
        for port, s in self.homes.items():
            found[port.value][port.rows] = self.runners[s].shardings[port]
        whole = {i: sharding_of_parts(parts) for i, parts in found.items()}
        return {i: sharding for i, sharding in whole.items() if sharding is not None}

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """The step, from the leaves of its arguments to those of its results."""
        values = [_Values(self.schedule.num_microbatches) for _ in self.runners]
        results: Results = {i: {None: value} for i, value in self.literals.items()}
        for s, (runner, own) in enumerate(zip(self.runners, values, strict=True)):
            for port, slot in runner.arguments:
                own.once[slot] = part_of(leaves[port.value], port.rows, runner.shardings[port])
            for port, slot in runner.passed_through:
                results.setdefault(port.value, {})[port.rows] = values[s].once[slot]
        before = [one for one in self.around if not one[0][0]]
        for level, s in before:
            self._once(level, s, values, results)
        for task in self.loop:
            self._each(task, values)
        for level, s in self.around[len(before) :]:
            self._once(level, s, values, results)
        return [joined(results[i]) for i in range(self.num_outputs)]

    # -- inside ------------------------------------------------------------------------------

    def _once(self, level: Level, s: int, values: Sequence[_Values], results: Results) -> None:
        prepared, own = self.runners[s].prepared[level], values[s]
        made, outputs = prepared.jitted(
            [own.once[slot] for slot in prepared.carries],
            [own.of_all(slot) if slot.kind == "each" else own.once[slot] for slot in prepared.others],
        )
        for slot, value in zip(prepared.piece.gives, made, strict=True):
            if slot.kind == "each":
                own.put_all(slot, value)
            else:
                own.once[slot] = value
        for i, value in zip(prepared.piece.outputs, outputs, strict=True):
            self._give(self.stages[s].program.outputs[i], value, values, results)

    def _each(self, task: Task, values: Sequence[_Values]) -> None:
        prepared, own = self.runners[task.stage].prepared[task.phase], values[task.stage]
        each = own.each[task.microbatch]
        made, _ = prepared.jitted(
            [own.once[slot] for slot in prepared.carries],
            [each[slot] if slot.kind == "each" else own.once[slot] for slot in prepared.others],
        )
        for slot, value in zip(prepared.piece.gives, made, strict=True):
            (each if slot.kind == "each" else own.once)[slot] = value
        for slot, readers in prepared.sends:
            value = each[slot]
            for sent in readers:
                values[sent.to].each[task.microbatch][sent.slot] = jax.device_put(value, sent.sharding)
        for slot in prepared.frees:
            each.pop(slot, None)

    def _give(self, port: Port, value: Any, values: Sequence[_Values], results: Results) -> None:
        if port.kind == "result":
            results.setdefault(port.value, {})[port.rows] = value
            return
        for s, runner in enumerate(self.runners):
            slot = runner.outside.get(port)
            if slot is not None:
                values[s].once[slot] = jax.device_put(value, runner.shardings[port])


@dataclass(frozen=True, slots=True)
class _Sent:
    """Where a value goes: a stage, its slot there, and how it lies."""

    to: int
    slot: Slot
    sharding: NamedSharding


@dataclass(slots=True)
class _Prepared:
    """A piece that can be run.

    Args:
        carries: what it takes and gives back, whose memory it may use again. others: what else it takes.
        sends: of each microbatch, what goes where. frees: what is not needed after it.
    """

    piece: Piece
    jitted: Callable[..., Any]
    carries: tuple[Slot, ...]
    others: tuple[Slot, ...]
    frees: tuple[Slot, ...]
    sends: list[tuple[Slot, Sequence[_Sent]]] = field(default_factory=list)


class _Values:
    """What a stage has at one moment of a step."""

    def __init__(self, num_microbatches: int) -> None:
        self.once: dict[Slot, Any] = {}
        self.each: list[dict[Slot, Any]] = [{} for _ in range(num_microbatches)]

    def of_all(self, slot: Slot) -> tuple[Any, ...]:
        return tuple(one.pop(slot) for one in self.each)

    def put_all(self, slot: Slot, values: Iterable[Any]) -> None:
        for one, value in zip(self.each, values, strict=True):
            one[slot] = value


class _Runner:
    """One stage: its pieces, jitted, and where its values come from and go to."""

    def __init__(
        self, stage: PlannedStage, pieces: Pieces, layout: Layout, compiler_options: Mapping[str, Any] | None
    ) -> None:
        plan, trace = stage.plan, layout.trace
        self.pieces, self.layout = pieces, layout
        self.replay = Replay(plan, trace, stage.mesh)
        self.entered = {leave: enter for enter, leave in layout.carries.items()}
        self.compiler_options = dict(compiler_options) if compiler_options else None
        self.shardings = dict(
            zip(stage.program.inputs, named_shardings([t.sharding for t in plan.inputs], stage.mesh), strict=True)
        )
        for value, inner in pieces.takes_inside.items():
            path = self.replay.at_definition.get(inner, ())
            if path:  # it comes as the loop has it
                self.shardings[Port("inside", value)] = named_shardings(path[-1:], stage.mesh)[0]
        slots = [(port, Slot("once", value)) for port, value in zip(stage.program.inputs, trace.inputs, strict=True)]
        self.arguments = [(port, slot) for port, slot in slots if port.kind == "argument"]
        self.outside = {port: slot for port, slot in slots if port.kind == "outside"}
        inputs = {slot.value: slot for _, slot in slots}
        self.passed_through = [
            (port, inputs[value])
            for port, value in zip(stage.program.outputs, trace.outputs, strict=True)
            if port.kind == "result" and isinstance(value, int) and value in inputs
        ]
        whole: dict[Level | str, Piece] = {**pieces.around, **pieces.each}
        frees = self._frees()
        self.prepared = {key: self._prepared(piece, frees.get(key, ())) for key, piece in whole.items()}

    def _frees(self) -> dict[Level | str, list[Slot]]:
        """By phase, what no later one of the microbatch needs."""
        later = {slot for piece in self.pieces.around.values() for slot in piece.takes}
        last: dict[Slot, str] = {}
        for phase, piece in sorted(self.pieces.each.items(), key=lambda item: _ORDER[item[0]]):
            for slot in (*piece.takes, *piece.gives):
                if slot.kind == "each" and slot not in later:
                    last[slot] = phase
        found: dict[Level | str, list[Slot]] = defaultdict(list)
        for slot, phase in last.items():
            found[phase].append(slot)
        return found

    def _prepared(self, piece: Piece, frees: Sequence[Slot]) -> _Prepared:
        carries = tuple(slot for slot in piece.takes if slot.kind == "carry" and slot in piece.gives)
        others = tuple(slot for slot in piece.takes if slot not in carries)
        function = self._function(piece, carries, others)
        jitted = jax.jit(function, donate_argnums=0, compiler_options=self.compiler_options)
        return _Prepared(piece, jitted, carries, others, tuple(frees))

    def _function(self, piece: Piece, carries: Sequence[Slot], others: Sequence[Slot]) -> Callable[..., Any]:
        equations = self.layout.trace.equations
        in_loop = piece.name in self.pieces.each

        def run(carried: Sequence[Any], given: Sequence[Any]) -> Any:
            values = {slot.value: value for slot, value in zip((*carries, *others), (*carried, *given), strict=True)}
            part = self.replay.part(values)
            made: dict[int, Any] = {}
            for what, start, stop in piece.steps:
                if what == "run":
                    part.run(start, stop)
                elif what == "enter":
                    made[equations[start].results[0]] = part.enter(start)
                elif in_loop:
                    made[self._leaves_as(start)] = part.leave(start)
                else:
                    value = values[self._leaves_as(start)]
                    part.define(start, jnp.stack(value) if equations[start].piece == "exit_stack" else value)
            gives = [made[slot.value] if slot.value in made else part.value(slot.value) for slot in piece.gives]
            return gives, [part.output(i) for i in piece.outputs]

        run.__name__ = f"{self.layout.trace.name} {piece.name}".replace(" ", "_")
        return run

    def _leaves_as(self, leave: int) -> int:
        """The number of the slot that a piece of the loop leaves by."""
        return self.layout.trace.equations[self.entered.get(leave, leave)].results[0]


def _dispatched(schedule: Schedule) -> list[Task]:
    """The tasks in an order in which they may be dispatched: that in which they would start if all took as long."""
    spans = simulate(schedule, lambda task: 1).spans
    return [span.task for span in sorted(spans, key=lambda span: (span.start_s, span.submesh))]


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
