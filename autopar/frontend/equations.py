"""Represent a program as a flat list of equations and regions, and as nested items.

In: the output of `flat_jaxpr`.
Out: `Equation`s over numbered values, and `Region`s that mark loop bodies and branches. `items_of` and `laid` convert
between the two forms; `without_dead` eliminates dead code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autopar.ir.graph import Phase

#: The role of a value at the border of a region. Entering: `enter_const` is the same in every iteration, `enter_carry`
#: is the initial carry, `enter_slice` is one element of a stack per iteration, `enter_branch` is an operand of all
#: branches. Leaving: `exit_carry` is the carry after the last iteration, `exit_stack` stacks the outputs of all
#: iterations, `exit_branch` is the result of the branch taken. `index` selects a branch, `predicate` ends a loop;
#: `barrier` is one of several values that the compiler must produce together.
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
    """A scalar constant of the program."""

    value: Any


Atom = int | LiteralOperand
#: A replacement of values. A mapping keeps the values that it lacks.
Substitution = Mapping[int, Atom] | Callable[[int], Atom]


def substituted(atoms: Sequence[Atom], substitution: Substitution) -> tuple[Atom, ...]:
    """Operands, or a program's results, with replaced values."""
    of = substitution if callable(substitution) else lambda value: substitution.get(value, value)
    return tuple(of(atom) if isinstance(atom, int) else atom for atom in atoms)


#: The scope in which `jax.checkpoint` computes forward values again.
REMATERIALIZED = "rematted_computation"


@dataclass(frozen=True, slots=True)
class Equation:
    """One primitive application, or one piece of a region. Operands and results are positions in `Trace.avals`.

    Args:
        repeat: the number of executions per step.
        layer: the layer that it belongs to in a partitioned program; None if it belongs to every layer that reads it.
        token_slice: the slice of tokens with which it runs, in a program that is cut into such slices.
    """

    source: Any  # JAX's equation: primitive, parameters, context
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    name_stack: Any
    path: str
    phase: Phase
    repeat: float = 1.0
    piece: Piece | None = None
    layer: int | None = None
    token_slice: int = 0

    @property
    def primitive(self) -> str:
        return self.piece or self.source.primitive.name

    @property
    def stacks(self) -> bool:
        """Whether it is the piece of a loop that stacks the outputs of all iterations."""
        return self.piece == "exit_stack"

    @property
    def takes_slice(self) -> bool:
        """Whether it is the piece of a loop that takes one element of a stack in each iteration."""
        return self.piece == "enter_slice"

    @property
    def takes_constant(self) -> bool:
        """Whether it is the piece of a loop that takes the same value in each iteration."""
        return self.piece == "enter_const"

    @property
    def params_text(self) -> str:
        """Its parameters as text; equal parameters have equal texts."""
        return repr(sorted(self.source.params.items(), key=lambda item: item[0]))

    @property
    def reads(self) -> tuple[int, ...]:
        """The operands that are values rather than literals."""
        return tuple(v for v in self.operands if isinstance(v, int))

    @property
    def effects(self) -> bool:
        return bool(self.source.effects) and self.piece is None

    @property
    def is_rematerialized(self) -> bool:
        """Whether `jax.checkpoint`, or a plan, has it compute a forward value again; both mark the name stack."""
        return any(getattr(scope, "name", None) == REMATERIALIZED for scope in self.name_stack.stack)

    def reading(self, substitution: Substitution, **changes: Any) -> Equation:
        """A copy with replaced operands, and with `changes` to other fields."""
        return replace(self, operands=substituted(self.operands, substitution), **changes)


@dataclass(frozen=True, slots=True)
class Region:
    """The positions of the pieces and sections of a loop, a conditional or a barrier.

    Args:
        enter: [start, stop) of the entering pieces.
        sections: [start, stop) of each section: the body of a `scan`; condition and body of a `while`; the branches.
        exit: [start, stop) of the leaving pieces. The operand of a piece is from the last section, except that a
            `predicate`'s is from the first, and an `exit_branch` has one operand from each section.
    """

    kind: RegionKind
    source: Any
    enter: tuple[int, int]
    sections: tuple[tuple[int, int], ...]
    exit: tuple[int, int]

    def leaving(self, section: int, equations: Sequence[Equation]) -> Iterator[tuple[int, int]]:
        """The outputs of a section: the pieces that take them, and the operand's index.

        Args:
            equations: the list that contains the region.
        """
        for n in range(*self.exit):
            if equations[n].piece == "exit_branch":
                yield n, section
            elif section == (0 if equations[n].piece == "predicate" else len(self.sections) - 1):
                yield n, 0

    def carries(self, equations: Sequence[Equation]) -> tuple[tuple[int, int], ...]:
        """The entering and the leaving piece of each carry."""
        enters = (n for n in range(*self.enter) if equations[n].piece == "enter_carry")
        leaves = (n for n in range(*self.exit) if equations[n].piece == "exit_carry")
        return tuple(zip(enters, leaves, strict=True))


@dataclass(slots=True)
class Nest:
    """A region as a tree node, without positions, so that equations can be added and removed."""

    kind: RegionKind
    source: Any
    enter: list[Equation] = field(default_factory=list)
    sections: list[list[Equation | Nest]] = field(default_factory=list)
    exit: list[Equation] = field(default_factory=list)


Item = Equation | Nest


def equations_of(item: Item) -> Iterator[Equation]:
    """All equations of an item in order, including those of regions."""
    if isinstance(item, Equation):
        yield item
        return
    yield from item.enter
    for section in item.sections:
        for one in section:
            yield from equations_of(one)
    yield from item.exit


def without_dead(items: Sequence[Item], live: set[int]) -> list[Item]:
    """Eliminate dead items: keep those that are read or have an effect. `live` grows by the values that they read."""
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
    """A region without dead pieces, which neither later equations nor later iterations read; None if nothing is
    left."""
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
    while len(live) != before:  # a live carry makes live what the previous iteration reads for it
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
    """Flatten items to one list, with the positions of the regions."""
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
    """Append items to the list, and record the positions of their regions."""
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
