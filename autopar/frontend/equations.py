"""A program as one list of equations, and as items: equations, and regions as a whole.

In: made by `flat_jaxpr`. Out: `Equation`s over numbered values, and `Region`s that say which of them are the body of a loop, or
a branch; `items_of` and `laid` turn one form into the other, and `without_dead` drops what nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autopar.ir.graph import Phase

#: What a value does at the border of a region. Going in: `enter_const` is the same in every trip, `enter_carry` what
#: the first trip starts with, `enter_slice` one element of a stack for each trip, `enter_branch` for all branches.
#: Coming out: `exit_carry` is what the last trip left, `exit_stack` what all trips made, `exit_branch` what the branch
#: taken made. `index` and `predicate` choose a branch and end a loop; `barrier` is one of several values that
#: the compiler must take to be made together.
Piece = Literal[
    "enter_const",
    "enter_carry",
    "enter_slice",
    "enter_branch",
    "exit_carry",
    "exit_stack",
    "exit_branch",
    "index",
    "predicate",
    "barrier",
]
RegionKind = Literal["scan", "while", "cond", "barrier"]


@dataclass(frozen=True, slots=True)
class LiteralOperand:
    """A scalar written into the program."""

    value: Any


Atom = int | LiteralOperand
#: What replaces a value. A mapping keeps the values that it lacks.
Substitution = Mapping[int, Atom] | Callable[[int], Atom]


def substituted(atoms: Sequence[Atom], substitution: Substitution) -> tuple[Atom, ...]:
    """Operands, or a program's results, with values replaced."""
    of = substitution if callable(substitution) else lambda value: substitution.get(value, value)
    return tuple(of(atom) if isinstance(atom, int) else atom for atom in atoms)


@dataclass(frozen=True, slots=True)
class Equation:
    """One primitive application, or one piece of a region; operands and results are positions in `Trace.avals`.

    Args:
        repeat: how often a step runs it.
        layer: where the program is cut into layers, the one that it belongs to; None of what belongs to each that
            reads it.
    """

    source: Any  # JAX's own equation: primitive, parameters, context
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    name_stack: Any
    path: str
    phase: Phase
    repeat: float = 1.0
    piece: Piece | None = None
    layer: int | None = None

    @property
    def primitive(self) -> str:
        return self.piece or self.source.primitive.name

    @property
    def params_text(self) -> str:
        """Its parameters as text, the same for equal ones."""
        return repr(sorted(self.source.params.items(), key=lambda item: item[0]))

    @property
    def reads(self) -> tuple[int, ...]:
        """The values among its operands."""
        return tuple(v for v in self.operands if isinstance(v, int))

    @property
    def effects(self) -> bool:
        return bool(self.source.effects) and self.piece is None

    def reading(self, substitution: Substitution, **changes: Any) -> Equation:
        """The equation with operands replaced, and `changes` to other fields."""
        return replace(self, operands=substituted(self.operands, substitution), **changes)


@dataclass(frozen=True, slots=True)
class Region:
    """Where the pieces and the sections of a loop, of branches or of a barrier stand in the list.

    Args:
        enter: [start, stop) of the pieces that go in.
        sections: [start, stop) of each: the body of a `scan`; condition and body of a `while`; the branches.
        exit: [start, stop) of the pieces that come out. The operand of one is of the last section, but a `predicate`'s
            of the first, and an `exit_branch` has one for each section.
    """

    kind: RegionKind
    source: Any
    enter: tuple[int, int]
    sections: tuple[tuple[int, int], ...]
    exit: tuple[int, int]

    def leaving(self, section: int, equations: Sequence[Equation]) -> Iterator[tuple[int, int]]:
        """What a section gives out: the pieces that take it, and which of their operands it is.

        Args:
            equations: the list that the region stands in.
        """
        for n in range(*self.exit):
            if equations[n].piece == "exit_branch":
                yield n, section
            elif section == (0 if equations[n].piece == "predicate" else len(self.sections) - 1):
                yield n, 0

    def carries(self, equations: Sequence[Equation]) -> tuple[tuple[int, int], ...]:
        """For each value that a loop carries, the pieces by which it enters and leaves."""
        enters = (n for n in range(*self.enter) if equations[n].piece == "enter_carry")
        leaves = (n for n in range(*self.exit) if equations[n].piece == "exit_carry")
        return tuple(zip(enters, leaves, strict=True))


@dataclass(slots=True)
class Nest:
    """A region as a whole, without a place in the list: so equations can be dropped from it, and added."""

    kind: RegionKind
    source: Any
    enter: list[Equation] = field(default_factory=list)
    sections: list[list[Equation | Nest]] = field(default_factory=list)
    exit: list[Equation] = field(default_factory=list)


Item = Equation | Nest


def equations_of(item: Item) -> Iterator[Equation]:
    """All equations of an item, those of regions too, in order."""
    if isinstance(item, Equation):
        yield item
        return
    yield from item.enter
    for section in item.sections:
        for one in section:
            yield from equations_of(one)
    yield from item.exit


def without_dead(items: Sequence[Item], live: set[int]) -> list[Item]:
    """What is read, or has an effect; `live` grows by all that these read."""
    kept: list[Item] = []
    for item in reversed(items):
        if isinstance(item, Equation):
            if item.effects or any(r in live for r in item.results):
                kept.append(item)
                live.update(item.reads)
        elif (nest := _living(item, live)) is not None:
            kept.append(nest)
    kept.reverse()
    return kept


def _living(nest: Nest, live: set[int]) -> Nest | None:
    """A region without the pieces that nothing reads: neither after it, nor in a later trip of it."""
    if nest.kind == "barrier":
        enter = [piece for piece in nest.enter if piece.results[0] in live]
        live.update(v for piece in enter for v in piece.reads)
        return Nest(nest.kind, nest.source, enter) if enter else None
    acts = nest.source.effects or any(equation.effects for equation in equations_of(nest))
    if not acts and not any(r in live for piece in nest.exit for r in piece.results):
        return None
    carries = [piece for piece in nest.enter if piece.piece == "enter_carry"]
    state_of = dict(zip(_carried_out(nest), carries, strict=True))
    before = -1
    sections = nest.sections
    exits: list[Equation] = []
    while len(live) != before:  # a value carried on makes live what the trip before it reads
        before = len(live)
        exits = [
            piece
            for piece in nest.exit
            if piece.piece == "predicate"
            or piece.results[0] in live
            or (id(piece) in state_of and state_of[id(piece)].results[0] in live)
        ]
        live.update(v for piece in exits for v in piece.reads)
        sections = [without_dead(section, live) for section in reversed(nest.sections)][::-1]
    kept = {id(piece) for piece in exits}
    needed = {id(enter) for out, enter in state_of.items() if out in kept}
    enter = [p for p in nest.enter if id(p) in needed or not p.results or p.results[0] in live]
    live.update(v for piece in enter for v in piece.reads)
    return Nest(nest.kind, nest.source, enter, sections, exits)


def _carried_out(nest: Nest) -> Iterator[int]:
    return (id(piece) for piece in nest.exit if piece.piece == "exit_carry")


def laid(items: Sequence[Item]) -> tuple[tuple[Equation, ...], tuple[Region, ...]]:
    """Items as one list, and where the regions among them stand."""
    equations: list[Equation] = []
    regions: list[Region] = []
    _lay(items, equations, regions)
    return tuple(equations), tuple(regions)


def items_of(equations: Sequence[Equation], regions: Sequence[Region]) -> list[Item]:
    """The inverse of `laid`."""
    starts = {region.enter[0]: region for region in regions}

    def between(start: int, stop: int) -> list[Item]:
        items: list[Item] = []
        n = start
        while n < stop:
            region = starts.get(n)
            if region is None:
                items.append(equations[n])
                n += 1
                continue
            enter, leave = list(equations[slice(*region.enter)]), list(equations[slice(*region.exit)])
            sections = [between(*span) for span in region.sections]
            items.append(Nest(region.kind, region.source, enter, sections, leave))
            n = region.exit[1]
        return items

    return between(0, len(equations))


def _lay(items: Sequence[Item], equations: list[Equation], regions: list[Region]) -> None:
    """Write items one after another, and where the regions among them stand."""
    for item in items:
        if isinstance(item, Equation):
            equations.append(item)
            continue
        start = len(equations)
        equations += item.enter
        entered = len(equations)
        sections: list[tuple[int, int]] = []
        for section in item.sections:
            begun = len(equations)
            _lay(section, equations, regions)
            sections.append((begun, len(equations)))
        left = len(equations)
        equations += item.exit
        regions.append(Region(item.kind, item.source, (start, entered), tuple(sections), (left, len(equations))))
