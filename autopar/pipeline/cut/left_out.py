"""Know what a slice of tokens may leave out: the scores of later tokens.

In: an equation, what is known of its operands right of the diagonal, and what is known of masks.
Out: what is known of its result there. Masked scores are `low`; their exponentials are `zero`; zeros stay zero in products
and add nothing to sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from autopar.frontend.equations import Atom, Equation
from autopar.pipeline.cut.known_masks import KnownMasks, beyond_diagonal, in_each_row
from autopar.rules.positions import KEEP, ZERO_TO_ZERO
from autopar.rules.table import traits_of

#: What is known of all elements right of the diagonal. `low`: at most -1e4, with an element in each row that is not
#: masked; or minus infinity.
LeftOut = Literal["anything", "low", "zero"]
#: The dims of rows and of columns of an operand.
Sides = tuple[int, int]


class LeftOutRules:
    """Rules of what is left out."""

    def __init__(self, masks: KnownMasks) -> None:
        self.masks = masks

    def of(self, equation: Equation, states: Sequence[LeftOut | None], sides: Sequence[Sides | None]) -> LeftOut:
        """What is known of an equation's result.

        Args:
            states: of each operand; None for operands without columns.
            sides: the dims of rows and columns of each operand that has both.
        """
        name = equation.primitive
        known: list[LeftOut] = [self._state(equation, i, state, sides[i]) for i, state in enumerate(states)]
        if name == "select_n":
            return self._selected(equation, known, sides)
        if name in KEEP or traits_of(name).lays_out:
            return known[0]
        if name in ("exp", "exp2"):
            return "zero" if known[0] == "low" else "anything"
        if name in ("mul", "dot_general"):
            return "zero" if "zero" in known else "anything"
        if name in ("add", "add_any"):
            if "low" in known:
                return "low"
            return "zero" if all(one == "zero" for one in known) else "anything"
        if name == "sub":
            return "low" if known[0] == "low" else "zero" if known == ["zero", "zero"] else "anything"
        if name == "div" or name in ZERO_TO_ZERO:
            return "zero" if known[0] == "zero" else "anything"
        if name == "reduce_max":
            return known[0]
        return "anything"

    def is_mask(self, atom: Atom, sides: Sides | None = None) -> bool:
        """Whether something is known of a value; if sides are given, that it masks what is right of the diagonal.

        Args:
            sides: its dims of rows and of columns.
        """
        known = self.masks.of(atom)
        if known is None or sides is None:
            return known is not None
        return any(beyond_diagonal(one, *sides) for one in (known.false, known.low, known.bottom))

    def _state(self, equation: Equation, i: int, state: LeftOut | None, sides: Sides | None) -> LeftOut:
        """What is known of an operand: of one in slices by its state, of a whole one by its elements."""
        if state is not None:
            return state
        known = self.masks.of(equation.operands[i])
        if known is None:
            return "anything"
        if sides is None:
            return "zero" if known.false.size and bool(np.all(known.false)) else "anything"
        if beyond_diagonal(known.false, *sides):
            return "zero"
        if beyond_diagonal(known.bottom, *sides):
            return "low"
        return "low" if beyond_diagonal(known.low, *sides) and in_each_row(known.false, *sides) else "anything"

    def _selected(self, equation: Equation, states: Sequence[LeftOut], sides: Sequence[Sides | None]) -> LeftOut:
        if len(states) != 3:
            return "anything"
        mask = self.masks.of(equation.operands[0])
        here = sides[0]
        if mask is None or here is None:
            return states[1] if states[1] == states[2] else "anything"
        for chosen, sure, other in ((1, mask.false, mask.true), (2, mask.true, mask.false)):
            if beyond_diagonal(sure, *here):
                return self._chosen(equation, chosen, states[chosen], sides[chosen], in_each_row(other, *here))
        return states[1] if states[1] == states[2] else "anything"

    def _chosen(self, equation: Equation, i: int, state: LeftOut, sides: Sides | None, keeps: bool) -> LeftOut:
        """What a select takes right of the diagonal.

        Args:
            keeps: whether each row has an element that it surely takes from the other operand.
        """
        known = self.masks.of(equation.operands[i])
        if state != "anything" or known is None:
            return state
        if _everywhere(known.bottom) or (_everywhere(known.low) and keeps):
            return "low"
        if sides is not None and beyond_diagonal(known.low, *sides) and keeps:
            return "low"
        return "anything"


def _everywhere(array: np.ndarray) -> bool:
    return bool(np.all(array))
