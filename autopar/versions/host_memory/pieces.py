"""Cut a traced function into pieces by the parameters that it reads.

In: the trace of a function, which of its arguments are parameters, a budget of bytes. Out: `Pieces`: equations in their order, cut so
that the parameters of two neighbouring pieces fit the budget together: one piece runs while those of the next are copied. The order of
first use of each parameter is the access pattern, which GeePS (Cui et al. 2016) records in a first iteration; the trace has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import EffectError, OptionError
from autopar.jax_interop import compat as jax_compat


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant among the operands of an equation."""

    value: Any


@dataclass(frozen=True, slots=True)
class NumberedEquation:
    """An equation of JAX over numbered values."""

    source: Any
    operands: tuple[int | Literal, ...]
    results: tuple[int, ...]


@dataclass(slots=True)
class Piece:
    """Consecutive equations.

    Args:
        parameters: the arguments that it reads which are parameters, in the order of their first use.
        reads: other values that it reads and does not make.
        makes: its values that later pieces or the caller read.
        dies: values of earlier pieces that nobody reads after it.
        finishes: results of the function that it or an earlier piece makes, and no later one reads.
    """

    equations: list[NumberedEquation] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    dies: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A function in pieces.

    Args:
        inputs: the numbers of the arguments' leaves.
        outputs: of the results.
        constants: values by number.
    """

    pieces: tuple[Piece, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Literal, ...]
    constants: Mapping[int, Any]

    @property
    def first_uses(self) -> tuple[int, ...]:
        """The parameters in the order of their first use."""
        return tuple(dict.fromkeys(one for piece in self.pieces for one in piece.parameters))


def cut(closed: Any, num_bytes: Sequence[int | None], budget_bytes: int | None) -> Pieces:
    """The pieces of a traced function.

    Args:
        closed: its jaxpr.
        num_bytes: for each argument, its bytes if it is a parameter, else None.
        budget_bytes: for parameters on the device; None for twice those of the equation that reads most.

    Raises:
        OptionError: the parameters of one equation take more than half of the budget.
        EffectError: the function has ordered effects, which would not stay in their order.
    """
    flat = _Flat()
    jaxpr, constants = jax_compat.open_jaxpr(closed)
    inputs = [flat.new() for _ in jaxpr.invars]
    names: dict[Any, int | Literal] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, value in zip(jax_compat.constant_vars(jaxpr), constants, strict=True):
        names[var] = flat.constant(value)
    outputs = flat.add(jaxpr, names)
    size = {number: count for number, count in zip(inputs, num_bytes, strict=True) if count is not None}
    needs = [
        list(dict.fromkeys(one for one in equation.operands if isinstance(one, int) and one in size))
        for equation in flat.equations
    ]
    largest = max((sum(size[one] for one in need) for need in needs), default=0)
    if budget_bytes is None:
        budget_bytes = 2 * largest
    if largest > budget_bytes // 2:
        raise OptionError(
            f"`budget_bytes` is {budget_bytes}, but one operation reads parameters of {largest} bytes, and those of the next piece are"
            f" copied while it runs: give at least {2 * largest}"
        )
    pieces = [Piece()]
    for equation, need in zip(flat.equations, needs, strict=True):
        with_these = dict.fromkeys([*pieces[-1].parameters, *need])
        if pieces[-1].equations and need and sum(size[one] for one in with_these) > budget_bytes // 2:
            pieces.append(Piece())
            with_these = dict.fromkeys(need)
        pieces[-1].parameters = list(with_these)
        pieces[-1].equations.append(equation)
    _link(pieces, size, outputs)
    return Pieces(tuple(pieces), tuple(inputs), tuple(outputs), flat.constants)


def _link(pieces: Sequence[Piece], parameters: Mapping[int, int], outputs: Sequence[int | Literal]) -> None:
    """Fill in what pieces read, make and end."""
    kept = {one for one in outputs if isinstance(one, int)}
    last: dict[int, int] = {}
    made: list[set[int]] = []
    for number, piece in enumerate(pieces):
        made.append({value for equation in piece.equations for value in equation.results})
        for equation in piece.equations:
            last |= {one: number for one in equation.operands if isinstance(one, int)}
    for number, piece in enumerate(pieces):
        read = dict.fromkeys(one for equation in piece.equations for one in equation.operands if isinstance(one, int))
        piece.reads = [one for one in read if one not in made[number] and one not in parameters]
        piece.makes = [one for one in made[number] if one in kept or last.get(one, number) > number]
        piece.dies = [one for one in piece.reads if last[one] == number and one not in kept]
    producer = {one: number for number, own in enumerate(made) for one in own}
    for one in sorted(kept & producer.keys()):
        pieces[max(producer[one], last.get(one, 0))].finishes.append(one)


class _Flat:
    """The equations of a function with its calls inlined."""

    def __init__(self) -> None:
        self.equations: list[NumberedEquation] = []
        self.constants: dict[int, Any] = {}
        self._count = 0

    def new(self) -> int:
        self._count += 1
        return self._count - 1

    def constant(self, value: Any) -> int:
        number = self.new()
        self.constants[number] = value
        return number

    def add(self, jaxpr: Any, names: dict[Any, int | Literal]) -> list[int | Literal]:
        """Append the equations of a jaxpr; returns its results."""

        def read(atom: Any) -> int | Literal:
            return Literal(atom.val) if hasattr(atom, "val") else names[atom]

        for equation in jaxpr.eqns:
            if jax_compat.ordered_effects(equation):
                raise EffectError(
                    f"`{equation.primitive.name}` has an ordered effect, which the pieces of a function that streams its parameters"
                    " would not keep in order: move it out of the function"
                )
            operands = [read(atom) for atom in equation.invars]
            inner = jax_compat.called(equation, operands) if equation.primitive.name in jax_compat.INLINED else None
            if inner is not None:
                called, constants = jax_compat.open_jaxpr(inner[0])
                own: dict[Any, int | Literal] = dict(zip(called.invars, inner[1], strict=True))
                for var, value in zip(jax_compat.constant_vars(called), constants, strict=True):
                    own[var] = self.constant(value)
                names |= dict(zip(equation.outvars, self.add(called, own), strict=True))
                continue
            results = tuple(self.new() for _ in equation.outvars)
            names |= dict(zip(equation.outvars, results, strict=True))
            self.equations.append(NumberedEquation(equation, tuple(operands), results))
        return [read(atom) for atom in jaxpr.outvars]
