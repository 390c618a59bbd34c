"""Values that a loop carries and only adds to, from zeros on: gradients that are accumulated, for example.

In: equations and a loop's pieces. Out: the carries that are such sums. A sum that is pending over devices may stay so
from trip to trip, and be taken once, after the loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from autopar.frontend.equations import Equation, LiteralOperand, Region
from autopar.rules.table import traits_of


class Sums:
    """Reads of each value, and who makes it."""

    def __init__(self, equations: Sequence[Equation]) -> None:
        self.equations = equations
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.maker: dict[int, int] = {}
        for n, equation in enumerate(equations):
            for value in equation.results:
                self.maker[value] = n
            for atom in equation.operands:
                if isinstance(atom, int):
                    self.readers[atom].append(n)

    def of(self, region: Region, carries: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Of a loop's carries, as the pieces that they enter and leave by, those that are sums from zero."""
        return tuple(pair for pair in carries if self._is_sum(*pair))

    def _is_sum(self, enter: int, leave: int) -> bool:
        (start,), (last,) = self.equations[enter].operands, self.equations[leave].operands
        (carried,) = self.equations[enter].results
        if not self._is_zero(start) or not isinstance(last, int) or last not in self.maker:
            return False
        added = self.equations[self.maker[last]]
        reads_once = self.readers[carried] == [self.maker[last]] and self.readers[last] == [leave]
        return traits_of(added.primitive).adds and reads_once and carried in added.operands

    def _is_zero(self, atom: int | LiteralOperand) -> bool:
        if isinstance(atom, LiteralOperand):
            value = np.asarray(atom.value)
            return value.size == 1 and not np.any(value)
        maker = self.equations[self.maker[atom]] if atom in self.maker else None
        return maker is not None and traits_of(maker.primitive).linear == "one" and self._is_zero(maker.operands[0])
