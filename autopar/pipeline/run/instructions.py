"""Compile a pipelined step to a list of instructions over registers.

In: the pieces of all stages, the tasks in dispatch order, and the placement of arguments.
Out: `Instructions`: calls of pieces, transfers between submeshes, and broadcasts. A register holds one array at a time
and is freed after its last use. A piece may overwrite an array that it uses last, unless another register may hold the
same array. Every process makes the same list and keeps its own part: it leaves out the calls and moves of others, and
counts their moves between processes (`moves_of_others`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.errors import ScheduleError
from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.cut.extract_stages import LeafKey, Port
from autopar.pipeline.cut.pieces import Slot, piece_name
from autopar.pipeline.run.arguments import PipelineArguments, Values
from autopar.pipeline.run.broadcast import Broadcaster, is_small
from autopar.pipeline.run.moves_of_others import MovesOfOthers
from autopar.pipeline.run.piece_programs import Compiled, Key, PieceProgram, Send, StagePieces
from autopar.pipeline.run.transfers import Crossing, Leg, is_mine, wire, without_shards
from autopar.pipeline.schedule.tasks import PHASES, Task


@dataclass(slots=True)
class Call:
    """Runs a piece.

    Args:
        task: the task that the piece belongs to; None outside the microbatch loop.
        reads: registers of the inputs.
        writes: registers of the outputs.
        frees: registers that are not used later.
        donated: a function that gives the positions in `reads` that the piece may overwrite; they are known once the
            instructions before it have run.
        after_first: a callback after the piece is compiled.
    """

    program: PieceProgram
    stage: int
    key: Key
    task: Task | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...] = ()
    donated: Callable[[], Sequence[int]] = tuple
    after_first: Callable[[], None] = lambda: None

    def run(self, values: Values) -> None:
        inputs = [values[i] for i in self.reads]
        self.settle(inputs)
        results = self.program.jitted(*inputs)
        for i, value in zip(self.writes, results, strict=True):
            values[i] = value
        for i in self.frees:
            values[i] = None

    def settle(self, inputs: Sequence[Any]) -> None:
        """Choose the piece's programs, before its first call, for these inputs or their types."""
        if self.program.jitted is None:
            self.program.settle(self.donated(), inputs)
            self.after_first()


@dataclass(slots=True)
class Move:
    """Transfers an array to another submesh. `task` is the task that produced it."""

    crossing: Crossing
    task: Task | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...] = ()

    def run(self, values: Values) -> None:
        values[self.writes[0]] = self.crossing.move(values[self.reads[0]])
        for i in self.frees:
            values[i] = None


@dataclass(slots=True)
class Broadcast:
    """Broadcasts a small result to every process."""

    broadcaster: Broadcaster
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    task: Task | None = None
    frees: tuple[int, ...] = ()

    def run(self, values: Values) -> None:
        values[self.writes[0]] = self.broadcaster.broadcast(values[self.reads[0]])
        for i in self.frees:
            values[i] = None


@dataclass(slots=True)
class Count:
    """Counts moves between other processes."""

    moves: MovesOfOthers
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    task: Task | None = None
    frees: tuple[int, ...] = ()

    def run(self, values: Values) -> None:
        self.moves.count()


Instruction = Call | Move | Broadcast | Count


@dataclass(frozen=True, slots=True)
class Result:
    """The location of a result of the step.

    Args:
        absent: the placeholder for a result that only other processes have.
    """

    register: int
    absent: Any = None

    def read(self, values: Values) -> Any:
        """The result, after the last instruction."""
        value = values[self.register]
        return self.absent if value is None else value


@dataclass(frozen=True, slots=True)
class Instructions:
    """A pipelined step as the instructions of this process.

    Args:
        results: each result or part of a result, by position and layers.
        out_shardings: the sharding of each of `results`.
        stage_of: the stage whose devices hold each register.
    """

    steps: tuple[Instruction, ...]
    num_registers: int
    results: Mapping[LeafKey, Result]
    out_shardings: Mapping[LeafKey, NamedSharding]
    stage_of: tuple[int, ...]


def instructions_of(
    stages: Sequence[StagePieces],
    tasks: Sequence[Task],
    arguments: PipelineArguments,
    carried: Mapping[LeafKey, LeafKey],
    compiler_options: Mapping[str, Any] | None,
) -> Instructions:
    """The instructions of a step after its arguments have been placed.

    Args:
        tasks: the tasks in dispatch order.
        carried: the result that replaces each carried argument.
    """
    return _Listing(stages, tasks, arguments, carried, compiler_options).run()


@dataclass(frozen=True, slots=True)
class _Path:
    """One transfer from a stage to a slot of another stage."""

    target: int
    slot: Slot
    crossing: Crossing


@dataclass(slots=True)
class _Sends:
    """The values that a piece sends. A value is resharded once for all receivers that share a wire."""

    sends: list[Send] = field(default_factory=list)
    paths: list[list[_Path]] = field(default_factory=list)


class _Listing:
    """Builds the instructions."""

    def __init__(
        self,
        stages: Sequence[StagePieces],
        tasks: Sequence[Task],
        arguments: PipelineArguments,
        carried: Mapping[LeafKey, LeafKey],
        compiler_options: Mapping[str, Any] | None,
    ) -> None:
        self.stages, self.tasks, self.arguments = stages, tasks, arguments
        self.num_slices = max(stage.layout.num_slices for stage in stages)
        self.num_microbatches = (1 + max(task.microbatch for task in tasks)) // self.num_slices
        self.steps: list[Call | Move | Broadcast] = []
        self.stage_of = list(arguments.stage_of)
        self.at: dict[tuple[int, Slot, int | None], int] = {
            (s, slot, None): register for (s, slot), register in arguments.registers.items()
        }
        self.replacements = set(carried.values())
        self.results: dict[LeafKey, Result] = {}
        self.out_shardings: dict[LeafKey, NamedSharding] = {}
        self.sends = [{key: self._sends(s, key) for key in stage.whole} for s, stage in enumerate(stages)]
        compiled: dict[Mesh, Compiled] = {}
        self.programs = [
            {
                key: stage.program(
                    key,
                    self.sends[s][key].sends,
                    self._arrivals(s),
                    self.num_microbatches,
                    compiler_options,
                    compiled.setdefault(stage.stage.mesh, {}),
                )
                for key in stage.whole
            }
            for s, stage in enumerate(stages)
        ]
        self._check_covered()
        #: Registers that may hold the same array as another.
        self.shared = set(arguments.shared)

    def run(self) -> Instructions:
        for s, stage in enumerate(self.stages):
            for result, slot in stage.passed_through.items():
                port = Port("result", *result)
                self._result(port, s, self.at[s, slot, None], stage.out_shardings[port])
        around = sorted((key, s) for s, stage in enumerate(self.stages) for key in stage.pieces.around)
        for level, s in around:
            if not level[0]:
                self._call(s, level, None)
        for task in self.tasks:
            name = piece_name(task.phase, task.microbatch % self.num_slices, self.num_slices)
            if name in self.stages[task.stage].pieces.each:
                self._call(task.stage, name, task)
        for level, s in around:
            if level[0]:
                self._call(s, level, None)
        self._free()
        steps = tuple(self._own_steps())
        return Instructions(steps, len(self.stage_of), self.results, self.out_shardings, tuple(self.stage_of))

    def _check_covered(self) -> None:
        """Refuse a schedule without a task that the step needs."""
        tasks = set(self.tasks)
        needed = (
            Task(s, microbatch * self.num_slices + part, phase)
            for s, stage in enumerate(self.stages)
            for phase in PHASES
            for part in range(self.num_slices)
            if (name := piece_name(phase, part, self.num_slices)) in stage.pieces.each and name in stage.whole
            for microbatch in range(self.num_microbatches)
        )
        for task in needed:
            if task not in tasks:
                raise ScheduleError(
                    f"the schedule never runs the {task}, so the step's results would be wrong. Schedule all tasks of"
                    " every stage, or use a schedule of the package"
                )

    # -- transfers ---------------------------------------------------------------------------

    def _sends(self, s: int, key: Key) -> _Sends:
        """The values that a piece sends, and their receivers."""
        stage = self.stages[s]
        piece, ports = stage.whole[key], stage.stage.program.outputs
        found = _Sends()
        outputs: list[tuple[Port, Slot | int]] = [
            (Port("inside", value), slot)
            for value, inner in stage.pieces.gives_inside.items()
            for slot in piece.gives
            if slot.value == inner
        ]
        outputs += [(ports[i], i) for i in piece.outputs if ports[i].kind == "outside"]
        avals = stage.avals()
        for port, what in outputs:
            for t, other in enumerate(self.stages):
                inner = other.pieces.takes_inside.get(port.value) if port.kind == "inside" else None
                slot = other.outside.get(port) if inner is None else Slot("each", inner)
                if slot is None or t == s:
                    continue
                raw = jax_compat.raw_struct(avals[port])
                passing = wire(raw.shape, stage.out_shardings[port], other.shardings[port])
                path = _Path(t, slot, Crossing(raw.shape, raw.dtype, passing))
                self._add(found, Send(what, stage.out_shardings[port], passing.source), path)
        return found

    def _add(self, found: _Sends, send: Send, path: _Path) -> None:
        for known, paths in zip(found.sends, found.paths, strict=True):
            if known == send and not (path.crossing.is_here or paths[0].crossing.is_here):
                paths.append(path)
                return
        found.sends.append(send)
        found.paths.append([path])

    def _arrivals(self, t: int) -> dict[Slot, NamedSharding]:
        """The expected shardings of values that arrive at a stage with another sharding or dtype."""
        found = self.arguments.arrivals(t)
        stage = self.stages[t]
        wanted = {Slot("each", inner): Port("inside", value) for value, inner in stage.pieces.takes_inside.items()}
        wanted.update({slot: port for port, slot in stage.outside.items()})
        for sends in self.sends:
            for one in sends.values():
                for path in (path for paths in one.paths for path in paths if path.target == t):
                    sharding = stage.shardings[wanted[path.slot]]
                    if (
                        path.crossing.wire.target != sharding
                        or stage.layout.trace.avals[path.slot.value].dtype != path.crossing.dtype
                    ):
                        found[path.slot] = sharding
        return found

    # -- instructions ------------------------------------------------------------------------

    def _call(self, s: int, key: Key, task: Task | None) -> None:
        stage, program = self.stages[s], self.programs[s].get(key)
        if program is None:
            return
        microbatch = None if task is None else task.microbatch // self.num_slices
        reads = self._registers(s, program.takes, program.counts[0], microbatch)
        gives = self._registers(s, program.gives, program.counts[1], microbatch)
        sends = [self._new(s) for _ in program.sends]
        results = [self._new(s) for _ in program.results]
        writes = (*gives, *sends, *results)
        self.steps.append(Call(program, s, key, task, reads, writes))
        pairs = zip(sends, self.sends[s][key].paths, strict=True)
        ways = [(register, path) for register, paths in pairs for path in paths]
        for register, path in sorted(ways, key=lambda way: abs(way[1].target - s)):  # the nearest stage needs it first
            place = (path.target, path.slot, microbatch if path.slot.kind == "each" else None)
            if path.crossing.is_here:
                self.at[place] = register
                continue
            self.at[place] = self._new(path.target)
            self.steps.append(Move(path.crossing, task, (register,), (self.at[place],)))
        for (i, sharding), register in zip(program.results, results, strict=True):
            self._result(stage.stage.program.outputs[i], s, register, sharding)

    def _registers(
        self, s: int, slots: Sequence[Slot], counts: Sequence[int], microbatch: int | None
    ) -> tuple[int, ...]:
        found: list[int] = []
        for slot, count in zip(slots, counts, strict=True):
            each = range(count) if microbatch is None else [microbatch]
            for m in each if slot.kind == "each" else [None]:
                place = (s, slot, m)
                if place not in self.at:
                    self.at[place] = self._new(s)
                found.append(self.at[place])
        return tuple(found)

    def _new(self, s: int) -> int:
        self.stage_of.append(s)
        return len(self.stage_of) - 1

    def _result(self, port: Port, s: int, register: int, sharding: NamedSharding) -> None:
        result, aval = port.leaf, self.stages[s].avals()[port]
        if jax.process_count() > 1 and result not in self.replacements and is_small(aval):
            whole = NamedSharding(sharding.mesh, PartitionSpec())
            broadcaster = Broadcaster(aval, whole)
            copy = self._new(s)
            self.steps.append(Broadcast(broadcaster, (register,), (copy,)))
            self.results[result], self.out_shardings[result] = Result(copy), broadcaster.sharding
            return
        absent = None if is_mine(sharding) else without_shards(aval.shape, aval.dtype, sharding)
        self.results[result], self.out_shardings[result] = Result(register, absent), sharding

    def _own_steps(self) -> Iterator[Instruction]:
        """The instructions of this process, in order. Moves between others are counted before the next instruction that
        passes arrays between processes."""
        here = jax.process_index()
        mine = [any(d.process_index == here for d in stage.stage.mesh.devices.flat) for stage in self.stages]
        counts: dict[Any, Callable[[], Any]] = {}
        others: list[Leg] = []
        for one in (*self.steps, None):
            if isinstance(one, Move) and not one.crossing.is_mine:
                others += one.crossing.legs
                continue
            if others and (one is None or isinstance(one, Broadcast) or (isinstance(one, Move) and one.crossing.legs)):
                yield Count(MovesOfOthers(others, counts))
                others = []
            if one is not None and not (isinstance(one, Call) and not mine[one.stage]):
                yield one

    # -- memory ------------------------------------------------------------------------------

    def _free(self) -> None:
        """Set when each register is freed, and which registers each piece may overwrite."""
        last: dict[int, int] = {}
        for n, one in enumerate(self.steps):
            last.update(dict.fromkeys((*one.reads, *one.writes), n))
        for result in self.results.values():
            last.pop(result.register, None)
        frees: list[list[int]] = [[] for _ in self.steps]
        for register, n in last.items():
            frees[n].append(register)
        calls: dict[int, list[Call]] = {}
        for n, one in enumerate(self.steps):
            one.frees = tuple(frees[n])
            if isinstance(one, Call):
                calls.setdefault(id(one.program), []).append(one)
        for same in calls.values():
            for one in same:
                one.donated = lambda same=same: self._donated(same)
                one.after_first = lambda same=same: self._mark(same)

    def _donated(self, calls: Sequence[Call]) -> list[int]:
        """The positions of inputs that a piece may overwrite in all its calls. Arguments of the step come first, as the
        caller may hold them until the step ends unless they are donated."""
        return [
            i
            for i in sorted(range(len(calls[0].reads)), key=lambda i: calls[0].reads[i])
            if all(
                (one.reads[i] in one.frees or one.reads[i] in one.writes)
                and one.reads[i] not in self.shared
                and one.reads.count(one.reads[i]) == 1
                for one in calls
            )
        ]

    def _mark(self, calls: Sequence[Call]) -> None:
        """Record the outputs of a compiled piece that may share their memory with other arrays."""
        gives, taken = calls[0].program.shared
        for one in calls:
            self.shared.update(one.writes[i] for i in gives)
            self.shared.update(one.reads[i] for i in taken)
