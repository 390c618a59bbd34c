"""Compile a pipelined step to a list of instructions over registers.

In: the pieces of all stages, the tasks in dispatch order, and the placement of arguments.
Out: `Instructions`: calls of pieces, transfers between submeshes, and broadcasts. A register holds one array at a time
and is freed after its last use. A piece may overwrite an array that it uses last, unless another register may hold the
same array. Every process makes the same list and keeps its own part: it leaves out the calls and moves of others, and
counts their moves between processes (`moves_of_others`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import ScheduleError
from autopar.pipeline.cut.extract_stages import LeafKey, Port
from autopar.pipeline.cut.pieces import Slot, piece_name
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.pipeline.run.arguments import PipelineArguments, Registers
from autopar.pipeline.run.broadcast import Broadcaster, is_small
from autopar.pipeline.run.calls_and_moves import Broadcast, Call, Count, Instruction, Move
from autopar.pipeline.run.instances import Instances
from autopar.pipeline.run.moves_of_others import MovesOfOthers
from autopar.pipeline.run.piece_programs import Key, StagePieces
from autopar.pipeline.run.register_lifetimes import Lifetimes
from autopar.pipeline.run.sent_by_pieces import ProgramsOfPieces
from autopar.pipeline.run.stacked_leaves import array_of_replicas, over_replicas
from autopar.pipeline.run.transfers import Crossing, Leg, Wire, is_mine, without_shards
from autopar.pipeline.schedule.tasks import PHASES, Task


@dataclass(frozen=True, slots=True)
class Result:
    """The location of a result of the step.

    Args:
        registers: one; for state that replicas of a stage hold, that of each replica.
        sharding: of the result, over all replicas.
        absent: the placeholder for a result that only other processes have.
    """

    registers: tuple[int, ...]
    sharding: NamedSharding
    absent: Any = None

    def read(self, values: Registers) -> Any:
        """The result, after the last instruction."""
        found = [values[register] for register in self.registers]
        if all(value is None for value in found):
            return self.absent
        return found[0] if len(found) == 1 else array_of_replicas(found, self.sharding)


@dataclass(frozen=True, slots=True)
class Instructions:
    """A pipelined step as the instructions of this process.

    Args:
        results: each result or part of a result, by position and layers.
        stage_of: the instance of the stage whose devices hold each register.
    """

    steps: tuple[Instruction, ...]
    num_registers: int
    results: Mapping[LeafKey, Result]
    stage_of: tuple[int, ...]


def instructions_of(
    stages: Sequence[StagePieces],
    instances: Instances,
    tasks: Sequence[Task],
    arguments: PipelineArguments,
    carried: Mapping[LeafKey, LeafKey],
    compiler_options: Mapping[str, Any] | None,
    *,
    own: tuple[Sequence[int], int] | None = None,
    broadcasts: bool = True,
) -> Instructions:
    """The instructions of a step after its arguments have been placed.

    Args:
        stages: the instances of all stages.
        tasks: the tasks in dispatch order.
        carried: the result that replaces each carried argument.
        own, broadcasts: as for `Pipeline`.
    """
    return _Listing(stages, instances, tasks, arguments, carried, compiler_options, own, broadcasts).run()


class _Listing:
    """Builds the instructions."""

    def __init__(
        self,
        stages: Sequence[StagePieces],
        instances: Instances,
        tasks: Sequence[Task],
        arguments: PipelineArguments,
        carried: Mapping[LeafKey, LeafKey],
        compiler_options: Mapping[str, Any] | None,
        own: tuple[Sequence[int], int] | None,
        broadcasts: bool,
    ) -> None:
        self.stages, self.instances, self.tasks, self.arguments = stages, instances, tasks, arguments
        self.num_slices = max(stage.layout.num_slices for stage in stages)
        count = (1 + max(task.microbatch for task in tasks)) // self.num_slices
        #: The microbatch of the batch that each microbatch of the schedule is.
        self.own, self.num_microbatches = (range(count), count) if own is None else own
        self.broadcasts = broadcasts
        self.steps: list[Call | Move | Broadcast] = []
        self.stage_of = list(arguments.stage_of)
        self.at: dict[tuple[int, Slot, int | None], int] = {
            (s, slot, None): register for (s, slot), register in arguments.registers.items()
        }
        self.replacements = set(carried.values())
        self.results: dict[LeafKey, Result] = {}
        #: The accumulators of all replicas: (instance that has them, slot, replica) -> register.
        self.received: dict[tuple[int, Slot, int], int] = {}
        #: Of each result that several replicas have, the sharding on each.
        self.replica_shardings: dict[LeafKey, list[NamedSharding]] = {}
        #: Instances and the microbatches that they run.
        self.runs = {(instances.of_task(task), self._microbatch(task)) for task in tasks}
        #: Registers from which a replica sends to one in another process.
        self.sent_away: set[int] = set()
        made = ProgramsOfPieces(stages, instances, arguments, self.num_microbatches, compiler_options)
        self.sends, self.programs = made.sends, made.programs
        self._check_covered()

    def run(self) -> Instructions:
        for s, stage in enumerate(self.stages):
            for result, slot in stage.passed_through.items():
                port = Port("result", *result)
                self._result(port, s, self.at[s, slot, None], stage.out_shardings[port])
        around = sorted((key, s) for s, stage in enumerate(self.stages) for key in stage.pieces.around)
        for level, s in around:
            if not level[0]:
                self._call(s, level, None)
        in_loop = [task for task in self.tasks if task.phase != "update"]
        last = {self.instances.of_task(task): task for task in in_loop}
        for task in in_loop:
            s = self.instances.of_task(task)
            name = piece_name(task.phase, task.microbatch % self.num_slices, self.num_slices)
            if name in self.stages[s].pieces.each:
                self._call(s, name, task)
            if task == last[s]:
                self._exchange(s, task)
        for level, s in around:
            if level[0]:
                self._call(s, level, None)
        lifetimes = Lifetimes(self.arguments, self.sent_away, by_position=self.instances.num_replicas > 1)
        lifetimes.settle(self.steps, {register for one in self.results.values() for register in one.registers})
        steps = tuple(own_steps(self.steps, self.stages))
        return Instructions(steps, len(self.stage_of), self.results, tuple(self.stage_of))

    def _check_covered(self) -> None:
        """Refuse a schedule without a task that the step needs."""
        tasks = set(self.tasks)
        needed = (
            Task(s, microbatch * self.num_slices + part, phase)
            for s, stage in enumerate(self.stages[: self.instances.num_stages])
            for phase in PHASES
            for part in range(self.num_slices)
            if (name := piece_name(phase, part, self.num_slices)) in stage.pieces.each and name in stage.whole
            for microbatch in range(len(self.own))
        )
        for task in needed:
            if task not in tasks:
                raise ScheduleError(
                    f"the schedule never runs the {task}, so the step's results would be wrong. Schedule all tasks of"
                    " every stage, or use a schedule of the package"
                )

    # -- instructions ------------------------------------------------------------------------

    def _call(self, s: int, key: Key, task: Task | None) -> None:
        stage, program = self.stages[s], self.programs[s].get(key)
        if program is None:
            return
        microbatch = None if task is None else self._microbatch(task)
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

    def _exchange(self, s: int, task: Task) -> None:
        """Send what an instance has accumulated and stacked to the other replicas of its stage."""
        replica = self.instances.replica(s)
        own = [microbatch for instance, microbatch in sorted(self.runs) if instance == s]
        for slot, what in self.stages[s].exchanged.items():
            if slot.kind == "carry":
                self.received[s, slot, replica] = self.at[s, slot, None]
            for t in self.instances.peers(s):
                target = self.stages[t].exchanged[slot].sharding
                crossing = Crossing(what.shape, what.dtype, Wire(what.sharding, target))
                for m in own if slot.kind == "each" else [None]:
                    source = self.at[s, slot, m]
                    arrived = self._new(t)
                    self.steps.append(Move(crossing, task, (source,), (arrived,)))
                    self.sent_away.update({source} if crossing.between_processes else ())
                    where: Any = self.received if m is None else self.at
                    where[t, slot, replica if m is None else m] = arrived

    def _registers(
        self, s: int, slots: Sequence[Slot], counts: Sequence[int], microbatch: int | None
    ) -> tuple[int, ...]:
        found: list[int] = []
        for slot, count in zip(slots, counts, strict=True):
            if slot.kind == "carry" and count > 1:
                found += [self.received[s, slot, replica] for replica in range(count)]
                continue
            each = range(count) if microbatch is None else [microbatch]
            for m in each if slot.kind == "each" else [None]:
                place = (s, slot, m)
                if place not in self.at:
                    self.at[place] = self._new(s)
                found.append(self.at[place])
        return tuple(found)

    def _microbatch(self, task: Task) -> int:
        """The microbatch of the batch that a task computes."""
        return self.own[task.microbatch // self.num_slices]

    def _new(self, s: int) -> int:
        self.stage_of.append(s)
        return len(self.stage_of) - 1

    def _result(self, port: Port, s: int, register: int, sharding: NamedSharding) -> None:
        result, aval = port.leaf, self.stages[s].avals()[port]
        is_state = result in self.replacements
        if self.instances.replica(s):
            if is_state:
                self._add_replica(result, aval, register, sharding)
            return
        if self.broadcasts and jax.process_count() > 1 and not is_state and is_small(aval):
            whole = NamedSharding(sharding.mesh, PartitionSpec())
            broadcaster = Broadcaster(aval, whole)
            copy = self._new(s)
            self.steps.append(Broadcast(broadcaster, (register,), (copy,)))
            self.results[result] = Result((copy,), broadcaster.sharding)
            return
        self.results[result] = Result((register,), sharding, absent(aval, sharding))

    def _add_replica(self, result: LeafKey, aval: Any, register: int, sharding: NamedSharding) -> None:
        """Add what another replica has of a result."""
        known = self.results[result]
        parts = [*self.replica_shardings.get(result, [known.sharding]), sharding]
        self.replica_shardings[result] = parts
        whole = over_replicas(parts)
        self.results[result] = Result((*known.registers, register), whole, absent(aval, whole))


def own_steps(steps: Sequence[Call | Move | Broadcast], stages: Sequence[StagePieces]) -> Iterator[Instruction]:
    """The instructions of this process, in order. Moves between others are counted before the next instruction that passes
    arrays between processes."""
    here = jax.process_index()
    mine = [any(d.process_index == here for d in stage.stage.mesh.devices.flat) for stage in stages]
    counts: dict[Any, Callable[[], Any]] = {}
    others: list[Leg] = []
    for one in (*steps, None):
        if isinstance(one, Move) and not one.crossing.is_mine:
            others += one.crossing.legs
            continue
        if others and (one is None or isinstance(one, Broadcast) or (isinstance(one, Move) and one.crossing.legs)):
            yield Count(MovesOfOthers(others, counts))
            others = []
        if one is not None and not (isinstance(one, Call) and not mine[one.stage]):
            yield one


def absent(aval: Any, sharding: NamedSharding) -> Any:
    """The placeholder for a result that only other processes have."""
    return None if is_mine(sharding) else without_shards(aval.shape, aval.dtype, sharding)


_T = TypeVar("_T")


def by_leaf(parts: Mapping[LeafKey, _T]) -> dict[int, dict[Rows | None, _T]]:
    """The parts of each leaf, by position."""
    found: dict[int, dict[Rows | None, _T]] = {}
    for (position, rows), part in parts.items():
        found.setdefault(position, {})[rows] = part
    return found
