"""The one builder of traces, for the front end and for all that rewrites a trace.

In: a trace, whose values keep their numbers. Out: `TraceBuilder`. It numbers new values, appends equations, writes new ones as
functions of arrays under the name and at the place of another equation, and finishes a trace: without what nothing reads,
its regions laid, and checked.
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
    """Writes a trace; mutable, as a list of equations is while it is made.

    Args:
        trace: what the new one has unless it is changed; its values come first.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.avals, self.repeats = list(trace.avals), list(trace.repeats)
        self.constants = dict(trace.constants)
        #: Where equations are appended.
        self.items: list[Item] = []
        #: What the equations that are appended stand for; None of what is new.
        self.origin: Any = None
        self._origins: dict[int, tuple[Equation, Any]] = {}  # by id; the equation is kept, so that no id is given twice
        self._traced: dict[tuple[Any, ...], Any] = {}

    # -- values ------------------------------------------------------------------------------

    def new(self, aval: Any, repeat: float = 1.0) -> int:
        """A new value, and how often a step makes it."""
        self.avals.append(aval)
        self.repeats.append(repeat)
        return len(self.avals) - 1

    def like(self, value: int, times: float = 1.0) -> int:
        """A new value of the type of another, made so many times as often."""
        return self.new(self.avals[value], self.repeats[value] * times)

    # -- equations ---------------------------------------------------------------------------

    def copy(
        self,
        equation: Equation,
        stands: Substitution,
        *,
        types: Callable[[int], Any] | None = None,
        times: float = 1.0,
        **changes: Any,
    ) -> Equation:
        """An equation of other operands that makes new values; it is for the caller to append.

        Args:
            types: of its results, by those of the equation; by default the same.
            times: how many times as often it runs.
            changes: of its other fields.
        """
        copied = equation.reading(stands, **{"repeat": equation.repeat * times} | changes)
        of = types or self.avals.__getitem__
        return replace(copied, results=tuple(self.new(of(v), self.repeats[v] * times) for v in equation.results))

    def copies(self, items: Iterable[_Item], env: dict[int, Atom], times: float = 1.0) -> list[_Item]:
        """Copies of items that read and make other values.

        Args:
            env: what stands for the values that they read, and then for those that they make.
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
        """Append equations, or regions as a whole."""
        self.items += items
        if self.origin is not None:
            for equation in (one for item in items for one in equations_of(item)):
                self.mark(equation, self.origin)

    def mark(self, equation: Equation, origin: Any) -> None:
        """Say what an equation stands for."""
        self._origins[id(equation)] = equation, origin

    @contextmanager
    def at(self, items: list[Item]) -> Iterator[list[Item]]:
        """While entered, equations are appended to another list."""
        outside, self.items = self.items, items
        try:
            yield items
        finally:
            self.items = outside

    def sections(self, parts: Iterable[_Part], write: Callable[[_Part], Any]) -> list[list[Item]]:
        """The sections of a region, each as it is written of its part."""
        found: list[list[Item]] = []
        for part in parts:
            with self.at([]) as items:
                write(part)
            found.append(items)
        return found

    def write(
        self, like: Equation, what: Any, atoms: Sequence[Atom], function: Callable[[list[Any]], Sequence[Any]]
    ) -> list[Atom]:
        """Append what a function of operands does, under an equation's name; traced once for each kind of operands.

        Args:
            what: tells this function from others of equations of the same primitive.

        Returns:
            what stands for its results.
        """
        values = [atom for atom in atoms if isinstance(atom, int)]
        avals = [self.avals[value] for value in values]
        literals = repr([atom for atom in atoms if isinstance(atom, LiteralOperand)])
        key = (what, like.source.primitive.name, repr(avals), literals, tuple(isinstance(a, int) for a in atoms))
        if key not in self._traced:
            self._traced[key] = jax_compat.staged(_of_arrays(function, atoms), avals)
        return self.inline(like, self._traced[key], values)

    def inline(self, like: Equation, jaxpr: Any, atoms: Sequence[Atom]) -> list[Atom]:
        """Append the equations of a jaxpr, and of what it calls, under an equation's name.

        Returns:
            what stands for its results.
        """

        def append(source: Any, operands: Sequence[Atom]) -> Sequence[Atom]:
            called = jax_compat.called(source, operands)
            if called is not None:
                return self.inline(like, jax_compat.open_jaxpr(called[0])[0], called[1])
            results = tuple(self.new(var.aval, like.repeat) for var in source.outvars)
            placed = jax_compat.placed_as(source, like.source)
            self.add(replace(like, source=placed, operands=tuple(operands), results=results, piece=None))
            return results

        return inlined(jaxpr, dict(zip(jaxpr.invars, atoms, strict=True)), append)

    def name(self, made: Atom, value: int) -> None:
        """Let what has been appended last make a value of the trace."""
        last = self.items[-1]
        assert isinstance(last, Equation) and last.results == (made,)
        self.items[-1] = replace(last, results=(value,))

    # -- the trace ---------------------------------------------------------------------------

    def drop_dead(self, outputs: Iterable[Atom]) -> set[int]:
        """Drop what nothing reads. An effect always stays.

        Returns:
            the values that are read.
        """
        live = {atom for atom in outputs if isinstance(atom, int)}
        self.items = without_dead(self.items, live)
        return live

    def finish(self, outputs: Sequence[Atom] | None = None, **changes: Any) -> Trace:
        """The trace: what has been appended, without what nothing reads.

        Args:
            outputs: by default those of the trace. changes: of its other fields.
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
        """Of each equation of a trace that has been finished, what it stands for."""
        return [self._origins.get(id(equation), (None, None))[1] for equation in trace.equations]


def piece_of(like: Equation, source: Any, piece: Piece, operand: Atom, result: int, repeat: float = 1.0) -> Equation:
    """A piece of a region, under the name and at the place of another equation.

    Args:
        source: JAX's equation that is the region.
    """
    placed = jax_compat.placed_as(source, like.source)
    return replace(like, source=placed, operands=(operand,), results=(result,), repeat=repeat, piece=piece)


def inlined(jaxpr: Any, env: dict[Any, Atom], append: Callable[[Any, tuple[Atom, ...]], Sequence[Atom]]) -> list[Atom]:
    """What stands for the results of a jaxpr, its equations appended one by one.

    Args:
        env: what stands for its variables. It is one call's own: JAX shares variables between calls of a cached jaxpr.
        append: of JAX's equation and its operands: what stands for its results.
    """

    def read(atom: Any) -> Atom:
        return LiteralOperand(atom.val) if isinstance(atom, jax_compat.Literal) else env[atom]

    for source in jaxpr.eqns:
        env.update(zip(source.outvars, append(source, tuple(map(read, source.invars))), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def flat_border(inputs: Sequence[tuple[int, str]], outputs: Sequence[tuple[Atom, str]]) -> dict[str, Any]:
    """The fields of a trace whose arguments and results, each with its path, are single arrays."""
    return {
        "inputs": tuple(value for value, _ in inputs),
        "input_paths": tuple(path for _, path in inputs),
        "in_tree": jax.tree.structure((0,) * len(inputs)),
        "outputs": tuple(atom for atom, _ in outputs),
        "output_paths": tuple(path for _, path in outputs),
        "out_tree": jax.tree.structure((0,) * len(outputs)),
    }


def renumbered(trace: Trace) -> Trace:
    """The trace with its values numbered in the order in which they are made: equal programs are equal traces then."""
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
    """Assert that each value is made once, before it is read."""
    known = {*trace.inputs, *dict(trace.constants)}
    for n, equation in enumerate(trace.equations):
        assert known.issuperset(equation.reads), f"equation {n} ({equation.primitive}) reads what is not made yet"
        assert known.isdisjoint(equation.results), f"equation {n} ({equation.primitive}) makes a value again"
        known.update(equation.results)
    assert all(atom in known for atom in trace.outputs if isinstance(atom, int)), "an output is never made"


def _of_arrays(function: Callable[[list[Any]], Sequence[Any]], atoms: Sequence[Atom]) -> Callable[..., Sequence[Any]]:
    """A function of all operands as one of those that are no literals."""

    def of_arrays(*arrays: Any) -> Sequence[Any]:
        values = iter(arrays)
        return function([atom.value if isinstance(atom, LiteralOperand) else next(values) for atom in atoms])

    return of_arrays
