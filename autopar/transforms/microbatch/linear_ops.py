"""Say which operations commute with a sum: applied to its terms, they give terms whose sum is their result.

In: an equation, and which of its operands are terms of sums. Out: whether its result is such a term.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.frontend.equations import Equation, LiteralOperand
from autopar.rules.table import traits_of


def adds_up(equation: Equation, kinds: Sequence[str]) -> bool:
    """Whether an operation turns partial sums into partial sums.

    Args:
        kinds: the kind of each operand: `sum` for a partial sum, `zero` for zeros, any other for a value that all terms
            share.
    """
    traits, linear = traits_of(equation.primitive), traits_of(equation.primitive).linear
    terms = [kind in ("sum", "zero") for kind in kinds]
    if any(kind not in ("sum", "zero", "same") for kind in kinds):
        return False
    if linear == "one":
        return _keeps_sums(equation)
    if linear == "all":
        return all(terms)
    if linear == "either":
        return [kind == "sum" for kind in kinds].count(True) == 1
    if linear == "first":
        return kinds[0] == "sum" and "sum" not in kinds[1:]
    if linear == "cases":
        return all(terms[1:]) and kinds[0] != "sum"
    if linear == "written":
        values = 0, 1 if traits.in_place == "slice" else 2  # a scatter has its indices between the two
        return all(terms[i] if i in values else kind != "sum" for i, kind in enumerate(kinds))
    return False


def passes_zero(equation: Equation) -> bool:
    """Whether an operation returns zeros if all its operands are zeros."""
    return traits_of(equation.primitive).linear in ("one", "all") or equation.piece is not None


def is_zero(literal: LiteralOperand) -> bool:
    """Whether a scalar literal adds nothing to a sum."""
    value = np.asarray(literal.value)
    return value.dtype != bool and value.size == 1 and not np.any(value)


def _keeps_sums(equation: Equation) -> bool:
    """Whether a cast is linear; a cast to integers or booleans is not."""
    if not traits_of(equation.primitive).casts:
        return True
    kinds = {np.dtype(source.aval.dtype).kind for source in (*equation.source.invars, *equation.source.outvars)}
    return kinds <= {"f", "V", "c"} or kinds <= {"i", "u"}
