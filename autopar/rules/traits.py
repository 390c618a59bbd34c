"""Declare what is known of a primitive besides its sharding rule.

In: nothing. Out: `Traits`; each family of rules has an entry for each of its primitives, and `table.TRAITS` has all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: `one`: in its only operand. `all`: in all together. `either`: in one of two, if the other is the same for all terms. `first`: in
#: the first, if the others are. `cases`: in all but the first, which chooses, together. `written`: in what is written in place, and
#: in what it is written into, together.
Linear = Literal["", "one", "all", "either", "first", "cases", "written"]
#: Its elements stand elsewhere, and nothing is computed but where: at fixed places, or where an operand says.
Moves = Literal["", "fixed", "indexed"]
#: `dims`: whole dims are combined. `position`: where an extreme stands. `running`: each element with those before it.
Reduces = Literal["", "dims", "position", "running"]
#: What is written into the first operand: a slice, rows at given places, a window of each result.
InPlace = Literal["", "slice", "scatter", "window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of one primitive. Those of a primitive that nobody knows are the defaults: they promise nothing.

    Args:
        view: the same memory under another shape or name.
        elementwise: each element of the result follows from those at its place, whatever the shape, by the same parameters.
        moves, reduces, in_place: how, if it does.
        casts: the same elements in another dtype.
        reshapes: dims split or merged, in order.
        permutes: the dims in the order that its parameter `permutation` says.
        uniform: along a loop that no operand has, the result is everywhere the same.
        adds: the sum of two.
        scales: one operand times what the other says, or negated.
        one_to_one: linear, and each element of the result follows from one of the only operand.
        linear: in which operands: applied to terms, it gives the terms of what it makes of their sum.
        terms: run on a part of what it reduces, it gives a term of the result.
        independent: a loop that its rule calls manual is one of independent problems.
        contraction: it multiplies matrices, in units of their own where the device has them.
        library: a kernel that nothing is fused with: of a library, a sort, a program of its own.
        held: a loop holds what it takes as long as it runs.
        opaque: it holds a program that was traced for one set of shapes, or that splits itself.
    """

    view: bool = False
    elementwise: bool = False
    moves: Moves = ""
    casts: bool = False
    reshapes: bool = False
    permutes: bool = False
    uniform: bool = False
    adds: bool = False
    scales: bool = False
    one_to_one: bool = False
    linear: Linear = ""
    terms: bool = False
    independent: bool = False
    reduces: Reduces = ""
    in_place: InPlace = ""
    contraction: bool = False
    library: bool = False
    held: bool = False
    opaque: bool = False

    @property
    def lays_out(self) -> bool:
        """Whether every element of its operand is in its result as it was, but for its place, dtype and number."""
        return (self.one_to_one or self.uniform) and bool(self.view or self.moves or self.casts)

    @property
    def scatters_sum(self) -> bool:
        """Whether it adds to places of what it is written into."""
        return self.in_place == "scatter" and self.linear == "written"

    @property
    def joins(self) -> bool:
        """Whether its operands are parts of its result."""
        return bool(self.moves) and self.linear == "all"


#: Of what is no more than a loop over elements.
PLAIN = Traits()


def with_traits(names: Iterable[str], special: dict[str, Traits]) -> dict[str, Traits]:
    """A family's table.

    Args:
        names: of its primitives. special: those that are more than a loop over elements.
    """
    table = dict.fromkeys(names, PLAIN)
    assert special.keys() <= table.keys(), sorted(special.keys() - table.keys())
    return table | special
