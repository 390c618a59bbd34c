"""Read masks and biases as expressions of positions and of values of the step.

In: a value that a cone reads, with the names of its dims. Out: an expression. It is read from the result to its operands, because one
`iota` may be the positions of queries in one place and of keys in another. Computed from an expression, a mask is no larger than its
parts: nothing is broadcast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.frontend.equations import Atom, Equation, LiteralOperand
from autopar.rules.smooth import REDUCTIONS, mask_function, smooth_function
from autopar.rules.table import traits_of
from autopar.transforms.attention.named_dims import Dim, factors_of
from autopar.transforms.attention.sections import Sections

#: The number of rows of a mask that are compared with a causal mask, if it has more: the first, the last, and random ones.
_ROWS = 64
#: Literals in a causal mask. Any other number may treat some rows differently.
_PLAIN = (0, 1, -1)
_DEEPEST = 40


@dataclass(frozen=True, eq=False)
class Expression:
    """A value as a function of others.

    Args:
        names: the names of its dims; None for a dim of size 1.
        kind: `value` of the step; `iota`, the positions along one name; `literal`; or `function` of other expressions.
        origin: the value that it is.
        literal: the literal.
        equation: the equation of a function, whose operands are `operands`.
    """

    names: tuple[Dim | None, ...]
    kind: str
    origin: int = -1
    along: Dim | None = None
    literal: Any = None
    equation: Equation | None = None
    operands: tuple[Expression, ...] = ()

    @functools.cached_property
    def parts(self) -> tuple[Expression, ...]:
        """The values, positions and literals that it consists of."""
        if self.kind != "function":
            return (self,)
        return tuple(dict.fromkeys(part for operand in self.operands for part in operand.parts))

    @property
    def is_position(self) -> bool:
        """Whether it is a mask that depends on positions alone."""
        kinds = {part.kind for part in self.parts}
        return "iota" in kinds and "value" not in kinds and self.equation is not None and self.is_bool

    @property
    def is_bool(self) -> bool:
        """Whether it is a mask."""
        return self.equation is not None and self.equation.source.outvars[0].aval.dtype == bool

    def masks(self) -> Iterator[Expression]:
        """The largest masks of positions in it."""
        if self.is_position:
            yield self
        else:
            for operand in self.operands:
                yield from operand.masks()

    def computed(self, xp: Any, given: Callable[[Expression], Any]) -> Any:
        """Its array, with one axis for each name that is evaluated.

        Args:
            given: the array of a value, of positions, or of anything that is to be replaced; otherwise None.
        """
        known = given(self)
        if known is not None:
            return known
        if self.kind == "literal":
            return self.literal
        assert self.kind == "function" and self.equation is not None, self.kind
        operands = [operand.computed(xp, given) for operand in self.operands]
        traits = traits_of(self.equation.primitive)
        if traits.lays_out and not traits.elementwise:
            return operands[0]
        function = function_of(self.equation)
        assert function is not None
        return function(xp, self.equation.source.params, *operands)


def function_of(equation: Equation) -> Any:
    """The function that an equation applies to elements; None if it is unknown."""
    literals = [atom.value for atom in equation.operands if isinstance(atom, LiteralOperand)]
    return smooth_function(equation.primitive, literals) or mask_function(equation.primitive)


class ExpressionReader:
    """Reads expressions; equal ones are the same object.

    Args:
        through_masks: whether a bias that is computed from masks is read as a function of these.
    """

    def __init__(self, sections: Sections, *, through_masks: bool) -> None:
        self.sections, self.through_masks = sections, through_masks
        self.known: dict[tuple[int, tuple[Dim | None, ...]], Expression] = {}

    def read(self, value: int, names: tuple[Dim | None, ...], depth: int = _DEEPEST) -> Expression:
        """The expression of a value with names for its dims: constants as such, and what depends on positions down to these.
        What does not is read as a value."""
        origin = self.sections.origin(value)
        if (origin, names) not in self.known:
            made = self._made(origin, names, depth)
            kinds, avals = {part.kind for part in made.parts}, self.sections.trace.avals
            is_value = kinds - {"literal"} == {"value"}
            if self.through_masks and is_value and avals[origin].dtype != bool:
                is_value = any(part.kind == "value" and avals[part.origin].dtype != bool for part in made.parts)
            self.known[origin, names] = Expression(names, "value", origin) if is_value else made
        return self.known[origin, names]

    def _made(self, origin: int, names: tuple[Dim | None, ...], depth: int) -> Expression:
        value = Expression(names, "value", origin)
        n = self.sections.producer(origin)
        if n is None or depth == 0:
            return value
        equation = self.sections.trace.equations[n]
        if traits_of(equation.primitive).moves == "fixed" and not equation.operands:  # an iota
            return Expression(names, "iota", origin, along=names[equation.source.params["dimension"]])
        if equation.piece or equation.effects or equation.primitive in REDUCTIONS or not equation.operands:
            return value
        if function_of(equation) is None and not traits_of(equation.primitive).lays_out:
            return value
        operand_names = _names_of_operands(self.sections, equation, names)
        if operand_names is None:
            return value
        operands = tuple(
            self._operand(atom, of, depth) for atom, of in zip(equation.operands, operand_names, strict=True)
        )
        return Expression(names, "function", origin, equation=equation, operands=operands)

    def _operand(self, atom: Atom, names: tuple[Dim | None, ...], depth: int) -> Expression:
        if isinstance(atom, LiteralOperand):
            return Expression((), "literal", literal=atom.value)
        return self.read(atom, names, depth - 1)


def _names_of_operands(
    sections: Sections, equation: Equation, names: Sequence[Dim | None]
) -> list[tuple[Dim | None, ...]] | None:
    """The names of the operands' dims, from those of the result; None if an operand has others."""
    found = factors_of(sections, equation)
    if found is None:
        return None
    operands, (result,) = found
    named = {factor: name for factor, name in zip(result, names, strict=True) if factor is not None}
    if any(factor is not None and factor not in named for term in operands for factor in term):
        return None
    return [tuple(None if factor is None else named[factor] for factor in term) for term in operands]


def causal(mask: Expression, keys: Dim, size: Callable[[Dim], int]) -> tuple[Dim, bool] | None:
    """The dim of queries along which a mask of positions is causal, and whether it is true where a key may be read.

    Returns:
        None if it is not causal.
    """
    along = {part.along for part in mask.parts if part.kind == "iota"}
    literals = [part.literal for part in mask.parts if part.kind == "literal"]
    is_plain = all(np.ndim(value) == 0 and value in _PLAIN for value in literals)
    if len(along) != 2 or None in along or keys not in along or not is_plain:
        return None
    (queries,) = (name for name in along if name is not None and name != keys)
    rows, columns = _sample(size(queries))[:, None], np.arange(size(keys))[None, :]
    at: Mapping[Dim | None, Any] = {queries: rows, keys: columns}
    value = mask.computed(np, lambda part: at[part.along] if part.kind == "iota" else None)
    below = columns <= rows
    value = np.broadcast_to(value, below.shape)
    if (value == below).all():
        return queries, True
    return (queries, False) if (value == ~below).all() else None


def _sample(size: int) -> Any:
    if size <= _ROWS:
        return np.arange(size)
    at_random = np.random.default_rng(0).integers(size, size=_ROWS - 16)
    return np.unique(np.concatenate([np.arange(8), np.arange(size - 8, size), at_random]))
