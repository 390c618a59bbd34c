"""Go through a pipelined step with the types of its arrays: what each piece is compiled for, and what devices hold.

In: a `Pipeline`, whose devices may be absent, and a function that compiles a lowered program.
Out: `AbstractRun`: the compiled programs of every piece, how often each runs in a step, and the peak memory of each
submesh. Pieces, donated inputs and transfers are those of the executor: its own instructions are gone through, in order.
The sharding of an array between two pieces is the one that XLA chose when it compiled the first of them.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.absent_devices import naming_mesh, output_shardings
from autopar.jax_interop.compilation import kept_inputs
from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.run.instructions import Broadcast, Call, Move
from autopar.pipeline.run.piece_programs import Key, PieceProgram
from autopar.pipeline.run.same_program import without_module_name


class CompiledProgram(Protocol):
    """A compiled program. Bytes are per device.

    Attributes:
        output_shardings: those that XLA chose, serialized; see `jax_interop.absent_devices`.
    """

    @property
    def temp_bytes(self) -> float: ...
    @property
    def output_bytes(self) -> float: ...
    @property
    def alias_bytes(self) -> float: ...
    @property
    def output_shardings(self) -> Sequence[str]: ...


#: (stage, digest of the program, lowered program) -> the program compiled for the stage's devices.
Compile = Callable[[int, str, jax.stages.Lowered], CompiledProgram]


@dataclass(frozen=True, slots=True)
class LinkProgram:
    """A program of a piece.

    Args:
        digest: of its StableHLO without the module's name.
    """

    digest: str
    compiled: Any


@dataclass(slots=True)
class PieceRuns:
    """A piece with inputs of the same shardings, and how often it runs in a step.

    Args:
        key: its phase in the microbatch loop; or its level outside the loop.
        links: the programs that it runs, one after another; usually one.
    """

    stage: int
    key: Key
    name: str
    links: tuple[LinkProgram, ...]
    count: int = 0

    @property
    def phase(self) -> str:
        """The phase of the task that it belongs to; pieces around the loop count as the update."""
        return self.key if isinstance(self.key, str) else "update"


@dataclass(frozen=True, slots=True)
class AbstractRun:
    """A pipelined step on types.

    Args:
        pieces: all pieces, by stage and then in the order in which they first run.
        peak_bytes: per submesh, the peak memory of a device: everything the executor holds there while a piece runs,
            and the piece's own temporaries and outputs.
    """

    pieces: tuple[PieceRuns, ...]
    peak_bytes: tuple[float, ...]


def run_on_types(pipeline: Pipeline, compile_program: Compile) -> AbstractRun:
    """Go through one step.

    Args:
        compile_program: compiles a program for the devices of a stage. It may return the same for equal digests.
    """
    return _Run(pipeline, compile_program).run()


@dataclass(slots=True)
class _Run:
    """One step; the values are types with shardings, or None in empty registers."""

    pipeline: Pipeline
    compile_program: Compile
    #: The submesh of each register.
    on: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    pieces: dict[tuple[int, tuple[Any, ...]], tuple[PieceRuns, list[Any]]] = field(default_factory=dict)
    #: Bytes of a device of each submesh.
    held: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    peaks: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    #: Registers whose arrays the caller keeps.
    callers: set[int] = field(default_factory=set)

    def run(self) -> AbstractRun:
        instructions = self.pipeline.instructions
        self.on = [self.pipeline.instances.submesh(instance) for instance in instructions.stage_of]
        self.values = [None] * instructions.num_registers
        self._place_arguments()
        for one in instructions.steps:
            if isinstance(one, Call):
                self._call(one)
            elif isinstance(one, Move | Broadcast):
                source = self.values[one.reads[0]]
                target = one.crossing.wire.target if isinstance(one, Move) else one.broadcaster.sharding
                self._write(one.writes[0], jax.ShapeDtypeStruct(source.shape, source.dtype, sharding=target))
            for register in one.frees:
                if register not in self.callers:
                    self._write(register, None)
        found = sorted({id(runs): runs for runs, _ in self.pieces.values()}.values(), key=lambda runs: runs.stage)
        return AbstractRun(tuple(found), tuple(self.peaks[n] for n in range(self.pipeline.schedule.num_submeshes)))

    def _place_arguments(self) -> None:
        arguments = self.pipeline.arguments
        for leaf, uses in arguments.uses.items():
            for place, one in enumerate(uses):
                aval = self.pipeline.pieces[one.stage].layout.trace.avals[one.slot.value]
                struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=one.sharding)
                self._write(one.register, struct)
                if place == 0 and leaf not in arguments.donated:
                    self.callers.add(one.register)

    def _write(self, register: int, value: Any) -> None:
        """Fill or empty a register."""
        self.held[self.on[register]] += _num_bytes(value) - _num_bytes(self.values[register])
        self.values[register] = value

    def _call(self, one: Call) -> None:
        inputs = [self.values[i] for i in one.reads]
        one.settle(inputs)
        key = (id(one.program), tuple(value.sharding for value in inputs))
        if key not in self.pieces:
            links, outputs = self._compiled(one, inputs)
            self.pieces[key] = (self._runs(one, links), outputs)
        runs, outputs = self.pieces[key]
        runs.count += 1
        submesh = self.on[one.writes[0]] if one.writes else self.on[one.reads[0]]
        working = max(
            link.compiled.temp_bytes + link.compiled.output_bytes - link.compiled.alias_bytes for link in runs.links
        )
        self.peaks[submesh] = max(self.peaks[submesh], self.held[submesh] + working)
        for register, value in zip(one.writes, outputs, strict=True):
            self._write(register, value)

    def _runs(self, one: Call, links: tuple[LinkProgram, ...]) -> PieceRuns:
        """The runs of a piece, together with those on other replicas."""
        new = PieceRuns(self.pipeline.instances.stage(one.stage), one.key, one.program.piece.name, links)
        if self.pipeline.instances.num_replicas == 1:
            return new
        known = (runs for runs, _ in self.pieces.values() if (runs.stage, runs.key) == (new.stage, new.key))
        digests = [link.digest for link in links]
        return next((runs for runs in known if [link.digest for link in runs.links] == digests), new)

    def _compiled(self, one: Call, inputs: Sequence[Any]) -> tuple[tuple[LinkProgram, ...], list[Any]]:
        """The programs of a piece for these inputs, and the types of its outputs."""
        program: PieceProgram = one.program
        flat, links = list(inputs), list[LinkProgram]()
        for link in program.links:
            taken = link.taken(flat)
            traced = link.jitted.trace(*taken)
            lowered = traced.lower()
            digest = hashlib.sha256(without_module_name(lowered.as_text()).encode()).hexdigest()
            stage = self.pipeline.instances.stage(one.stage)
            found = LinkProgram(digest, self.compile_program(stage, digest, lowered))
            outputs = jax.tree.leaves(traced.out_info)
            kept = [taken[i] for i in kept_inputs(lowered)]
            shardings = output_shardings(
                found.compiled.output_shardings, link.out_shardings, outputs, naming_mesh(kept, program.mesh)
            )
            flat = link.after(flat, [_placed(out, sharding) for out, sharding in zip(outputs, shardings, strict=True)])
            links.append(found)
        return tuple(links), flat


def _placed(out: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(out.shape, out.dtype, sharding=sharding, weak_type=bool(out.weak_type))


def _num_bytes(value: Any) -> float:
    if value is None:
        return 0.0
    return math.prod(value.sharding.shard_shape(value.shape)) * jax_compat.itemsize(value)
