"""Declare the properties of a primitive other than its sharding rule.

In: nothing. Out: `Traits`. Each family of rules has an entry for each of its primitives; `table.TRAITS` has all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: In which operands a primitive is linear. `one`: its only operand. `all`: all operands jointly. `either`: one of two, if
#: the other is the same for all terms. `first`: the first, if the others are the same for all terms. `cases`: all but the
#: first, the selector, jointly. `written`: the operand that is written into and the updates, jointly.
Linear = Literal["", "one", "all", "either", "first", "cases", "written"]
#: Elements change their position and nothing else: to `fixed` positions, or to those that an operand holds (`indexed`).
Moves = Literal["", "fixed", "indexed"]
#: `dims`: reduces whole dims. `position`: gives the position of an extreme. `running`: combines each element with all
#: before it.
Reduces = Literal["", "dims", "position", "running"]
#: What is written into the first operand: a slice, rows at given indices, or a window for each update.
InPlace = Literal["", "slice", "scatter", "window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of one primitive. The defaults promise nothing; an unknown primitive has them.

    Args:
        view: its result is the same memory under another shape or name.
        elementwise: each element of the result depends on the elements at its position only. The same parameters are
            valid for any shape.
        moves, reduces, in_place: how it moves, reduces or writes in place, if it does.
        casts: its result has the same elements in another dtype.
        reshapes: it splits or merges dims, in order.
        permutes: its parameter `permutation` gives the order of the result's dims.
        uniform: the result is constant along each loop that no operand has.
        adds: it is the sum of two operands.
        accumulates: it combines two operands in any order and grouping, up to rounding, as a sum or a maximum does.
        scales: it multiplies or divides one operand by another, or negates it.
        one_to_one: it is linear, and each element of the result depends on one element of its only operand.
        linear: the operands in which it is linear: applied to the terms of a sum, it gives the terms of its result for
            the sum.
        terms: applied to a part of the dim that it reduces, it gives a term of the result.
        independent: its manual loops are loops over independent problems.
        contraction: it is a matmul, which runs on matrix units where the device has them.
        library: it is a kernel that XLA fuses with nothing: a library call, a sort, or a program of its own.
        held: a loop keeps its operand in memory as long as it runs.
        partitioned: JAX has its own partitioning of it, which refuses some shardings. It always runs as a manual region.
        constrains: it says only how its operand is sharded.
        opaque: it holds a program that was traced for one set of shapes or that is sharded by itself.
    """

    view: bool = False
    elementwise: bool = False
    moves: Moves = ""
    casts: bool = False
    reshapes: bool = False
    permutes: bool = False
    uniform: bool = False
    adds: bool = False
    accumulates: bool = False
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
    partitioned: bool = False
    constrains: bool = False
    opaque: bool = False

    @property
    def lays_out(self) -> bool:
        """Whether its result has every element of its operand unchanged but for position, dtype and number of
        copies."""
        return (self.one_to_one or self.uniform) and bool(self.view or self.moves or self.casts)

    @property
    def scatters_sum(self) -> bool:
        """Whether it adds updates to elements of its first operand."""
        return self.in_place == "scatter" and self.linear == "written"

    @property
    def joins(self) -> bool:
        """Whether it assembles its result from its operands, as a concatenation does."""
        return bool(self.moves) and self.linear == "all"


#: Traits of a plain loop over elements.
PLAIN = Traits()


def with_traits(names: Iterable[str], special: dict[str, Traits]) -> dict[str, Traits]:
    """The table of traits of one family.

    Args:
        names: the family's primitives.
        special: the traits of those that are not plain loops over elements.
    """
    table = dict.fromkeys(names, PLAIN)
    assert special.keys() <= table.keys(), sorted(special.keys() - table.keys())
    return table | special
