"""What is known of a primitive beside how it may be split.

In: nothing. Out: `Traits`; each family of rules has an entry for each of its primitives, and `table.TRAITS` has all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: `one`: in its only operand. `all`: in all together. `either`: in one of two, if the other is the same for all terms. `first`: in
#: the first, if the others are.
Linear = Literal["", "one", "all", "either", "first"]
#: `dims`: whole dims are combined. `position`: where an extreme stands. `running`: each element with those before it.
Reduces = Literal["", "dims", "position", "running"]
#: What is written into the first operand: a slice, rows at given places, a window of each result.
InPlace = Literal["", "slice", "scatter", "window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of one primitive. Those of a primitive that nobody knows are the defaults: they promise nothing.

    Args:
        view: the same memory under another shape or name.
        moves: it computes nothing, and its elements stand elsewhere.
        adds: the sum of two.
        one_to_one: linear, and each element of the result follows from one of the only operand.
        linear: in which operands: applied to terms, it gives the terms of what it makes of their sum.
        reduces, in_place: how, if it does.
        contraction: it multiplies matrices, in units of their own where the device has them.
        library: a kernel that nothing is fused with: of a library, a sort, a program of its own.
        opaque: it holds a program that was traced for one set of shapes, or that splits itself.
    """

    view: bool = False
    moves: bool = False
    adds: bool = False
    one_to_one: bool = False
    linear: Linear = ""
    reduces: Reduces = ""
    in_place: InPlace = ""
    contraction: bool = False
    library: bool = False
    opaque: bool = False


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
