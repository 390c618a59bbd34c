"""New equations, written as functions of arrays.

In: a trace, whose values they read. Out: `Writer`, which traces a function once for each kind of operands and writes its
equations wherever it is asked to, under the name and the place of another equation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.frontend.equations import Equation, LiteralOperand
from autopar.frontend.trace import Trace
from autopar.jax_interop import compat as jax_compat

Atom = int | LiteralOperand


class Writer:
    """Numbers new values and writes equations of them; mutable, as a list of equations is while it is made.

    Args:
        trace: whose values come first.
    """

    def __init__(self, trace: Trace) -> None:
        self.avals, self.repeats = list(trace.avals), list(trace.repeats)
        self._staged: dict[tuple[Any, ...], Any] = {}

    def new(self, aval: Any, repeat: float) -> int:
        """A value more, and how often a step makes it."""
        self.avals.append(aval)
        self.repeats.append(repeat)
        return len(self.avals) - 1

    def write(
        self,
        to: list[Any],
        equation: Equation,
        what: Any,
        atoms: Sequence[Atom],
        function: Callable[[list[Any]], Sequence[Any]],
    ) -> list[Atom]:
        """Write what a function of operands does, under an equation's name.

        Args:
            to: the list to add to.
            what: tells this function from others of equations of the same primitive.

        Returns:
            what stands for its results.
        """
        values = [atom for atom in atoms if isinstance(atom, int)]
        avals = [self.avals[value] for value in values]
        literals = repr([atom for atom in atoms if isinstance(atom, LiteralOperand)])
        key = (what, equation.source.primitive.name, repr(avals), literals, tuple(isinstance(a, int) for a in atoms))
        if key not in self._staged:
            self._staged[key] = jax_compat.staged(_of_arrays(function, atoms), avals)
        program = self._staged[key]
        env: dict[Any, Atom] = dict(zip(program.invars, values, strict=True))

        def read(atom: Any) -> Atom:
            return LiteralOperand(atom.val) if isinstance(atom, jax_compat.Literal) else env[atom]

        for source in program.eqns:
            operands = tuple(map(read, source.invars))
            results = tuple(self.new(var.aval, equation.repeat) for var in source.outvars)
            env.update(zip(source.outvars, results, strict=True))
            placed = jax_compat.placed_as(source, equation.source)
            to.append(replace(equation, source=placed, operands=operands, results=results, piece=None))
        return [read(var) for var in program.outvars]


def _of_arrays(function: Callable[[list[Any]], Sequence[Any]], atoms: Sequence[Atom]) -> Callable[..., Sequence[Any]]:
    """A function of all operands as one of those that are no literals."""

    def of_arrays(*arrays: Any) -> Sequence[Any]:
        values = iter(arrays)
        return function([atom.value if isinstance(atom, LiteralOperand) else next(values) for atom in atoms])

    return of_arrays
