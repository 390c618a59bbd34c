"""Which operations commute with a sum: applied to terms, they give the terms of what they make of the sum.

In: an equation, and which of its operands are terms. Out: whether its result is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.frontend.equations import Equation, LiteralOperand
from autopar.rules.table import traits_of


def adds_up(equation: Equation, kinds: Sequence[str]) -> bool:
    """Whether terms of operands give terms of the result.

    Args:
        kinds: of each operand, `sum` for a term, `zero` for zeros, anything else for what is the same for all terms.
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
        values = 0, 1 if traits.in_place == "slice" else 2  # of a scatter, the indices are between
        return all(terms[i] if i in values else kind != "sum" for i, kind in enumerate(kinds))
    return False


def passes_zero(equation: Equation) -> bool:
    """Whether an operation makes zeros of zeros."""
    return traits_of(equation.primitive).linear in ("one", "all") or equation.piece is not None


def is_zero(literal: LiteralOperand) -> bool:
    """Whether a scalar of the program is nothing to a sum."""
    value = np.asarray(literal.value)
    return value.dtype != bool and value.size == 1 and not np.any(value)


def _keeps_sums(equation: Equation) -> bool:
    """A cast to integers or booleans is no linear operation."""
    if not traits_of(equation.primitive).casts:
        return True
    kinds = {np.dtype(source.aval.dtype).kind for source in (*equation.source.invars, *equation.source.outvars)}
    return kinds <= {"f", "V", "c"} or kinds <= {"i", "u"}
