"""Find the equations between the matmuls of an attention.

In: `Sections`. Out: a `Cone` for each exponential whose operand comes from a matmul: the smooth equations around it, the matmuls
whose results they read (the scores, and in the backward pass the gradient of the probabilities), and the matmuls that read their
results (the output, and the gradients of queries, keys and values). A loop over layers has its cone in two sections: the body of
the forward and that of the backward loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.frontend.equations import Equation, LiteralOperand
from autopar.rules.smooth import REDUCTIONS, is_exponential, smooth_function
from autopar.rules.table import traits_of
from autopar.transforms.attention.sections import Sections

#: The largest number of equations of a cone. Attention has about 50.
_MOST = 300


@dataclass(frozen=True)
class Cone:
    """An attention: positions of equations, in order.

    Args:
        exponential: the exponential of the softmax.
        entries: matmuls whose results the cone reads.
        inside: the equations between the matmuls.
        exits: matmuls that read what the cone computes.
        leaves: the origins of the other values that the cone reads, such as masks.
    """

    exponential: int
    entries: tuple[int, ...]
    inside: tuple[int, ...]
    exits: tuple[int, ...]
    leaves: frozenset[int]

    @property
    def equations(self) -> tuple[int, ...]:
        """All its equations, in order."""
        return tuple(sorted({*self.entries, *self.inside, *self.exits}))


def find_cones(sections: Sections) -> Iterator[Cone]:
    """The cones of a trace, in the order of their exponentials; no equation is in two of them."""
    taken = set[int]()
    search = _Search(sections)
    for n, equation in enumerate(sections.trace.equations):
        if n in taken or not is_exponential(equation.primitive) or len(_shape(sections, equation)) < 2:
            continue
        cone = search.cone(n)
        if cone is not None and taken.isdisjoint(cone.equations):
            taken.update(cone.equations)
            yield cone


def is_smooth(equation: Equation) -> bool:
    """Whether an equation may be between the matmuls of an attention."""
    if equation.piece or equation.effects:
        return False
    literals = [one.value for one in equation.operands if isinstance(one, LiteralOperand)]
    traits = traits_of(equation.primitive)
    known = equation.primitive in REDUCTIONS or smooth_function(equation.primitive, literals) is not None
    return known or (traits.lays_out and bool(equation.operands))


def is_matmul(equation: Equation) -> bool:
    """Whether an equation is a plain matmul."""
    return traits_of(equation.primitive).contraction and "dimension_numbers" in equation.source.params


def _shape(sections: Sections, equation: Equation) -> tuple[int, ...]:
    return tuple(sections.trace.avals[equation.results[0]].shape)


class _Search:
    """Finds cones; it remembers which values come from a matmul."""

    def __init__(self, sections: Sections) -> None:
        self.sections, self.equations = sections, sections.trace.equations
        self._from_matmul: dict[int, bool] = {}

    def cone(self, exponential: int) -> Cone | None:
        """The cone around an exponential; None if something else reads what it computes."""
        if not any(map(self.from_matmul, self.sections.reads(exponential))):
            return None
        entries, inside, exits, leaves = set[int](), set[int](), set[int](), set[int]()
        pending = [exponential]
        while pending:
            n = pending.pop()
            if n in inside or n in entries:
                continue
            if is_matmul(self.equations[n]):
                entries.add(n)
            else:
                inside.add(n)
                for value in self.sections.reads(n):
                    made = self.sections.producer(value)
                    if made is not None and self.from_matmul(value):
                        pending.append(made)
                    else:
                        leaves.add(value)
            if len(inside) > _MOST:
                return None
            for user in self._users(n):
                if user is None:
                    return None
                if is_matmul(self.equations[user]):
                    exits.add(user)
                elif is_smooth(self.equations[user]):
                    pending.append(user)
                else:
                    return None
        if not exits or exits & entries:
            return None
        in_order = [tuple(sorted(part)) for part in (entries, inside, exits)]
        return Cone(exponential, in_order[0], in_order[1], in_order[2], frozenset(leaves))

    def _users(self, n: int) -> Iterator[int | None]:
        """The equations that read the results of an equation; None for an output of the step."""
        for result in self.equations[n].results:
            if self.sections.is_output(result):
                yield None
            yield from self.sections.users(result)

    def from_matmul(self, value: int) -> bool:
        """Whether a value comes from a matmul through smooth equations alone."""
        pending = [self.sections.origin(value)]
        while pending:
            one = pending[-1]
            if one in self._from_matmul:
                pending.pop()
                continue
            n = self.sections.producer(one)
            if n is None or not is_smooth(self.equations[n]):
                self._from_matmul[one] = n is not None and is_matmul(self.equations[n])
                pending.pop()
                continue
            unknown = [read for read in self.sections.reads(n) if read not in self._from_matmul]
            if unknown:
                pending += unknown
                continue
            self._from_matmul[one] = any(self._from_matmul[read] for read in self.sections.reads(n))
            pending.pop()
        return self._from_matmul[self.sections.origin(value)]
