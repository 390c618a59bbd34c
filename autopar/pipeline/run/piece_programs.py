"""The pieces of a stage as jitted programs of flat arrays.

In: a planned stage, its pieces, and what other stages send to it and want of it. Out: `PieceProgram`s: functions from the
values of slots to those of slots, to what is sent, laid for the wire, and to results of the step.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.partition_spec import named_shardings
from autopar.pipeline.cut.extract_stages import Port
from autopar.pipeline.cut.pieces import Layout, Level, Piece, Pieces, Slot
from autopar.pipeline.cut.stage_programs import StageProgram
from autopar.pipeline.run.deferred_reductions import partial_sums
from autopar.plans.plan import Plan
from autopar.runtime.replay import Replay

#: Of a stage, a level around the loop or a phase in it: what names a piece.
Key = Level | str


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage and how it is split over its devices, which may be other processes'."""

    program: StageProgram
    plan: Plan
    mesh: Mesh


@dataclass(frozen=True, slots=True)
class Send:
    """Something that a piece gives to other stages.

    Args:
        what: a slot, or the position of an output of the stage's trace.
        sharding: how it is to lie.
    """

    what: Slot | int
    sharding: NamedSharding


#: By what is quickly compared of a piece, those compiled so far: jitted, and as traced.
Compiled = dict[Any, list[tuple[Callable[..., Any], Any]]]


@dataclass(slots=True)
class PieceProgram:
    """A piece, to be jitted.

    Args:
        takes, gives: slots. sends: what other stages get. results: positions of outputs that are results of the step, and
            how they lie.
        counts: of the slots of `takes` and of `gives`, how many arrays stand for each: a piece around the loop takes and
            gives those of all microbatches.
        compiled: what the pieces on the same submesh have compiled, to which this adds: equal ones share it.
        shared: once it has been traced, the places among what it gives that may be the same array as another, or as one
            that it was given; and those of what it was given.
    """

    piece: Piece
    takes: tuple[Slot, ...]
    gives: tuple[Slot, ...]
    counts: tuple[tuple[int, ...], tuple[int, ...]]
    sends: tuple[Send, ...]
    results: tuple[tuple[int, NamedSharding], ...]
    function: Callable[..., list[Any]]
    compiler_options: dict[str, Any] | None
    compiled: Compiled = field(default_factory=dict)
    shared: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))
    jitted: Any = None

    def jit(self, donated: Sequence[int]) -> Any:
        """The jitted function.

        Args:
            donated: places among the arrays that it takes whose memory it may use again.
        """
        return jax.jit(
            self.function,
            donate_argnums=tuple(donated),
            out_shardings=self._out_shardings,
            compiler_options=self.compiler_options,
        )

    @property
    def _out_shardings(self) -> list[NamedSharding | None]:
        """Of what goes to other stages, and of results; what stays lies as XLA leaves it."""
        pinned = [one.sharding for one in self.sends] + [sharding for _, sharding in self.results]
        return [None] * sum(self.counts[1]) + pinned

    def first_call(self, donated: Sequence[int], values: Sequence[Any]) -> Any:
        """Compile it, or take what an equal piece on the same devices has compiled, and call it."""
        usable = self._usable(donated, values)
        jitted = self.jit(usable)
        traced = jitted.trace(*values)
        made = tuple((one.shape, str(one.dtype)) for one in traced.out_info)
        primitives = tuple(str(equation.primitive) for equation in traced.jaxpr.jaxpr.eqns)
        given = tuple((one.shape, str(one.dtype), one.sharding) for one in values)
        alike = self.compiled.setdefault((given, made, tuple(self._out_shardings), tuple(usable), primitives), [])
        same = next((other for other, known in alike if is_same_program(known, traced)), None)
        if same is None:
            alike.append((jitted, traced))
        self.jitted = same or jitted
        return self.jitted(*values)

    def _usable(self, donated: Sequence[int], values: Sequence[Any]) -> list[int]:
        """Places of arrays in whose memory something has room that the piece makes: of as large parts on each device; or of
        the same shape, where XLA chooses the parts. JAX warns of others."""
        made = Counter(
            (one.shape if sharding is None else sharding.shard_shape(one.shape), one.dtype, sharding is None)
            for one, sharding in zip(self.jit(()).trace(*values).out_info, self._out_shardings, strict=True)
        )
        usable: list[int] = []
        for i in donated:
            value = values[i]
            kinds = ((value.sharding.shard_shape(value.shape), value.dtype, False), (value.shape, value.dtype, True))
            kind = next((kind for kind in kinds if made[kind]), None)
            if kind is not None:
                made[kind] -= 1
                usable.append(i)
        return usable


class StagePieces:
    """One stage, ready to be taken apart into programs.

    Attributes:
        shardings: by port, how the stage wants what it is given.
        aliases: slots that hold what another holds, which is taken in their place.
        partial: by their number in the loop, accumulators that are summed over devices after it.
    """

    def __init__(self, stage: PlannedStage, pieces: Pieces, layout: Layout) -> None:
        plan, trace = stage.plan, layout.trace
        self.stage, self.pieces, self.layout = stage, pieces, layout
        self.replay = Replay(plan, trace, stage.mesh)
        self.entered = {leave: enter for enter, leave in layout.carries.items()}
        sums = partial_sums(layout, self.replay, plan.mesh)
        self.partial = {one.carry: one for one in sums.values()}
        self.shardings = dict(
            zip(stage.program.inputs, named_shardings([t.sharding for t in plan.inputs], stage.mesh), strict=True)
        )
        for value, inner in pieces.takes_inside.items():
            path = self.replay.at_definition.get(inner, ())
            if path:  # it comes as the loop has it
                self.shardings[Port("inside", value)] = named_shardings(path[-1:], stage.mesh)[0]
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

    def avals(self) -> dict[Port, Any]:
        """By port, the type of what crosses the stage's border."""
        trace, program = self.layout.trace, self.stage.program
        given = zip(program.inputs, trace.inputs, strict=True)
        made = ((port, v) for port, v in zip(program.outputs, trace.outputs, strict=True) if isinstance(v, int))
        return {port: trace.avals[value] for port, value in itertools.chain(given, made)}

    def taken(self, piece: Piece) -> tuple[Slot, ...]:
        """The slots that a piece reads, each once."""
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
            compiled: of the stages on its submesh.
            arrivals: of slots that other stages fill, how the piece lays them before it uses them.
        """
        piece = self.whole[key]
        takes = self.taken(piece)
        wanted = {slot for one in self.whole.values() for slot in self.taken(one)}
        gives = tuple(slot for slot in piece.gives if slot in wanted and slot not in self.aliases)
        ports = self.stage.program.outputs
        results = tuple((i, self.out_shardings[ports[i]]) for i in piece.outputs if ports[i].kind == "result")
        of_all = num_microbatches if key in self.pieces.around else 1
        counts = tuple(tuple(of_all if slot.kind == "each" else 1 for slot in slots) for slots in (takes, gives))
        made = PieceProgram(
            piece,
            takes,
            gives,
            (counts[0], counts[1]),
            tuple(sends),
            results,
            list,
            dict(compiler_options or {}),
            compiled,
        )
        made.function = self._function(made, arrivals, isinstance(key, str))
        made.compiler_options = made.compiler_options or None
        return made

    # -- inside ------------------------------------------------------------------------------

    def _aliases(self, inputs: Mapping[int, Slot]) -> Iterator[tuple[Slot, Slot]]:
        """What the loop takes in as the step was given it need not be given to it again."""
        equations, replay = self.layout.trace.equations, self.replay
        planned = {v: t.sharding for v, t in zip(self.layout.trace.inputs, self.stage.plan.inputs, strict=True)}
        for n in self.layout.enters:
            operand, (inner,) = equations[n].operands[0], equations[n].results
            if equations[n].piece != "enter_const" or not isinstance(operand, int) or operand not in inputs:
                continue
            path = (*replay.at_operand.get((n, 0), ()), *replay.at_definition.get(inner, ()))
            if inner not in replay.barriers and all(sharding == planned[operand] for sharding in path):
                yield Slot("once", inner), inputs[operand]

    def _does_something(self, piece: Piece) -> bool:
        return bool(piece.outputs or (piece.steps and any(slot not in self.aliases for slot in piece.gives)))

    def _function(
        self, made: PieceProgram, arrivals: Mapping[Slot, NamedSharding], in_loop: bool
    ) -> Callable[..., list[Any]]:
        piece, equations, mesh = made.piece, self.layout.trace.equations, self.stage.mesh

        def run(*flat: Any) -> list[Any]:
            given = iter(flat)
            values: dict[int, Any] = {}
            for slot, count in zip(made.takes, made.counts[0], strict=True):
                arrays = [self._as_planned(slot, one, arrivals) for one in itertools.islice(given, count)]
                values[slot.value] = arrays[0] if slot.kind != "each" or in_loop else tuple(arrays)
            for slot, source in self.aliases.items():
                if source in made.takes:
                    values[slot.value] = values[source.value]
            held = {v: value for v, value in values.items() if v in self.partial}
            values |= {v: jnp.zeros_like(value[0]) for v, value in held.items()}  # what they would be is not read
            part = self.replay.part(values)
            out: dict[int, Any] = {}
            for what, start, stop in piece.steps:
                if what == "run":
                    part.run(start, stop)
                elif what == "enter":
                    slot = equations[start].results[0]
                    out[slot] = self._begun(slot, part.enter(start))
                elif in_loop:
                    slot = self._leaves_as(start)
                    partial = self.partial.get(slot)
                    out[slot] = partial.added(held[slot], part, mesh) if partial is not None else part.leave(start)
                else:
                    slot = self._leaves_as(start)
                    value = jnp.sum(held[slot], axis=0) if slot in held else values[slot]
                    part.define(start, jnp.stack(value) if equations[start].piece == "exit_stack" else value)
            gives: list[Any] = []
            for slot, count in zip(made.gives, made.counts[1], strict=True):
                value = out[slot.value] if slot.value in out else part.value(slot.value)
                gives += value if isinstance(value, tuple) else [value] * count
            sends = [part.output(w.what) if isinstance(w.what, int) else part.value(w.what.value) for w in made.sends]
            kinds = itertools.chain.from_iterable(
                itertools.repeat(slot.kind, count) for slot, count in zip(made.gives, made.counts[1], strict=True)
            )
            return [
                *_own(gives, list(kinds), flat, made.shared),
                *map(_raw, sends),
                *(part.output(i) for i, _ in made.results),
            ]

        run.__name__ = f"{self.layout.trace.name} {piece.name}".replace(" ", "_")
        return run

    def _begun(self, slot: int, value: Any) -> Any:
        partial, shape = self.partial.get(slot), self.stage.plan.mesh
        return value if partial is None else partial.begun(value, self.stage.mesh, shape.sizes(partial.axes))

    def _as_planned(self, slot: Slot, value: Any, arrivals: Mapping[Slot, NamedSharding]) -> Any:
        """What another stage has sent, as a value of the trace, laid as planned."""
        sharding = arrivals.get(slot)
        if sharding is None:
            return value
        aval = self.layout.trace.avals[slot.value]
        if aval.dtype != value.dtype:  # a key's words
            value = jax_compat.retyped(value, jax_compat.shape_struct(aval))
        return jax.lax.with_sharding_constraint(value, sharding)

    def _leaves_as(self, leave: int) -> int:
        """The number of the slot that a piece of the loop leaves by."""
        return self.layout.trace.equations[self.entered.get(leave, leave)].results[0]


def is_same_program(one: Any, other: Any) -> bool:
    """Whether two traced pieces, of equal arguments on the same devices, are one program. Not those that call Python, which
    their text does not tell apart, nor those with constants that it does not show."""
    if jax.config.jax_use_simplified_jaxpr_constants:
        return False
    texts = [_MODULE_NAME.sub("module", traced.lower().as_text(), count=1) for traced in (one, other)]
    return texts[0] == texts[1] and "callback" not in texts[0]


_MODULE_NAME = re.compile(r"module @\S+")


def _raw(value: Any) -> Any:
    """Keys pass as their words."""
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


def _own(
    gives: Sequence[Any], kinds: Sequence[str], taken: Sequence[Any], shared: tuple[set[int], set[int]]
) -> list[Any]:
    """What a piece gives, and in `shared` what of it is no array of its own: JAX hands on what comes and goes unchanged,
    and makes one array of two that are the same. What is carried is written over, so it always is its own."""
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
