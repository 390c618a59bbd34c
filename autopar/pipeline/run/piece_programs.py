"""Build the pieces of a stage as jitted programs over flat arrays.

In: a planned stage, its pieces, and its transfers to and from other stages.
Out: `PieceProgram`s: functions from the values of input slots to one list: the values of output slots, then the values
to send with their wires' shardings, then results of the step.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.partition_spec import named_shardings
from autopar.pipeline.cut.deferred_reductions import deferred_reductions
from autopar.pipeline.cut.extract_stages import Port
from autopar.pipeline.cut.pieces import Layout, Level, Piece, Pieces, Slot
from autopar.pipeline.cut.replicas import accumulators, check_effects
from autopar.pipeline.cut.stage_programs import StageProgram
from autopar.pipeline.cut.wires import taken_shardings
from autopar.pipeline.run.corrected_update import CorrectedUpdates
from autopar.pipeline.run.deferred_reductions import ConstrainedShardings, accumulate, initial
from autopar.pipeline.run.exchanged import Exchanged, ExchangedForms
from autopar.pipeline.run.links import Link, resharding, run_links
from autopar.pipeline.run.same_program import is_same_program
from autopar.pipeline.run.uneven_values import UnevenValues
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.runtime.replay import Replay

#: The name of a piece in its stage: a level outside the loop or a phase inside it.
Key = Level | str


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage and its plan for the devices of a submesh, which may belong to other processes.

    Args:
        replicas: the meshes of its other replicas, in the order of the schedule.
    """

    program: StageProgram
    plan: Plan
    mesh: Mesh
    replicas: tuple[Mesh, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    """A value that a piece sends to other stages.

    Args:
        what: a slot, or the position of an output of the stage's trace.
        planned: its sharding in the stage's plan.
        sharding: the sharding in which it is sent.
    """

    what: Slot | int
    planned: NamedSharding
    sharding: NamedSharding


#: Compiled pieces: by a key that is cheap to compare, the jitted functions and their traces.
Compiled = dict[Any, list[tuple[Callable[..., Any], Any]]]


@dataclass(slots=True)
class PieceProgram:
    """A piece, to be jitted.

    Args:
        takes: input slots.
        gives: output slots.
        sends: values that other stages receive.
        results: positions of outputs that are results of the step, and their shardings.
        counts: the number of arrays per slot of `takes` and of `gives`. A piece outside the loop takes and gives the
            arrays of all microbatches, and takes the accumulators of all replicas.
        kept: the sharding of each array of `gives`; None, XLA's choice, unless replicas exchange it.
        mesh: the devices of the stage.
        arrivals: the sharding that the piece applies to a slot before use, by slot that other stages fill.
        compiled: the compiled pieces of the same submesh, which equal pieces share; this piece adds its own.
        shared: the positions of outputs that may be the same array as another output or an input, and the positions of
            those inputs. Tracing fills both.
        jitted, links: what the piece runs, and the jitted programs in it; None and empty before `settle`.
    """

    piece: Piece
    takes: tuple[Slot, ...]
    gives: tuple[Slot, ...]
    counts: tuple[tuple[int, ...], tuple[int, ...]]
    kept: tuple[NamedSharding | None, ...]
    sends: tuple[Send, ...]
    results: tuple[tuple[int, NamedSharding], ...]
    mesh: Mesh
    arrivals: Mapping[Slot, NamedSharding]
    function: Callable[..., list[Any]]
    compiler_options: dict[str, Any] | None
    compiled: Compiled = field(default_factory=dict)
    shared: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    jitted: Any = None
    links: tuple[Link, ...] = ()

    def jit(self, donated: Sequence[int]) -> Any:
        """The jitted function.

        Args:
            donated: positions of inputs whose memory it may reuse.
        """
        return self._jit(donated, self._out_shardings)

    def _jit(self, donated: Sequence[int], out_shardings: Sequence[NamedSharding | None]) -> Any:
        return jax.jit(
            self.function,
            donate_argnums=tuple(donated),
            out_shardings=list(out_shardings),
            compiler_options=self.compiler_options,
        )

    @property
    def _out_shardings(self) -> list[NamedSharding | None]:
        """The shardings of all outputs."""
        return [*self.kept, *(one.sharding for one in self.sends), *(sharding for _, sharding in self.results)]

    def settle(self, donated: Sequence[int], values: Sequence[Any]) -> None:
        """Choose the jitted programs of the piece for its first call, or those of an equal piece on the same devices.

        Args:
            values: the inputs of the call, or their types with shardings.
        """
        if jax_compat.needs_one_mesh(self.jit(()).trace(*values)):
            self.links = self._on_one_mesh(donated, values)
            self.jitted = functools.partial(run_links, self.links)
            return
        usable = self._usable(donated, values, self._out_shardings)
        jitted = self.jit(usable)
        traced = jitted.trace(*values)
        out_types = tuple((one.shape, str(one.dtype)) for one in traced.out_info)
        primitives = tuple(str(equation.primitive) for equation in traced.jaxpr.jaxpr.eqns)
        in_types = tuple((one.shape, str(one.dtype), one.sharding) for one in values)
        options = tuple(sorted((self.compiler_options or {}).items()))
        candidates = self.compiled.setdefault(
            (in_types, out_types, tuple(self._out_shardings), tuple(usable), options, primitives), []
        )
        same = next((other for other, known in candidates if is_same_program(known, traced)), None)
        if same is None:
            candidates.append((jitted, traced))
        self.jitted = same or jitted
        self.links = (Link(self.jitted, tuple(self._out_shardings)),)

    def _on_one_mesh(self, donated: Sequence[int], values: Sequence[Any]) -> tuple[Link, ...]:
        """The piece with its transfers' shardings applied in programs of their own.

        A transfer may use another mesh of the same devices, and JAX lowers a program with a host callback for one mesh
        only.
        """
        slots = itertools.chain.from_iterable(map(itertools.repeat, self.takes, self.counts[0]))
        whole = NamedSharding(self.mesh, PartitionSpec())
        # JAX may name another piece's free output after the mesh of a transfer; this is rare, so it is replicated.
        arriving = [
            self.arrivals.get(slot) or (None if value.sharding.mesh == self.mesh else whole)
            for slot, value in zip(slots, values, strict=True)
        ]
        first = sum(self.counts[1])
        receive = resharding({i: sharding for i, sharding in enumerate(arriving) if sharding is not None})
        send = resharding({first + i: one.sharding for i, one in enumerate(self.sends)})
        received = [
            value if sharding is None else jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
            for value, sharding in zip(values, arriving, strict=True)
        ]
        planned = [one.planned for one in self.sends] + [sharding for _, sharding in self.results]
        out_shardings = [*self.kept, *planned]
        jitted = self._jit(self._usable(donated, received, out_shardings), out_shardings)
        return (*receive, Link(jitted, tuple(out_shardings)), *send)

    def _usable(
        self, donated: Sequence[int], values: Sequence[Any], out_shardings: Sequence[NamedSharding | None]
    ) -> list[int]:
        """The donated inputs that an output fits into: equal shard shapes, or equal shapes where XLA chooses the
        output's sharding. JAX warns about the others."""
        free_outputs = Counter(
            (one.shape if sharding is None else sharding.shard_shape(one.shape), one.dtype, sharding is None)
            for one, sharding in zip(self._jit((), out_shardings).trace(*values).out_info, out_shardings, strict=True)
        )
        usable: list[int] = []
        for i in donated:
            value = values[i]
            kinds = ((value.sharding.shard_shape(value.shape), value.dtype, False), (value.shape, value.dtype, True))
            kind = next((kind for kind in kinds if free_outputs[kind]), None)
            if kind is not None:
                free_outputs[kind] -= 1
                usable.append(i)
        return usable


class StagePieces:
    """A stage, ready to be split into programs.

    Attributes:
        shardings: the sharding that the stage expects of each input port.
        aliases: slots that equal another slot, which is used instead.
        partial: the accumulators that are reduced over devices after the loop, by their value in the loop.
        exchanged: what replicas of the stage exchange after their microbatches: accumulators and rows of stacks.
        corrected: how an asynchronous pipeline corrects updates; None if it does not.
    """

    def __init__(
        self, stage: PlannedStage, pieces: Pieces, layout: Layout, corrected: CorrectedUpdates | None = None
    ) -> None:
        plan, trace = stage.plan, layout.trace
        self.corrected = corrected
        self.stage, self.pieces, self.layout = stage, pieces, layout
        self.replay = Replay(plan, trace, stage.mesh)
        self.entered = {leave: enter for enter, leave in layout.carries.items()}
        sums = deferred_reductions(layout, ConstrainedShardings(self.replay.shardings), plan.mesh)
        self.partial = {one.carry: one for one in sums.values()}
        self.uneven = UnevenValues(self.replay.shardings.at_definition, trace, plan.mesh, stage.mesh, self.partial)
        taken = taken_shardings(plan, layout, stage.program.inputs)
        self.shardings = dict(zip(taken, named_shardings(list(taken.values()), stage.mesh), strict=True))
        out = named_shardings([t.sharding.resolved() for t in plan.outputs], stage.mesh)
        self.out_shardings = dict(zip(stage.program.outputs, out, strict=True))
        slots = [(port, Slot("once", value)) for port, value in zip(stage.program.inputs, trace.inputs, strict=True)]
        self.arguments = {port.leaf: slot for port, slot in slots if port.kind == "argument"}
        self.outside = {port: slot for port, slot in slots if port.kind == "outside"}
        inputs = {slot.value: slot for _, slot in slots}
        self.passed_through = {
            port.leaf: inputs[value]
            for port, value in zip(stage.program.outputs, trace.outputs, strict=True)
            if port.kind == "result" and isinstance(value, int) and value in inputs
        }
        self.aliases = dict(self._aliases(inputs))
        whole: dict[Key, Piece] = {**pieces.around, **pieces.each}
        self.whole = {key: piece for key, piece in whole.items() if self._does_something(piece)}
        if stage.replicas:
            check_effects(layout)
        self.accumulators = accumulators(layout) if stage.replicas else {}
        forms = ExchangedForms(
            layout, self.replay.shardings.at_definition, self.partial, self.uneven, plan.mesh, stage.mesh
        )
        self.exchanged: dict[Slot, Exchanged] = dict(forms.of(self.accumulators)) if stage.replicas else {}

    def avals(self) -> dict[Port, Any]:
        """The aval of each input and output port."""
        trace, program = self.layout.trace, self.stage.program
        inputs = zip(program.inputs, trace.inputs, strict=True)
        outputs = ((port, v) for port, v in zip(program.outputs, trace.outputs, strict=True) if isinstance(v, int))
        return {port: trace.avals[value] for port, value in itertools.chain(inputs, outputs)}

    def taken(self, piece: Piece) -> tuple[Slot, ...]:
        """The slots that a piece reads, without duplicates."""
        return tuple(dict.fromkeys(self.aliases.get(slot, slot) for slot in piece.takes))

    def program(
        self,
        key: Key,
        sends: Sequence[Send],
        arrivals: Mapping[Slot, NamedSharding],
        num_microbatches: int,
        compiler_options: Mapping[str, Any] | None,
        compiled: Compiled,
    ) -> PieceProgram:
        """A piece as a program.

        Args:
            arrivals: the sharding that the piece applies to a slot before use, by slot that other stages fill.
            compiled: the compiled pieces of the same submesh.
        """
        piece = self.whole[key]
        wanted = {slot for one in self.whole.values() for slot in self.taken(one)}
        gives = tuple(slot for slot in piece.gives if slot in wanted and slot not in self.aliases)
        ports = self.stage.program.outputs
        results = tuple((i, self.out_shardings[ports[i]]) for i in piece.outputs if ports[i].kind == "result")
        read, made = self.corrected.slots(piece) if self.corrected is not None else ([], [])
        gives = (*gives, *made)
        takes = self._in_order_of((*self.taken(piece), *read), gives, [i for i, _ in results])
        of_all = num_microbatches if key in self.pieces.around else 1
        is_around = key in self.pieces.around
        of_replicas = 1 + len(self.stage.replicas)
        each = [
            of_replicas if is_around and slot.kind == "carry" and slot in self.exchanged else _count(slot, of_all)
            for slot in takes
        ]
        counts = tuple(each), tuple(_count(slot, of_all) for slot in gives)
        pinned = [self._pinned(slot) for slot in gives]
        kept = tuple(itertools.chain.from_iterable(map(itertools.repeat, pinned, counts[1])))
        program = PieceProgram(
            piece,
            takes,
            gives,
            counts,
            kept,
            tuple(sends),
            results,
            self.stage.mesh,
            arrivals,
            list,
            {**(compiler_options or {}), **self._options()} or None,
            compiled,
        )
        program.function = self._function(program, arrivals, isinstance(key, str))
        return program

    def _options(self) -> dict[str, Any]:
        """XLA's options of the stage's plan on its devices."""
        return execute.jit_options(self.stage.plan, self.stage.mesh).get("compiler_options", {})

    def argument_sharding(self, value: int) -> NamedSharding:
        """The sharding of an argument, by its value."""
        return self.shardings[self.layout.inputs[value]]

    # -- helpers -----------------------------------------------------------------------------

    def _pinned(self, slot: Slot) -> NamedSharding | None:
        """The sharding in which a piece leaves a slot; None where XLA may choose."""
        if slot.kind == "velocity":
            return self.argument_sharding(slot.value)
        return self.exchanged[slot].sharding if slot in self.exchanged else None

    def _combined(self, slot: Slot, replicas: Sequence[Any]) -> Any:
        """An accumulator, from those of all replicas in their order."""
        step = self.accumulators.get(slot.value)
        if step is None:
            return replicas[0]
        return functools.reduce(lambda a, b: jax_compat.bind(step.source, [a, b])[0], replicas)

    def _in_order_of(self, takes: Sequence[Slot], gives: Sequence[Slot], results: Sequence[int]) -> tuple[Slot, ...]:
        """Inputs in the order of the outputs that replace them, then the others. JAX lets the n-th output of a shape
        overwrite the n-th donated input of that shape: in another order, a new parameter would overwrite a moment that
        is still read, and XLA would copy each."""
        program, inputs = self.stage.program, self.layout.trace.inputs
        carried = program.program.graph.carried
        state = {after: Slot("once", inputs[i]) for i, after in carried if program.inputs[i].kind == "argument"}
        replaced = [*gives, *(state.get(i) for i in results)]
        place = {slot: n for n, slot in enumerate(replaced)}
        return tuple(sorted(takes, key=lambda slot: place.get(slot, len(replaced))))

    def _aliases(self, inputs: Mapping[int, Slot]) -> Iterator[tuple[Slot, Slot]]:
        """Loop constants that enter with their input's planned sharding; the input's own slot serves for them."""
        equations, replay = self.layout.trace.equations, self.replay
        planned = {v: t.sharding for v, t in zip(self.layout.trace.inputs, self.stage.plan.inputs, strict=True)}
        for n in self.layout.enters:
            operand, (inner,) = equations[n].operands[0], equations[n].results
            if not equations[n].takes_constant or not isinstance(operand, int) or operand not in inputs:
                continue
            path = (*replay.shardings.at_operand.get((n, 0), ()), *replay.shardings.at_definition.get(inner, ()))
            if inner not in replay.shardings.barriers and all(sharding == planned[operand] for sharding in path):
                yield Slot("once", inner), inputs[operand]

    def _does_something(self, piece: Piece) -> bool:
        return bool(piece.outputs or (piece.steps and any(slot not in self.aliases for slot in piece.gives)))

    def _function(
        self, program: PieceProgram, arrivals: Mapping[Slot, NamedSharding], in_loop: bool
    ) -> Callable[..., list[Any]]:
        piece, equations, mesh = program.piece, self.layout.trace.equations, self.stage.mesh

        def run(*flat: Any) -> list[Any]:
            arguments = iter(flat)
            values: dict[int, Any] = {}
            besides: dict[Slot, Any] = {}
            for slot, count in zip(program.takes, program.counts[0], strict=True):
                given = itertools.islice(arguments, count)
                if slot.kind in ("velocity", "scale"):
                    (besides[slot],) = given
                    continue
                arrays = [self.uneven.whole(slot.value, self._as_planned(slot, one, arrivals)) for one in given]
                is_stack = slot.kind == "each" and not in_loop
                values[slot.value] = tuple(arrays) if is_stack else self._combined(slot, arrays)
            for slot, source in self.aliases.items():
                if source in program.takes:
                    values[slot.value] = values[source.value]
            accumulators = {v: value for v, value in values.items() if v in self.partial}
            values |= {
                v: jnp.zeros_like(value[0]) for v, value in accumulators.items()
            }  # placeholders; their value is unused
            part = self.replay.part(values)
            out: dict[int, Any] = {}
            for what, start, stop in piece.steps:
                if what == "run":
                    part.run(start, stop)
                    besides.update(self.corrected.after(part, start, stop, besides) if self.corrected else ())
                elif what == "enter":
                    slot = equations[start].results[0]
                    out[slot] = self._initial(slot, part.enter(start))
                elif in_loop:
                    slot = self._leaves_as(start)
                    partial = self.partial.get(slot)
                    out[slot] = (
                        accumulate(partial, accumulators[slot], part, mesh)
                        if partial is not None
                        else part.leave(start)
                    )
                else:
                    slot = self._leaves_as(start)
                    value = jnp.sum(accumulators[slot], axis=0) if slot in accumulators else values[slot]
                    part.define(start, jnp.stack(value) if equations[start].stacks else value)
            gives: list[Any] = []
            for slot, count in zip(program.gives, program.counts[1], strict=True):
                if slot in besides:
                    gives.append(besides[slot])
                    continue
                value = out[slot.value] if slot.value in out else part.value(slot.value)
                each = value if isinstance(value, tuple) else (value,) * count
                gives += [self.uneven.padded(slot.value, one) for one in each]
            sends = [
                part.output(w.what) if isinstance(w.what, int) else part.value(w.what.value) for w in program.sends
            ]
            kinds = itertools.chain.from_iterable(
                itertools.repeat(slot.kind, count) for slot, count in zip(program.gives, program.counts[1], strict=True)
            )
            return [
                *_without_aliases(gives, list(kinds), flat, program.shared),
                *map(_raw, sends),
                *(part.output(i) for i, _ in program.results),
            ]

        run.__name__ = f"{self.layout.trace.name} {piece.name}".replace(" ", "_")
        return run

    def _initial(self, slot: int, value: Any) -> Any:
        partial, shape = self.partial.get(slot), self.stage.plan.mesh
        return value if partial is None else initial(partial, value, self.stage.mesh, shape.sizes(partial.axes))

    def _as_planned(self, slot: Slot, value: Any, arrivals: Mapping[Slot, NamedSharding]) -> Any:
        """A value from another stage, with the dtype of the trace and the planned sharding."""
        sharding = arrivals.get(slot)
        if sharding is None:
            return value
        aval = self.layout.trace.avals[slot.value]
        if aval.dtype != value.dtype:  # raw key data
            value = jax_compat.retyped(value, jax_compat.shape_struct(aval))
        return jax.lax.with_sharding_constraint(value, sharding)

    def _leaves_as(self, leave: int) -> int:
        """The slot by which a value leaves the loop."""
        return self.layout.trace.equations[self.entered.get(leave, leave)].results[0]


def _count(slot: Slot, of_all: int) -> int:
    """The number of arrays of a slot."""
    return of_all if slot.kind == "each" else 1


def _raw(value: Any) -> Any:
    """PRNG keys are sent as their raw data."""
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


def _without_aliases(
    gives: Sequence[Any], kinds: Sequence[str], taken: Sequence[Any], shared: tuple[set[int], set[int]]
) -> list[Any]:
    """The outputs of a piece, and in `shared` those that may share memory. JAX returns an unchanged input as the
    same array, and equal outputs as one array. A carried value is copied then, because a later piece overwrites it."""
    places = {id(value): i for i, value in enumerate(taken)}
    known: dict[int, int] = {}
    out: list[Any] = []
    for i, (value, kind) in enumerate(zip(gives, kinds, strict=True)):
        if id(value) in places or id(value) in known:
            if kind == "carry":
                value = jnp.copy(value)
            else:
                shared[0].update({i, known.get(id(value), i)})
                shared[1].update({places[id(value)]} if id(value) in places else ())
        known.setdefault(id(value), i)
        out.append(value)
    return out
