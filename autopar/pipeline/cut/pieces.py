"""Split a stage's program into separately compiled pieces: around the loop over microbatches, and per microbatch.

In: the trace of a stage, as it was planned, and its ports. Out: `Piece`s: their equations, inputs and outputs. Values
that pass between two pieces of a stage keep their sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.errors import MicrobatchError
from autopar.frontend.trace import Trace
from autopar.pipeline.cut.extract_stages import Port
from autopar.transforms.microbatch.units import Unit, backward_of

#: How often a value is made: once per step, once per microbatch, or carried from microbatch to microbatch. What corrected updates
#: read besides: the velocity of the weight with this number, and the factor of step sizes.
SlotKind = Literal["once", "each", "carry", "velocity", "scale"]

#: When a piece outside the loop can run: 0 before the loop or 1 after it, then how many times values have passed
#: between stages.
#: In an asynchronous pipeline, a third part is the group of a piece before the loop.
Level = tuple[int, ...]


#: Run equations from one position to before another; bring a value into the loop or out of it, by the equation that
#: does so.
Step = tuple[Literal["run", "enter", "exit"], int, int]


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A value that a piece reads or makes, by its number in the stage's trace.

    A carry has its number inside the loop. A value that each microbatch adds to a stack has the number of the stack.
    """

    kind: SlotKind
    value: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a stage's equations.

    Args:
        name: e.g. `forward`.
        steps: what it runs, in order.
        takes, gives: slots that it reads and makes. A carry that it reads is also returned.
        outputs: positions of the trace's outputs that it makes.
    """

    name: str
    steps: tuple[Step, ...]
    takes: tuple[Slot, ...]
    gives: tuple[Slot, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A stage's program in pieces.

    Args:
        around: pieces that run once per step, by level.
        each: pieces that run for each microbatch, by `piece_name`.
        takes_inside, gives_inside: for each value that is received from another stage, or sent to one, in each
            microbatch: from its number in the whole trace to its number here.
    """

    around: Mapping[Level, Piece]
    each: Mapping[str, Piece]
    takes_inside: Mapping[int, int]
    gives_inside: Mapping[int, int]


def piece_name(phase: str, token_slice: int, num_slices: int) -> str:
    """The name of a piece that runs for each microbatch: its phase, and its slice if microbatches are in slices of tokens.

    >>> piece_name("forward", 1, 2), piece_name("forward", 0, 1)
    ('forward 1', 'forward')
    """
    return phase if num_slices == 1 else f"{phase} {token_slice}"


class Layout:
    """Where the parts of a stage's trace are: its ports, loop, carries and stacks."""

    def __init__(self, trace: Trace, inputs: Sequence[Port]) -> None:
        self.trace = trace
        self.inputs = dict(zip(trace.inputs, inputs, strict=True))
        loop = next((region for region in trace.regions if region.source is trace.microbatches), None)
        if loop is None:
            raise MicrobatchError(
                f"nothing in {trace.name} runs for each microbatch: something else than the batch was taken for the examples."
                " Put the parameters into one argument, apart from the batch, or plan without `stages`"
            )
        self.loop = loop
        self.wholes = {one.start: one.stop for one in trace.rewritten}
        self.body = list(self._units(*loop.sections[0]))
        #: The slices of tokens of each microbatch.
        self.num_slices = 1 + max((one.token_slice for one in trace.equations), default=0)
        self.outside = [*self._units(0, loop.enter[0]), *self._units(loop.exit[1], len(trace.equations))]
        equations = trace.equations
        self.takes_inside: dict[int, int] = {}
        self.gives_inside: dict[int, int] = {}
        self.enters: list[int] = []  # pieces that bring the stage's own values into the loop
        self.carries: dict[int, int] = {}  # input piece -> output piece
        self.stacks = [n for n in range(*loop.exit) if equations[n].stacks]
        leaving = iter([n for n in range(*loop.exit) if equations[n].piece == "exit_carry"])
        for n in range(*loop.enter):
            operand = equations[n].operands[0]
            port = self.inputs.get(operand) if isinstance(operand, int) else None
            leave = next(leaving) if equations[n].piece == "enter_carry" else None
            if port is not None and port.kind == "inside":
                self.takes_inside[port.value] = equations[n].results[0]
            elif port is not None and port.kind == "buffer":
                assert leave is not None
                sent = equations[leave].operands[0]
                assert isinstance(sent, int)
                self.gives_inside[port.value] = sent
            else:
                self.enters.append(n)
                if leave is not None:
                    self.carries[n] = leave
        self.backward = {v for unit in backward_of(self.body, equations) for v in unit.results}

    def phases(self, splits_backward: bool = False, *, by_layer: bool = False) -> dict[int, str]:
        """The phase of each equation of the loop's body.

        Args:
            splits_backward: whether the backward pass has an input part and a weight part.
            by_layer: whether each layer waits for another, as if they were stages.
        """
        needed = self.waited_for(by_layer=by_layer) if splits_backward else set[int]()
        found: dict[int, str] = {}
        for unit in self.body:
            phase = "forward"
            if any(v in self.backward for v in unit.results):
                phase = "backward"
                if splits_backward:
                    phase = "input" if any(v in needed for v in unit.results) else "weight"
            found.update(dict.fromkeys(range(unit.start, unit.stop), phase))
        return found

    def waited_for(self, *, by_layer: bool = False) -> set[int]:
        """Values of the backward pass that are needed for what this stage, or each of its layers, sends to others."""
        needed = {v for v in self.gives_inside.values() if v in self.backward}
        if by_layer:
            needed |= self._between_layers()
        for unit in reversed(self.body):
            if any(v in needed for v in unit.results):
                needed.update(v for v in unit.operands if v in self.backward)
        return needed

    def _between_layers(self) -> set[int]:
        """Values of the backward pass that another layer reads."""
        equations = self.trace.equations
        made_in = {v: equations[unit.start].layer for unit in self.body for v in unit.results}
        return {
            v
            for unit in self.body
            for v in unit.operands
            if v in self.backward and v in made_in and made_in[v] != equations[unit.start].layer
        }

    def _units(self, start: int, stop: int) -> Iterator[Unit]:
        """Units that are not divided: a loop, a branch, equations that were rewritten from one."""
        n = start
        while n < stop:
            region = self.trace.region_at.get(n)
            end = region.exit[1] if region is not None else self.wholes.get(n, n + 1)
            equations = self.trace.equations[n:end]
            made = tuple(v for e in equations for v in e.results)
            read = tuple(v for e in equations for v in e.reads if v not in made)
            yield Unit(n, end, region, read, made)
            n = end


def pieces_of(layout: Layout, levels: Mapping[int, Level], splits_backward: bool = False) -> Pieces:
    """Split a stage's program into pieces.

    Args:
        levels: when each value outside the loop that is an argument, or comes from another stage, is available.
        splits_backward: whether the backward pass runs in two parts: first what other stages wait for, then the rest.
    """
    return _Taking(layout, levels, splits_backward).run()


def value_levels(layout: Layout, given: Mapping[int, Level]) -> dict[int, Level]:
    """When each value outside the loop is available.

    Args:
        given: when each input is available.
    """
    known = dict(given)
    equations = layout.trace.equations
    for n in (*layout.carries.values(), *layout.stacks):
        known.update(dict.fromkeys(equations[n].results, (1, 0)))
    start: Level = (0, 0)
    for unit in layout.outside:
        known.update(dict.fromkeys(unit.results, max([start, *(known.get(v, start) for v in unit.operands)])))
    return known


class _Taking:
    """Assigns every unit to a piece; the one mutable object of this module."""

    def __init__(self, layout: Layout, given: Mapping[int, Level], splits_backward: bool) -> None:
        self.layout, self.equations = layout, layout.trace.equations
        self.levels = value_levels(layout, given)
        self.splits_backward = splits_backward
        #: Piece -> its steps.
        self.steps: dict[Level | str, list[Step]] = {}
        self.reads: dict[Level | str, dict[Slot, None]] = {}
        self.makes: dict[Level | str, dict[Slot, None]] = {}
        self.slot_of: dict[int, Slot] = {}  # value -> its slot between pieces
        self.producer: dict[int, Level | str] = {}

    def run(self) -> Pieces:
        layout = self.layout
        for value in layout.trace.inputs:
            if layout.inputs[value].kind in ("argument", "outside"):
                self.slot_of[value] = Slot("once", value)
        for n in layout.enters:
            equation = self.equations[n]
            (value,) = equation.results
            kind: SlotKind = "carry" if n in layout.carries else "each" if equation.takes_slice else "once"
            self.slot_of[value] = Slot(kind, value)
        self.slot_of.update({v: Slot("each", v) for v in layout.takes_inside.values()})
        self._inside()
        self._outside()
        wanted = self._wanted()
        around = {key: self._piece(key, wanted) for key in self.steps if isinstance(key, tuple)}
        each = {key: self._piece(key, wanted) for key in self.steps if isinstance(key, str)}
        return Pieces(dict(sorted(around.items())), each, layout.takes_inside, layout.gives_inside)

    # -- where units run ---------------------------------------------------------------------

    def _inside(self) -> None:
        layout = self.layout
        phases, count = layout.phases(self.splits_backward), layout.num_slices
        for unit in layout.body:
            name = piece_name(phases[unit.start], self.equations[unit.start].token_slice, count)
            self._put(name, "run", unit.start, unit.stop, unit.operands, unit.results, "each")
        for enter, leave in layout.carries.items():
            self._leave(leave, Slot("carry", self.equations[enter].results[0]))
        for leave in layout.stacks:
            self._leave(leave, Slot("each", self.equations[leave].results[0]))

    def _leave(self, leave: int, slot: Slot) -> None:
        """Return a carry or a stacked value from the piece that makes it."""
        atom = self.equations[leave].operands[0]
        first = piece_name("forward", 0, self.layout.num_slices)
        key = self.producer.get(atom, first) if isinstance(atom, int) else first
        read = (atom,) if isinstance(atom, int) else ()
        self._put(key, "exit", leave, leave, read, (), "each")
        self.makes[key][slot] = None

    def _outside(self) -> None:
        layout, start = self.layout, (0, 0)
        entered: dict[Level, list[int]] = {}
        for n in layout.enters:
            operand = self.equations[n].operands[0]
            level = self.levels.get(operand, start) if isinstance(operand, int) else start
            entered.setdefault(level, []).append(n)
        levels = self._latest()
        self._exits(min((level for level in levels if level[0]), default=(1, 0)))
        for unit, level in zip(layout.outside, levels, strict=True):
            self._put(level, "run", unit.start, unit.stop, unit.operands, unit.results, "once")
        for level, pieces in sorted(entered.items()):
            for n in pieces:
                operands = tuple(v for v in self.equations[n].operands if isinstance(v, int))
                self._put(level, "enter", n, n, operands, (), "once")
                self.makes[level][self.slot_of[self.equations[n].results[0]]] = None

    def _latest(self) -> list[Level]:
        """When each unit outside the loop runs: as early as possible, but after the loop if its results are only read
        there.

        Run earlier, its results would be live during the loop in addition to its operands, which are state and stay
        live.
        """
        layout, start = self.layout, (0, 0)
        soonest = [max([start, *(self.levels.get(v, start) for v in unit.operands)]) for unit in layout.outside]
        first_read: dict[int, Level] = {v: start for v in layout.trace.outputs if isinstance(v, int)}
        first_read.update({v: start for n in layout.enters for v in self.equations[n].operands if isinstance(v, int)})
        found: list[Level] = []
        for unit, level in zip(reversed(layout.outside), reversed(soonest), strict=True):
            wanted = min([first_read[v] for v in unit.results if v in first_read], default=start)
            level = max(level, wanted) if wanted[0] else level
            for value in unit.operands:
                first_read[value] = min(first_read.get(value, level), level)
            found.append(level)
        return found[::-1]

    def _exits(self, level: Level) -> None:
        """Take the carries and stacks out of the loop in the first piece after it."""
        self.steps.setdefault(level, [])
        self.reads.setdefault(level, {})
        self.makes.setdefault(level, {})
        for enter, leave in self.layout.carries.items():
            self._exit(level, leave, Slot("carry", self.equations[enter].results[0]))
        for leave in self.layout.stacks:
            self._exit(level, leave, Slot("each", self.equations[leave].results[0]))

    def _exit(self, level: Level, leave: int, slot: Slot) -> None:
        self._put(level, "exit", leave, leave, (), self.equations[leave].results, "once")
        self.reads[level][slot] = None

    def _put(
        self,
        key: Level | str,
        what: Literal["run", "enter", "exit"],
        start: int,
        stop: int,
        reads: Iterable[int],
        makes: Iterable[int],
        kind: SlotKind,
    ) -> None:
        self.steps.setdefault(key, []).append((what, start, stop))
        read, _ = self.reads.setdefault(key, {}), self.makes.setdefault(key, {})
        for value in reads:
            if self.producer.get(value) != key and value in self.slot_of:
                read[self.slot_of[value]] = None
        for value in makes:
            self.producer[value] = key
            self.slot_of[value] = Slot(kind, value)

    # -- what passes between pieces ----------------------------------------------------------

    def _wanted(self) -> set[Slot]:
        """Slots that other pieces or other stages read."""
        layout = self.layout
        wanted = {slot for reads in self.reads.values() for slot in reads}
        wanted.update(self.slot_of[v] for v in layout.gives_inside.values() if v in self.slot_of)
        return wanted

    def _piece(self, key: Level | str, wanted: set[Slot]) -> Piece:
        gives = dict(self.makes[key])
        gives.update(
            {slot: None for v, at in self.producer.items() if at == key and (slot := self.slot_of[v]) in wanted}
        )
        name = key if isinstance(key, str) else f"{'after' if key[0] else 'before'} {key[1]}"
        made = self.layout.trace.outputs
        outputs = tuple(i for i, v in enumerate(made) if isinstance(v, int) and self.producer.get(v) == key)
        return Piece(name, tuple(self.steps[key]), tuple(self.reads[key]), tuple(gives), outputs)
