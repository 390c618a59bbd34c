"""List the instructions of an asynchronous pipeline over several batches.

In: the pieces of all stages by version, the order of tasks, and the version that each reads.
Out: for each batch its instructions, in which a register is known by a name and a number: a value of a batch by the batch,
weights by their version. So the instructions of a later batch are those of an earlier one with higher numbers.

Batch n lasts from the first forward pass of its first microbatch to the last task before that of the next batch. What a
piece before the loop makes is listed when a task first needs it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.pipeline.cut.extract_stages import LeafKey, Port
from autopar.pipeline.cut.pieces import Level, Slot
from autopar.pipeline.cut.pieces_by_version import Versioned
from autopar.pipeline.run.arguments import PipelineArguments
from autopar.pipeline.run.broadcast import Broadcaster, is_small
from autopar.pipeline.run.calls_and_moves import Broadcast, Call, Move
from autopar.pipeline.run.instructions import Result, absent
from autopar.pipeline.run.moved_back import MovingBack
from autopar.pipeline.run.piece_programs import Key, StagePieces
from autopar.pipeline.run.sent_by_pieces import ProgramsOfPieces
from autopar.pipeline.schedule.tasks import Task
from autopar.pipeline.schedule.versions import distances_of

#: What a register holds, and the batch or version that it is of; None for constants.
Name = tuple[Hashable, int | None]
Steps = list[Call | Move | Broadcast]


@dataclass(frozen=True)
class Streamed:
    """What is the same in all batches.

    Args:
        stages: the stages; each has one instance.
        sources: their pieces and values by what they depend on.
        carried: the result that replaces each carried argument.
        num_microbatches: the number of microbatches per batch, which is one update.
        moving_back: the programs that correct the weights which backward passes read.
    """

    stages: Sequence[StagePieces]
    sources: Versioned
    arguments: PipelineArguments
    programs: ProgramsOfPieces
    carried: Mapping[LeafKey, LeafKey]
    num_microbatches: int
    moving_back: MovingBack

    def is_of_batch(self, leaf: LeafKey) -> bool:
        """Whether an argument is new in each batch, given by the caller."""
        return "batch" in self.sources.leaves[leaf] and leaf not in self.carried

    @property
    def argument_of(self) -> dict[LeafKey, LeafKey]:
        """The carried argument that each result replaces."""
        return {result: argument for argument, result in self.carried.items()}


@dataclass(slots=True)
class Listed:
    """The instructions of some batches.

    Args:
        batches: those of each batch, then those that finish what is in flight, if they are listed.
        names: the name of each register.
        results: the location of each result that is not carried, by result and batch.
        written_in: the position in `batches` in which it is written.
    """

    batches: list[Steps] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    results: dict[tuple[LeafKey, int], Result] = field(default_factory=dict)
    written_in: dict[tuple[LeafKey, int], int] = field(default_factory=dict)

    @property
    def steps(self) -> Steps:
        """All instructions in order."""
        return [one for batch in self.batches for one in batch]


def dispatched(num_stages: int, per_update: int, num_updates: int) -> Iterator[list[Task]]:
    """The tasks of each batch in the order in which they are dispatched, then those that finish what is in flight.

    Each stage alternates one forward and one backward pass. Its backward pass of microbatch k - (p - 1 - s) follows the
    forward pass of microbatch k, so the two form a group, and groups follow each other.

    >>> [len(tasks) for tasks in dispatched(2, 1, 2)]
    [4, 6, 2]
    """
    count = per_update * num_updates
    tasks: list[Task] = []
    for k in range(count + num_stages - 1):
        if k < count:
            tasks += [Task(stage, k, "forward") for stage in range(num_stages)]
        for stage in reversed(range(num_stages)):
            done = k - (num_stages - 1 - stage)
            if not 0 <= done < count:
                continue
            tasks.append(Task(stage, done, "backward"))
            if (done + 1) % per_update == 0:
                tasks.append(Task(stage, done + 1 - per_update, "update"))
        if k < count and (k + 1) % per_update == 0:
            yield tasks
            tasks = []
    yield tasks


class StreamListing:
    """Lists the instructions of batches.

    Args:
        reads: the version that each task reads.
    """

    def __init__(self, streamed: Streamed, reads: Mapping[Task, int]) -> None:
        self.streamed, self.reads, self.distances = streamed, reads, distances_of(reads)
        self.stages, self.argument_of = streamed.stages, streamed.argument_of
        self.listed = Listed()
        self.at: dict[Name, int] = {}
        self.stage_of: list[int] = []
        self.done: set[tuple[int, Level, int | None, int | None, int]] = set()
        #: The piece before the loop that makes each slot, and that of each result.
        self.producers: list[dict[Slot, Level]] = []
        self.result_producers: list[dict[LeafKey, Level]] = []
        #: Registers that are sent to other stages while pieces read them.
        self.sent: set[int] = set()
        for stage in self.stages:
            before = {key: piece for key, piece in stage.whole.items() if isinstance(key, tuple) and not key[0]}
            self.producers.append({slot: key for key, piece in before.items() for slot in piece.gives})
            ports = stage.stage.program.outputs
            self.result_producers.append({ports[i].leaf: key for key, piece in before.items() for i in piece.outputs})
        self.homes = {leaf: (uses[0].stage, uses[0].slot) for leaf, uses in streamed.arguments.uses.items()}
        leaf_of = {use.register: leaf for leaf, uses in streamed.arguments.uses.items() for use in uses}
        slot_of = {register: place for place, register in streamed.arguments.registers.items()}
        for register, s in enumerate(streamed.arguments.stage_of):
            name = self._name(slot_of[register][0], slot_of[register][1], 0, 0, leaf=leaf_of[register])
            assert self._new(name, s) == register

    def run(self, batches: Sequence[Sequence[Task]]) -> Listed:
        """List the instructions of these tasks."""
        for tasks in batches:
            self.listed.batches.append([])
            for task in tasks:
                self._task(task)
        return self.listed

    @property
    def _steps(self) -> Steps:
        return self.listed.batches[-1]

    # -- names -------------------------------------------------------------------------------

    def _name(
        self, s: int, slot: Slot, n: int, v: int, i: int | None = None, *, leaf: LeafKey | None = None, back: int = 0
    ) -> Name:
        """The name of a slot, for batch n and version v.

        Args:
            i: the microbatch of the batch, if each has its own.
            leaf: the argument, if the slot is one.
            back: the number of updates by which version v is moved back.
        """
        if slot.kind in ("velocity", "scale"):
            return (s, slot), v
        sources = self.streamed.sources.stages[s].of(slot) if leaf is None else self.streamed.sources.leaves[leaf]
        if leaf is not None and not sources:
            return (s, slot), None
        if "version" not in sources:
            return (s, slot, i), n
        moved = ("moved back", back) if back and (leaf is None or self._moves_back(s, slot)) else ()
        return ((s, slot, i, *moved), v) if "batch" not in sources else ((s, slot, i, n - v, *moved), n)

    def _moves_back(self, s: int, slot: Slot) -> bool:
        corrected = self.stages[s].corrected
        return corrected is not None and slot.value in corrected.moved

    def named(self, leaf: LeafKey, s: int, slot: Slot) -> Name:
        """The name of an argument on a stage, for batch 0 or version 0."""
        return self._name(s, slot, 0, 0, leaf=leaf)

    def _leaf(self, s: int, slot: Slot) -> LeafKey | None:
        return next((leaf for leaf, own in self.stages[s].arguments.items() if own == slot), None)

    def _new(self, name: Name, s: int) -> int:
        register = self.at[name] = len(self.listed.names)
        self.listed.names.append(name)
        self.stage_of.append(s)
        return register

    # -- instructions ------------------------------------------------------------------------

    def _task(self, task: Task) -> None:
        n, i = divmod(task.microbatch, self.streamed.num_microbatches)
        s, v = task.stage, self.reads[task]
        if task.phase != "update":
            if task.phase in self.stages[s].whole:
                corrects = self.stages[s].corrected is not None
                self._call(s, task.phase, task, n, v, i, self.distances.get(task, 0) if corrects else 0)
            return
        for key in self.stages[s].whole:
            if isinstance(key, tuple) and key[0]:
                self._call(s, key, task, n, v, None)
        for key in dict.fromkeys(self.result_producers[s].values()):
            self._before(s, key, n, v)

    def _before(self, s: int, key: Level, n: int, v: int, back: int = 0) -> None:
        """A piece before the loop, once for each batch and version that it depends on."""
        group = key[-1]
        if group == 1:  # what it returns belongs to the batch whose update reads this version
            n = v
        once = (s, key, n, v, back) if group in (1, 2) else (s, key, n, None, 0)
        if once not in self.done:
            self.done.add(once)
            self._call(s, key, None, n, v, None, once[-1])

    def _call(self, s: int, key: Key, task: Task | None, n: int, v: int, i: int | None, back: int = 0) -> None:
        program = self.streamed.programs.programs[s][key]
        reads = tuple(self._registers(s, program.takes, program.counts[0], n, v, i, back, made=False))
        writes = [*self._registers(s, program.gives, program.counts[1], n, v, i, back, made=True)]
        if back and task is None:  # its results are those of the version as it is
            unread = [self._new((("unread", s, key, j, n - v, back), n), s) for j in range(len(program.results))]
            self._steps.append(Call(program, s, key, task, reads, (*writes, *unread)))
            return
        sends = [self._new((("sent", s, key, j, i), n), s) for j in range(len(program.sends))]
        results = [self._result(s, position, n, v) for position, _ in program.results]
        self._steps.append(Call(program, s, key, task, reads, (*writes, *sends, *results)))
        pairs = zip(sends, self.streamed.programs.sends[s][key].paths, strict=True)
        ways = [(register, path) for register, paths in pairs for path in paths]
        for register, path in sorted(ways, key=lambda way: abs(way[1].target - s)):
            arrives = self._name(path.target, path.slot, n, v, i)
            if path.crossing.is_here:
                self.at[arrives] = register
                continue
            self._steps.append(Move(path.crossing, task, (register,), (self._new(arrives, path.target),)))
        for (position, sharding), register in zip(program.results, results, strict=True):
            self._returned(s, position, sharding, register, n)

    def _registers(
        self,
        s: int,
        slots: Sequence[Slot],
        counts: Sequence[int],
        n: int,
        v: int,
        i: int | None,
        back: int = 0,
        *,
        made: bool,
    ) -> Iterator[int]:
        """The registers of slots: those that a piece reads, which exist or are made first, or those that it makes."""
        for slot, count in zip(slots, counts, strict=True):
            leaf = self._leaf(s, slot)
            for one in (range(count) if i is None else [i]) if slot.kind == "each" else [None]:
                after = v + (made and slot.kind == "velocity")
                name = self._name(s, slot, n, after, one, leaf=leaf, back=back)
                if name not in self.at:
                    is_given = slot.kind in ("velocity", "scale") or (
                        leaf is not None and self.streamed.is_of_batch(leaf)
                    )
                    if made or is_given:
                        self._new(name, s)
                    elif leaf is None:
                        self._before(s, self.producers[s][slot], n, v, back)
                    elif back and self._moves_back(s, slot):
                        self._moved_back(s, slot, name, leaf, v, back)
                    else:
                        self._carried(leaf, s, slot, n, v)
                yield self.at[name]

    def _moved_back(self, s: int, slot: Slot, name: Name, leaf: LeafKey, v: int, back: int) -> None:
        """Version v of a weight, moved back by some updates."""
        program = self.streamed.moving_back.program(s, slot, back)
        velocity = next(self._registers(s, program.takes[1:], (1,), v, v, None, made=False))
        reads = self.at[self._name(s, slot, v, v, leaf=leaf)], velocity
        self._steps.append(Call(program, s, f"moved back {slot.value} {back}", None, reads, (self._new(name, s),)))

    def _carried(self, leaf: LeafKey, s: int, slot: Slot, n: int, v: int) -> None:
        """State of batch n that its home stage computes without weights, on a stage."""
        home, its_slot = self.homes[leaf]
        source = self._name(home, its_slot, n, v, leaf=leaf)
        if source not in self.at:
            self._before(home, self.result_producers[home][self.streamed.carried[leaf]], n - 1, v)
        if home == s:
            return
        uses = {use.stage: use for use in self.streamed.arguments.uses[leaf]}
        crossing = uses[s].crossing_from(uses[home].sharding)
        target = self._new(self._name(s, slot, n, v, leaf=leaf), s)
        self.sent.add(self.at[source])
        self._steps.append(Move(crossing, None, (self.at[source],), (target,)))

    def _result(self, s: int, position: int, n: int, v: int) -> int:
        """The register of a result of a piece: for carried state, that of the next batch or version."""
        leaf = self.stages[s].stage.program.outputs[position].leaf
        argument = self.argument_of.get(leaf)
        if argument is None:
            return self._new((("result", leaf), n), s)
        slot = self.stages[s].arguments[argument]
        return self._new(self._name(s, slot, n + 1, v + 1, leaf=argument), s)

    def _returned(self, s: int, position: int, sharding: NamedSharding, register: int, n: int) -> None:
        """Note a result that the caller gets for each batch."""
        port: Port = self.stages[s].stage.program.outputs[position]
        if port.leaf in self.argument_of:
            return
        aval = self.stages[s].avals()[port]
        found = Result((register,), sharding, absent(aval, sharding))
        if jax.process_count() > 1 and is_small(aval):
            broadcaster = Broadcaster(aval, NamedSharding(sharding.mesh, PartitionSpec()))
            copy = self._new((("broadcast", port.leaf), n), s)
            self._steps.append(Broadcast(broadcaster, (register,), (copy,)))
            found = Result((copy,), broadcaster.sharding)
        self.listed.results[port.leaf, n] = found
        self.listed.written_in[port.leaf, n] = len(self.listed.batches) - 1
