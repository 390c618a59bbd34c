"""Build traces: number values, append and copy equations, write loops, eliminate dead code.

In: a trace, whose values keep their numbers.
Out: `TraceBuilder`, with which the front end and each trace transformation write equations, and `LoopBuilder`, with
which they write a loop. `TraceBuilder.finish` gives the new trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import jax

from autopar.frontend.equations import (
    Atom,
    Equation,
    Item,
    LiteralOperand,
    Nest,
    Piece,
    Substitution,
    equations_of,
    laid,
    substituted,
    without_dead,
)
from autopar.frontend.trace import Trace
from autopar.jax_interop import compat as jax_compat

_Item = TypeVar("_Item", bound=Item)
_Part = TypeVar("_Part")


class TraceBuilder:
    """Collects the equations of a new trace.

    Args:
        trace: the old trace. Its values keep their numbers, and its fields are the defaults of the new trace.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.avals, self.repeats = list(trace.avals), list(trace.repeats)
        self.constants = dict(trace.constants)
        #: The list that equations are appended to.
        self.items: list[Item] = []
        #: The origin of the equations appended next; None if they have none.
        self.origin: Any = None
        self._origins: dict[int, tuple[Equation, Any]] = {}  # by id; the equation is kept, so that no id is given twice
        self._traced: dict[tuple[Any, ...], Any] = {}

    # -- values ------------------------------------------------------------------------------

    def new(self, aval: Any, repeat: float = 1.0) -> int:
        """Number a new value that a step produces `repeat` times."""
        self.avals.append(aval)
        self.repeats.append(repeat)
        return len(self.avals) - 1

    def like(self, value: int, times: float = 1.0) -> int:
        """Number a new value with the type of another, produced `times` times as often."""
        return self.new(self.avals[value], self.repeats[value] * times)

    # -- equations ---------------------------------------------------------------------------

    def copy(
        self,
        equation: Equation,
        substitution: Substitution,
        *,
        types: Callable[[int], Any] | None = None,
        times: float = 1.0,
        **changes: Any,
    ) -> Equation:
        """A copy of an equation with other operands and new results. The caller appends it.

        Args:
            types: the type of each new result, by the old result; by default its own type.
            times: the factor on the number of executions.
            changes: changes to other fields.
        """
        copied = equation.reading(substitution, **{"repeat": equation.repeat * times} | changes)
        of = types or self.avals.__getitem__
        return replace(copied, results=tuple(self.new(of(v), self.repeats[v] * times) for v in equation.results))

    def copies(self, items: Iterable[_Item], env: dict[int, Atom], times: float = 1.0) -> list[_Item]:
        """Copies of equations and regions with new results.

        Args:
            env: the values that replace their operands. The new results are added to it.
        """
        return [self._copied(item, env, times) for item in items]

    def _copied(self, item: Any, env: dict[int, Atom], times: float) -> Any:
        if isinstance(item, Nest):
            enter = self.copies(item.enter, env, times)
            sections = [self.copies(section, env, times) for section in item.sections]
            return Nest(item.kind, item.source, enter, sections, self.copies(item.exit, env, times))
        new = self.copy(item, env, times=times)
        env.update(zip(item.results, new.results, strict=True))
        return new

    def add(self, *items: Item) -> None:
        """Append equations and regions."""
        self.items += items
        if self.origin is not None:
            for equation in (one for item in items for one in equations_of(item)):
                self.mark(equation, self.origin)

    def mark(self, equation: Equation, origin: Any) -> None:
        """Record the origin of an equation, for `origins_of`."""
        self._origins[id(equation)] = equation, origin

    @contextmanager
    def at(self, items: list[Item]) -> Iterator[list[Item]]:
        """A context in which equations are appended to another list."""
        outside, self.items = self.items, items
        try:
            yield items
        finally:
            self.items = outside

    def sections(self, parts: Iterable[_Part], write: Callable[[_Part], Any]) -> list[list[Item]]:
        """The sections of a region: the equations that `write` appends for each part."""
        found: list[list[Item]] = []
        for part in parts:
            with self.at([]) as items:
                write(part)
            found.append(items)
        return found

    def write(
        self,
        like: Equation,
        what: Any,
        atoms: Sequence[Atom],
        function: Callable[[list[Any]], Sequence[Any]],
        repeat: float | None = None,
    ) -> list[Atom]:
        """Append the equations of a function of arrays, with the name stack and source line of another equation.

        Args:
            repeat: the number of executions per step; by default that of the other equation.
            what: a key that distinguishes this function from others. A function is traced once per key, primitive of
                `like` and types of operands.

        Returns:
            The function's results.
        """
        values = [atom for atom in atoms if isinstance(atom, int)]
        avals = [self.avals[value] for value in values]
        literals = repr([atom for atom in atoms if isinstance(atom, LiteralOperand)])
        key = (what, like.source.primitive.name, repr(avals), literals, tuple(isinstance(a, int) for a in atoms))
        if key not in self._traced:
            self._traced[key] = jax_compat.staged(_of_arrays(function, atoms), avals)
        return self.inline(like, self._traced[key], values, repeat)

    def inline(self, like: Equation, jaxpr: Any, atoms: Sequence[Atom], repeat: float | None = None) -> list[Atom]:
        """Append the equations of a jaxpr like `write`, with calls inlined. Return its results."""
        repeat = like.repeat if repeat is None else repeat

        def append(source: Any, operands: Sequence[Atom]) -> Sequence[Atom]:
            called = jax_compat.called(source, operands)
            if called is not None:
                return self.inline(like, jax_compat.open_jaxpr(called[0])[0], called[1], repeat)
            results = tuple(self.new(var.aval, repeat) for var in source.outvars)
            placed = jax_compat.placed_as(source, like.source)
            made = replace(like, source=placed, operands=tuple(operands), results=results, repeat=repeat, piece=None)
            self.add(made)
            return results

        return inlined(jaxpr, dict(zip(jaxpr.invars, atoms, strict=True)), append)

    def name(self, made: Atom, value: int) -> None:
        """Renumber the result of the last appended equation to that of an old value."""
        last = self.items[-1]
        assert isinstance(last, Equation) and last.results == (made,)
        self.items[-1] = replace(last, results=(value,))

    # -- the trace ---------------------------------------------------------------------------

    def drop_dead(self, outputs: Iterable[Atom]) -> set[int]:
        """Eliminate dead equations. Equations with effects are kept.

        Returns:
            The live values.
        """
        live = {atom for atom in outputs if isinstance(atom, int)}
        self.items = without_dead(self.items, live)
        return live

    def finish(self, outputs: Sequence[Atom] | None = None, **changes: Any) -> Trace:
        """The new trace without dead code, verified.

        Args:
            outputs: the outputs; by default those of the old trace.
            changes: changes to other fields.
        """
        outputs = self.trace.outputs if outputs is None else tuple(outputs)
        live = self.drop_dead(outputs)
        equations, regions = laid(self.items)
        made = replace(
            self.trace,
            equations=equations,
            regions=regions,
            avals=tuple(self.avals),
            repeats=tuple(self.repeats),
            outputs=outputs,
            constants=tuple((value, constant) for value, constant in self.constants.items() if value in live),
            **changes,
        )
        _check(made)
        return made

    def origins_of(self, trace: Trace) -> list[Any]:
        """The origin of each equation of a finished trace; None if it has none."""
        return [self._origins.get(id(equation), (None, None))[1] for equation in trace.equations]


class LoopBuilder:
    """Collects a loop: its entering and leaving pieces, and its body.

    Args:
        source: JAX's equation of the `scan`.
    """

    def __init__(self, source: Any) -> None:
        self.source, self.trip_count = source, float(source.params["length"])
        self.given: list[Equation] = []
        self.carries: list[tuple[Equation, Equation]] = []
        self.stacks: list[Equation] = []
        self.body: list[Item] = []

    def give(self, like: Equation, piece: Piece, operand: Atom, inside: int) -> None:
        """Pass a value to the body: whole (`enter_const`) or one slice per iteration (`enter_slice`)."""
        repeat = self.trip_count if piece == "enter_slice" else 1.0
        self.given.append(piece_of(like, self.source, piece, operand, inside, repeat))

    def carry(self, like: Equation, start: Atom, inside: int, end: Atom, result: int) -> None:
        """Carry a value: `inside` at the start of an iteration, `end` at its end; `result` after the loop."""
        enter = piece_of(like, self.source, "enter_carry", start, inside)
        self.carries.append((enter, piece_of(like, self.source, "exit_carry", end, result)))

    def stack(self, like: Equation, made: Atom, result: int) -> None:
        """Stack an output of each iteration."""
        self.stacks.append(piece_of(like, self.source, "exit_stack", made, result, self.trip_count))

    def nest(self) -> Nest:
        """The finished loop, to append."""
        enter, leave = [one for one, _ in self.carries], [one for _, one in self.carries]
        return Nest("scan", self.source, self.given + enter, [self.body], leave + self.stacks)


def piece_of(like: Equation, source: Any, piece: Piece, operand: Atom, result: int, repeat: float = 1.0) -> Equation:
    """A piece of a region, with the name stack and source line of another equation.

    Args:
        source: JAX's equation of the region.
    """
    placed = jax_compat.placed_as(source, like.source)
    return replace(like, source=placed, operands=(operand,), results=(result,), repeat=repeat, piece=piece)


def inlined(jaxpr: Any, env: dict[Any, Atom], append: Callable[[Any, tuple[Atom, ...]], Sequence[Atom]]) -> list[Atom]:
    """Append the equations of a jaxpr one by one. Return its results.

    Args:
        env: the values of its variables, new for each call: JAX shares variables between calls of a cached jaxpr.
        append: appends JAX's equation with the given operands, and returns its results.
    """

    def read(atom: Any) -> Atom:
        return LiteralOperand(atom.val) if isinstance(atom, jax_compat.Literal) else env[atom]

    for source in jaxpr.eqns:
        env.update(zip(source.outvars, append(source, tuple(map(read, source.invars))), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def flat_border(inputs: Sequence[tuple[int, str]], outputs: Sequence[tuple[Atom, str]]) -> dict[str, Any]:
    """The fields of a trace whose arguments and results are single arrays, each with its path."""
    return {
        "inputs": tuple(value for value, _ in inputs),
        "input_paths": tuple(path for _, path in inputs),
        "in_tree": jax.tree.structure((0,) * len(inputs)),
        "outputs": tuple(atom for atom, _ in outputs),
        "output_paths": tuple(path for _, path in outputs),
        "out_tree": jax.tree.structure((0,) * len(outputs)),
    }


def renumbered(trace: Trace) -> Trace:
    """The trace with values numbered in production order, so that equal programs are equal traces."""
    order = dict.fromkeys((*trace.inputs, *dict(trace.constants)))
    order.update(dict.fromkeys(value for equation in trace.equations for value in equation.results))
    number = {value: i for i, value in enumerate(order)}
    return replace(
        trace,
        equations=tuple(e.reading(number, results=tuple(number[v] for v in e.results)) for e in trace.equations),
        avals=tuple(trace.avals[value] for value in order),
        repeats=tuple(trace.repeats[value] for value in order),
        inputs=tuple(number[value] for value in trace.inputs),
        outputs=substituted(trace.outputs, number),
        constants=tuple((number[value], constant) for value, constant in trace.constants),
    )


def _check(trace: Trace) -> None:
    """Assert that each value is produced once, before it is read."""
    known = {*trace.inputs, *dict(trace.constants)}
    for n, equation in enumerate(trace.equations):
        assert known.issuperset(equation.reads), f"equation {n} ({equation.primitive}) reads what is not made yet"
        assert known.isdisjoint(equation.results), f"equation {n} ({equation.primitive}) makes a value again"
        known.update(equation.results)
    assert all(atom in known for atom in trace.outputs if isinstance(atom, int)), "an output is never made"


def _of_arrays(function: Callable[[list[Any]], Sequence[Any]], atoms: Sequence[Atom]) -> Callable[..., Sequence[Any]]:
    """The function with its literal operands bound."""

    def of_arrays(*arrays: Any) -> Sequence[Any]:
        values = iter(arrays)
        return function([atom.value if isinstance(atom, LiteralOperand) else next(values) for atom in atoms])

    return of_arrays
