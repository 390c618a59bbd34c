"""A trace whose cut dims are two dims.

In: `Trace`. Out: `Trace` of the same inputs, outputs and numbers. Where a value is wanted in the other form, a reshape
stands; it takes the name stack, the phase and the source line of what reads it, and a rewritten equation keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar import jax_compat
from autopar.factoring.choice import Factored, factored_loops
from autopar.factoring.rebuild import ELEMENTWISE, REBUILD, Form, shape_of
from autopar.graph.from_jaxpr import graph_of
from autopar.trace import Equation, LiteralOperand, Trace


def factor_dims(trace: Trace) -> Trace:
    """The trace with dims that are cut into equal parts seen as two, where this pays."""
    factored = factored_loops(graph_of(trace, ()), REBUILD.keys())
    return _Rewriting(trace, factored).run() if factored else trace


class _Rewriting:
    """Collects the new equations; the one mutable object of this module."""

    def __init__(self, trace: Trace, factored: Sequence[Factored]) -> None:
        self.trace = trace
        self.equations: list[Equation] = []
        self.avals = list(trace.avals)
        self.seen_at: dict[int, list[Factored]] = {}
        for one in factored:
            for n in one.nodes:
                self.seen_at.setdefault(n, []).append(one)
        self.form: dict[int, int] = {}  # value -> what is made in its place
        self.known: dict[tuple[int, tuple[int, ...]], int] = {}  # value and shape -> the value in that shape
        self.staged: dict[tuple[Any, ...], Any] = {}

    def run(self) -> Trace:
        """The whole trace anew."""
        for n, equation in enumerate(self.trace.equations):
            seen = self.seen_at.get(n)
            if seen:
                self._rebuild(equation, seen)
                continue
            operands = tuple(self._plain(atom, equation) for atom in equation.operands)
            self.equations.append(replace(equation, operands=operands))
        makers = {value: e for e in self.trace.equations for value in e.results}
        outputs = tuple(
            self._plain(atom, makers[atom]) if isinstance(atom, int) and atom in makers else atom
            for atom in self.trace.outputs
        )
        return replace(self.trace, equations=tuple(self.equations), avals=tuple(self.avals), outputs=outputs)

    def _plain(self, atom: int | LiteralOperand, reader: Equation) -> int | LiteralOperand:
        if not isinstance(atom, int) or atom not in self.form:
            return atom
        return self._value(atom, self.trace.avals[atom].shape, reader)

    def _value(self, value: int, shape: tuple[int, ...], reader: Equation) -> int:
        """A value in a shape, reshaped at its first reader that wants it so."""
        made = self.form.get(value, value)
        if self.avals[made].shape == shape:
            return made
        if (value, shape) not in self.known:
            equation = replace(reader, operands=(made,))
            (self.known[value, shape],) = self._emit(
                equation, "reshape", [shape], lambda values: [jax.lax.reshape(values[0], shape)]
            )
        return self.known[value, shape]

    def _rebuild(self, equation: Equation, seen: Sequence[Factored]) -> None:
        before = [self._form(atom, seen) for atom in equation.operands]
        after = [self._form(value, seen) for value in equation.results]
        if equation.primitive in ELEMENTWISE:
            before = [_broadcast_with(form, after[0]) for form in before]
        operands = [
            self._value(atom, shape_of(form), equation) if isinstance(atom, int) else atom
            for atom, form in zip(equation.operands, before, strict=True)
        ]
        source, rebuild = equation.source, REBUILD[equation.primitive]
        results = self._emit(
            replace(equation, operands=tuple(operands)),
            repr(sorted(source.params.items(), key=lambda item: item[0])),
            [*before, *after],
            lambda values: rebuild(source, values, before, after),
        )
        self.form.update(zip(equation.results, results, strict=True))

    def _form(self, atom: int | LiteralOperand, seen: Sequence[Factored]) -> Form:
        if not isinstance(atom, int):
            return ()
        sizes = [(size,) for size in self.trace.avals[atom].shape]
        found: list[tuple[int, ...]] = []
        for d, whole in enumerate(sizes):
            one = next((one for one in seen if (atom, d) in one.places), None)
            found.append(whole if one is None else (one.size // one.part, one.part))
        return tuple(found)

    def _emit(self, equation: Equation, what: str, forms: Sequence[Any], function: Any) -> list[int]:
        """Append what a function of an equation's operands does, under the equation's name; its results' numbers."""
        avals = [self.avals[atom] for atom in equation.operands if isinstance(atom, int)]
        literals = repr([atom for atom in equation.operands if isinstance(atom, LiteralOperand)])
        key = (equation.primitive, what, repr(forms), repr(avals), literals)
        if key not in self.staged:
            self.staged[key] = jax_compat.staged(_of_arrays(function, equation.operands), avals)
        program = self.staged[key]
        env: dict[Any, int] = dict(
            zip(program.invars, (atom for atom in equation.operands if isinstance(atom, int)), strict=True)
        )
        for source in program.eqns:
            operands = tuple(
                LiteralOperand(atom.val) if isinstance(atom, jax_compat.Literal) else env[atom]
                for atom in source.invars
            )
            results = []
            for var in source.outvars:
                self.avals.append(var.aval)
                env[var] = len(self.avals) - 1
                results.append(env[var])
            made = jax_compat.placed_as(source, equation.source)
            self.equations.append(replace(equation, source=made, operands=operands, results=tuple(results)))
        return [env[var] for var in program.outvars]


def _of_arrays(function: Any, operands: Sequence[int | LiteralOperand]) -> Any:
    """A function of all operands as one of those that are no literals."""

    def of_arrays(*arrays: Any) -> Any:
        values = iter(arrays)
        return function([atom.value if isinstance(atom, LiteralOperand) else next(values) for atom in operands])

    return of_arrays


def _broadcast_with(form: Form, result: Form) -> Form:
    """A dim of size 1 beside one that is seen as two is seen as two as well."""
    if len(form) != len(result):
        return form
    return tuple((1,) * len(two) if sizes == (1,) else sizes for sizes, two in zip(form, result, strict=True))
