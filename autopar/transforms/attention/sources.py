"""Follow the operands of matmuls back to their sources, and their results on to their last form.

In: `Sections`, and the equations inside a cone. Out: `Sources`. A kernel reads a source instead of an operand, and writes a last form
instead of a result: the transposes, casts and constant factors in between are parts of the kernel's call.
"""

from __future__ import annotations

from collections.abc import Collection

import jax.numpy as jnp
import numpy as np

from autopar.frontend.equations import Atom, LiteralOperand
from autopar.rules.table import traits_of
from autopar.transforms.attention.cones import is_smooth
from autopar.transforms.attention.masks import function_of
from autopar.transforms.attention.sections import Sections

#: A value, and the factor by which it is multiplied.
Multiple = tuple[int, float]


class Sources:
    """Sources of values outside a cone.

    Args:
        inside: the equations of the cone, in which no source is sought.
    """

    def __init__(self, sections: Sections, inside: Collection[int]) -> None:
        self.sections, self.equations, self.inside = sections, sections.trace.equations, inside

    def of(self, value: int) -> tuple[Multiple, ...]:
        """A value, and the values of which it is a transpose, a wider form or a multiple by a constant."""
        chain = [(value, 1.0)]
        while (n := self.sections.producer(chain[-1][0])) is not None and n not in self.inside:
            if self._is_transpose(n) or self._widens(n):
                chain.append((self.sections.reads(n)[0], chain[-1][1]))
            elif (found := self._multiple(n)) is not None:
                chain.append((found[1], found[0] * chain[-1][1]))
            else:
                break
        return tuple(chain)

    def _multiple(self, n: int) -> tuple[float, int] | None:
        """The constant factor of a product or a quotient, and the other operand."""
        if not traits_of(self.equations[n].primitive).scales:
            return None
        operands = self.equations[n].operands
        known = [(number, atom) for atom in operands if (number := self._constant(atom))]
        others = [atom for atom in operands if isinstance(atom, int) and self._constant(atom) is None]
        if len(operands) != 2 or len(known) != 1 or len(others) != 1:
            return None
        ((number, constant),) = known
        if traits_of(self.equations[n].primitive).linear == "first":  # a quotient
            if constant is not operands[1]:
                return None
            number = 1 / number
        return number, self.sections.origin(others[0])

    def _constant(self, atom: Atom) -> float | None:
        """The value of a scalar constant."""
        if isinstance(atom, LiteralOperand):
            return float(atom.value) if np.ndim(atom.value) == 0 else None
        n = self.sections.producer(atom)
        if n is None or self.sections.trace.avals[atom].shape or not is_smooth(self.equations[n]):
            return None
        numbers = [self._constant(one) for one in self.equations[n].operands]
        function = function_of(self.equations[n])
        if None in numbers or function is None:
            return None
        return float(function(np, self.equations[n].source.params, *numbers))

    def _widens(self, n: int) -> bool:
        """Whether an equation casts to a wider dtype, which changes no value."""
        if not traits_of(self.equations[n].primitive).casts or len(self.sections.reads(n)) != 1:
            return False
        values = (*self.sections.reads(n), *self.equations[n].results)
        dtypes = [self.sections.trace.avals[value].dtype for value in values]
        if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
            return False
        before, after = map(jnp.finfo, dtypes)
        return before.bits < after.bits and before.nexp <= after.nexp

    def last_forms(self, n: int) -> tuple[int, ...]:
        """The result of a matmul, and the transposes of it which alone are read."""
        trace, chain = self.sections.trace, list(self.equations[n].results)
        while not self.sections.is_output(chain[-1]):
            users = trace.users.get(chain[-1], [])
            is_here = len(users) == 1 and self.sections.section_of(users[0]) == self.sections.section_of(n)
            if not is_here or not self._is_transpose(users[0]):
                break
            chain += self.equations[users[0]].results
        return tuple(chain)

    def _is_transpose(self, n: int) -> bool:
        """Whether the result of an equation is a transpose of its operand."""
        traits, read = traits_of(self.equations[n].primitive), self.sections.reads(n)
        return (
            traits.one_to_one
            and len(read) == 1
            and (traits.permutes or traits.reshapes)
            and self._sizes(self.equations[n].results[0]) == self._sizes(read[0])
        )

    def _sizes(self, value: int) -> list[int]:
        """The sizes of a value's dims without those of size 1; in order, unless it is a transpose."""
        return sorted(size for size in self.sections.trace.avals[value].shape if size > 1)
