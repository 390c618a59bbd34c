"""Split what a stage runs before its microbatches by what it depends on: the batch, or a version of the weights.

In: the layouts and pieces of all stages, and the arguments that change from batch to batch.
Out: `Versioned`: for each stage its pieces, in which those before the loop are in groups, and what each value outside the
loop depends on. In an asynchronous pipeline the microbatches of one batch may read several versions, and those of several
batches one version, so each group runs when one of its values is first needed, with one version and one batch.

An argument is constant, belongs to a batch, or has versions. State that the step computes without weights and gradients, such
as a count of steps or a key that is split, belongs to the batch: all passes of a batch read the same. All other state has
versions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.errors import ScheduleError
from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.cut.extract_stages import LeafKey, Port
from autopar.pipeline.cut.pieces import Layout, Level, Piece, Pieces, Slot, Step, pieces_of
from autopar.pipeline.cut.stage_programs import StageProgram, carried_leaves

#: What a value may depend on. "loop": what microbatches have computed, such as gradients.
Source = Literal["batch", "version", "loop"]
Sources = frozenset[Source]

_NOTHING: Sources = frozenset()
_BATCH: Sources = frozenset({"batch"})
_VERSION: Sources = frozenset({"version"})
_LOOP: Sources = frozenset({"loop"})
#: The groups of pieces before the loop: the initial values of accumulators run apart, because they are needed later than
#: the rest.
_CARRY = 3
_GROUPS: Mapping[Sources, int] = {
    _NOTHING: 0,
    _BATCH: 0,
    _VERSION: 1,
    _BATCH | _VERSION: 2,
}


@dataclass(frozen=True, slots=True)
class VersionedStage:
    """A stage of an asynchronous pipeline.

    Args:
        pieces: a piece before the loop has the number of its group as the third part of its level.
        sources: what each value outside the loop, and each that enters it, depends on.
    """

    pieces: Pieces
    sources: Mapping[int, Sources]

    def of(self, slot: Slot) -> Sources:
        """What a slot depends on; one that a microbatch fills depends on its batch."""
        return self.sources.get(slot.value, _BATCH)


@dataclass(frozen=True, slots=True)
class Versioned:
    """The stages of an asynchronous pipeline.

    Args:
        leaves: what each argument is: nothing if it is constant.
    """

    stages: tuple[VersionedStage, ...]
    leaves: Mapping[LeafKey, Sources]


def versioned(
    layouts: Sequence[Layout],
    pieces: Sequence[Pieces],
    outputs: Sequence[Sequence[Port]],
    carried: Mapping[LeafKey, LeafKey],
    of_batch: Collection[int],
    names: Mapping[int, str],
) -> Versioned:
    """Split the pieces of all stages.

    Args:
        outputs: the ports of each stage's outputs.
        carried: the result that replaces each carried argument.
        of_batch: positions of arguments that are new in each batch.
        names: the path of each argument, for errors.

    Raises:
        ScheduleError: the step cannot run asynchronously.
    """
    _check_apart(layouts, outputs)
    leaves = _leaves(layouts, outputs, carried, of_batch)
    _check_homes(layouts, leaves, names)
    stages = []
    for layout, own in zip(layouts, pieces, strict=True):
        sources = _sources(layout, leaves)
        _check_carries(layout, sources)
        around: dict[Level, Piece] = {}
        for level, piece in own.around.items():
            around |= {level: piece} if level[0] else dict(_groups(layout, level, piece, sources))
        stages.append(VersionedStage(Pieces(around, own.each, own.takes_inside, own.gives_inside), sources))
    return Versioned(tuple(stages), leaves)


def versioned_programs(programs: Sequence[StageProgram]) -> Versioned:
    """The stages as planned, where arguments that no stage updates are taken for those of the batch.

    Raises:
        ScheduleError: the step cannot run asynchronously.
    """
    layouts = [Layout(one.program.trace, one.inputs) for one in programs]
    carried, names = carried_leaves(programs), dict[int, str]()
    for one, layout in zip(programs, layouts, strict=True):
        ports = zip(one.inputs, layout.trace.input_paths, strict=True)
        names.update((port.value, path) for port, path in ports if port.kind == "argument")
    of_batch = {leaf[0] for one in programs for port in one.inputs if (leaf := port.leaf) not in carried}
    outputs = [one.outputs for one in programs]
    _check_apart(layouts, outputs)
    return versioned(layouts, [pieces_of(one, {}) for one in layouts], outputs, carried, of_batch, names)


def _leaves(
    layouts: Sequence[Layout],
    outputs: Sequence[Sequence[Port]],
    carried: Mapping[LeafKey, LeafKey],
    of_batch: Collection[int],
) -> dict[LeafKey, Sources]:
    """What each argument is. Carried state belongs to the batch until something proves that it has versions."""
    ports = {port.leaf for layout in layouts for port in layout.inputs.values() if port.kind == "argument"}
    found: dict[LeafKey, Sources] = {
        leaf: _BATCH if leaf in carried or leaf[0] in of_batch else _NOTHING for leaf in ports
    }
    argument_of = {result: argument for argument, result in carried.items()}
    while True:
        changed = False
        for layout, given in zip(layouts, outputs, strict=True):
            sources = _sources(layout, found)
            taken = {layout.inputs[v].leaf: v for v in layout.inputs if layout.inputs[v].kind == "argument"}
            for port, value in zip(given, layout.trace.outputs, strict=True):
                leaf = argument_of.get(port.leaf) if port.kind == "result" else None
                if leaf is None or not isinstance(value, int):
                    continue
                kind = _VERSION if sources.get(value, _LOOP) & {"loop", "version"} else found[leaf]
                kind = _NOTHING if value == taken.get(leaf) else kind  # unchanged
                changed |= kind != found[leaf]
                found[leaf] = kind
        if not changed:
            return found


def _sources(layout: Layout, leaves: Mapping[LeafKey, Sources]) -> dict[int, Sources]:
    """What each value outside the loop, and each that enters it, depends on."""
    equations = layout.trace.equations
    found = {v: leaves[port.leaf] for v, port in layout.inputs.items() if port.kind == "argument"}
    found.update((v, _LOOP) for n in (*layout.carries.values(), *layout.stacks) for v in equations[n].results)
    for unit in layout.outside:
        found.update(dict.fromkeys(unit.results, _NOTHING.union(*(found.get(v, _NOTHING) for v in unit.operands))))
    for n in layout.enters:
        operand, (value,) = equations[n].operands[0], equations[n].results
        found[value] = found.get(operand, _NOTHING) if isinstance(operand, int) else _NOTHING
    return found


def _groups(
    layout: Layout, level: Level, piece: Piece, sources: Mapping[int, Sources]
) -> Iterator[tuple[Level, Piece]]:
    """A piece before the loop, in groups."""
    steps = list(piece.steps)
    made = [_made(layout, step) for step in steps]
    given = {slot.value for slot in piece.takes}.union(*made)  # anything else is a constant of the program
    reads = [[v for v in _reads(layout, step) if v in given] for step in steps]
    carries = {layout.trace.equations[n].results[0] for n in layout.carries}
    wanted = {slot.value for slot in piece.gives} - carries
    wanted |= {v for i in piece.outputs if isinstance(v := layout.trace.outputs[i], int)}
    group: list[int] = []
    for own, read in zip(reversed(made), reversed(reads), strict=True):
        is_for_carries = not wanted.intersection(own)
        group.insert(0, _CARRY if is_for_carries else _GROUPS[_NOTHING.union(*(sources[v] for v in own))])
        if not is_for_carries:
            wanted.update(read)
    group_of = {v: g for own, g in zip(made, group, strict=True) for v in own}
    needed = {v for read, g in zip(reads, group, strict=True) for v in read if group_of.get(v, g) != g}
    slots = {slot.value: slot for slot in (*piece.takes, *piece.gives)}
    for g in sorted(set(group)):
        own = [n for n in range(len(steps)) if group[n] == g]
        inner = {v for n in own for v in made[n]}
        takes = dict.fromkeys(v for n in own for v in reads[n] if v not in inner)
        gives = [slot for slot in piece.gives if slot.value in inner]
        gives += [Slot("once", v) for v in sorted(needed & inner) if v not in {slot.value for slot in gives}]
        yield (
            (*level, g),
            Piece(
                name=f"{piece.name} {g}" if g else piece.name,
                steps=tuple(steps[n] for n in own),
                takes=tuple(slots.get(v, Slot("once", v)) for v in takes),
                gives=tuple(gives),
                outputs=tuple(i for i in piece.outputs if layout.trace.outputs[i] in inner),
            ),
        )


def _made(layout: Layout, step: Step) -> tuple[int, ...]:
    _, start, stop = step
    equations = layout.trace.equations[start : max(stop, start + 1)]
    return tuple(v for equation in equations for v in equation.results)


def _reads(layout: Layout, step: Step) -> tuple[int, ...]:
    _, start, stop = step
    made = set(_made(layout, step))
    equations = layout.trace.equations[start : max(stop, start + 1)]
    return tuple(dict.fromkeys(v for equation in equations for v in equation.reads if v not in made))


# -- what cannot run asynchronously --------------------------------------------------------------


def _check_apart(layouts: Sequence[Layout], outputs: Sequence[Sequence[Port]]) -> None:
    """Refuse values that pass between stages once per step."""
    for number, (layout, given) in enumerate(zip(layouts, outputs, strict=True)):
        for port, value in zip(given, layout.trace.outputs, strict=True):
            if port.kind != "outside":
                continue
            producer = layout.trace.producers.get(value) if isinstance(value, int) else None
            what = "a value"
            if producer is not None:
                equation = layout.trace.equations[producer]
                line = jax_compat.user_source(equation.source) or "an unknown line"
                what = f"what `{equation.primitive}` at {line} makes"
            raise ScheduleError(
                f"stage {number} sends {what} to another stage once per step, as for clipping by the global norm or for"
                " parameters that two stages share. In an asynchronous pipeline each stage updates its weights when it has its"
                " own gradients, and waits for no other one: clip the gradients of each parameter by themselves"
                " (`optax.clip_by_block_rms`, `optax.adaptive_grad_clip`), do not share parameters between stages, or leave"
                " `consistency` out"
            )


def _check_homes(layouts: Sequence[Layout], leaves: Mapping[LeafKey, Sources], names: Mapping[int, str]) -> None:
    """Refuse weights that several stages read."""
    homes: dict[LeafKey, int] = {}
    for number, layout in enumerate(layouts):
        for port in layout.inputs.values():
            if port.kind != "argument" or "version" not in leaves[port.leaf]:
                continue
            first = homes.setdefault(port.leaf, number)
            if first != number:
                raise ScheduleError(
                    f"stages {first} and {number} both read `{names[port.leaf[0]]}`, which the step updates. In an asynchronous"
                    " pipeline each stage has versions of its own weights: do not share parameters between stages, or leave"
                    " `consistency` out"
                )


def _check_carries(layout: Layout, sources: Mapping[int, Sources]) -> None:
    """Refuse state that microbatches continue, such as running statistics."""
    for n in layout.carries:
        equation = layout.trace.equations[n]
        if "version" in sources[equation.results[0]]:
            leave = layout.trace.equations[layout.carries[n]]
            value = leave.operands[0]
            producer = layout.trace.producers.get(value) if isinstance(value, int) else None
            line = jax_compat.user_source(layout.trace.equations[producer].source) if producer is not None else ""
            raise ScheduleError(
                f"microbatches continue state that the one before left, at {line or 'an unknown line'}, such as running"
                " statistics. In an asynchronous pipeline the next batch begins before that state is updated, so updates would"
                " be lost: compute it in the update from gradients or batch alone, or leave `consistency` out"
            )
