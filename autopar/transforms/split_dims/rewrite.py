"""Rewrite a trace so that dims cut into equal parts become two dims.

In: `Trace`, and its graph. Out: `Trace` with the same inputs, outputs and results. A reshape is inserted where a value
is read in its other form. The reshape has the name stack, phase and source line of its first user; a rewritten equation
keeps its own. Values enter and leave loops and branches in the program's form.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.frontend.equations import Atom, Equation, Nest, Region, equations_of, substituted
from autopar.frontend.trace import Rewritten, Trace
from autopar.frontend.trace_builder import TraceBuilder
from autopar.ir.graph import Graph
from autopar.transforms.split_dims.choice import Factored, factored_loops
from autopar.transforms.split_dims.rebuild import ELEMENTWISE, REBUILD, Form, shape_of


def factor_dims(trace: Trace, graph: Graph) -> Trace:
    """The trace with dims that are cut into equal parts as two dims, where this pays; otherwise the same trace.

    Args:
        graph: graph of the trace.
    """
    factored = factored_loops(graph, REBUILD.keys())
    return _Rewriting(trace, factored).run() if factored else trace


class _Rewriting:
    """Rewrites the equations; the one mutable object of this module."""

    def __init__(self, trace: Trace, factored: Sequence[Factored]) -> None:
        self.trace, self.builder = trace, TraceBuilder(trace)
        self.seen_at: dict[int, list[Factored]] = {}
        self.loops_of: dict[int, list[Factored]] = defaultdict(list)  # value -> the loops among its dims
        for one in factored:
            for value in {value for value, _ in one.places}:
                self.loops_of[value].append(one)
            for n in one.nodes:
                self.seen_at.setdefault(n, []).append(one)
        self.form: dict[int, int] = {}  # value -> its replacement
        #: Value and shape -> the value in that shape, if it is available here.
        self.known: dict[tuple[int, tuple[int, ...]], int] = {}
        self.pairs: dict[int, set[tuple[int, int]]] = defaultdict(set)  # loop -> positions of its two dims
        #: For each rewritten equation: the original, its operand shapes, and the loops that it sees as two dims.
        self.rebuilt: list[tuple[Any, Any, Sequence[Factored]]] = []

    def run(self) -> Trace:
        """Rewrite the whole trace."""
        self._span(0, len(self.trace.equations))
        at, equations = self.trace.producers, self.trace.equations
        outputs = substituted(self.trace.outputs, lambda v: self._plain(v, equations[at[v]]) if v in at else v)
        made = self.builder.finish(outputs)
        return replace(made, rewritten=tuple(self._rewritten(self.builder.origins_of(made))))

    def _rewritten(self, origins: Sequence[Any]) -> Iterator[Rewritten]:
        for begun, equations in itertools.groupby(range(len(origins)), key=origins.__getitem__):
            if begun is not None:
                source, shapes, seen = self.rebuilt[begun]
                pairs = frozenset(pair for one in seen for pair in self.pairs[id(one)])
                start, *others = equations
                yield Rewritten(start, start + 1 + len(others), source, shapes, pairs)

    def _span(self, start: int, stop: int) -> None:
        for n, _, region in self.trace.walk(start, stop):
            equation, seen = self.trace.equations[n], self.seen_at.get(n)
            if region is not None:
                self._region(region)
            elif seen:
                self._rebuild(equation, seen)
            else:
                self.builder.add(self._as_it_was(equation))

    def _region(self, region: Region) -> None:
        """Rewrite a loop or branches. A reshape made in a section is available in that section only."""
        pieces, outside = self.trace.equations, self.known
        enter = [self._as_it_was(pieces[n]) for n in range(*region.enter)]
        leaving = {n: list(pieces[n].operands) for n in range(*region.exit)}

        def write(section: int) -> None:
            self.known = dict(outside)
            self._span(*region.sections[section])
            for n, i in region.leaving(section, pieces):
                leaving[n][i] = self._plain(leaving[n][i], pieces[n])

        sections = self.builder.sections(range(len(region.sections)), write)
        self.known = outside
        left = [replace(pieces[n], operands=tuple(operands)) for n, operands in leaving.items()]
        self.builder.add(Nest(region.kind, region.source, enter, sections, left))

    def _as_it_was(self, equation: Equation) -> Equation:
        return equation.reading(lambda value: self._plain(value, equation))

    def _plain(self, atom: Atom, reader: Equation) -> Atom:
        """The replacement of a value, in the program's shape."""
        if not isinstance(atom, int) or atom not in self.form:
            return atom
        return self._value(atom, self.trace.avals[atom].shape, reader)

    def _value(self, value: int, shape: tuple[int, ...], reader: Equation) -> int:
        """A value in a shape; the first user in this form adds the reshape."""
        made = self.form.get(value, value)
        if self.builder.avals[made].shape == shape:
            return made
        if (value, shape) not in self.known:
            # The user may be a loop's piece, which joins two bodies: the reshape runs as often as the operand.
            equation = replace(reader, operands=(made,), repeat=self.trace.repeats[value])
            written, (self.known[value, shape],) = self._emit(
                equation, "reshape", [shape], lambda values: [jax.lax.reshape(values[0], shape)]
            )
            self._note(written, None, (None,), self.loops_of[value])
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
        made, results = self._emit(
            replace(equation, operands=tuple(operands)),
            equation.params_text,
            [*before, *after],
            lambda values: rebuild(source, values, before, after),
        )
        self.form.update(zip(equation.results, results, strict=True))
        was, now = (*equation.operands, *equation.results), (*operands, *results)
        for atom, value, form in zip(was, now, (*before, *after), strict=True):
            self._note_pairs(atom, value, form, seen)
        self._note_rebuilt(made, equation, seen)

    def _note_rebuilt(self, made: Sequence[Equation], equation: Equation, seen: Sequence[Factored]) -> None:
        """Record a rewritten equation, and the reshapes before and after it."""
        names = [one.primitive for one in made]
        if not names:  # a reshape to the shape that its operand has already
            return
        main = names.index(equation.primitive) if equation.primitive != "reshape" else 0
        shapes = tuple(self.trace.avals[atom].shape if isinstance(atom, int) else None for atom in equation.operands)
        stop = len(names) if equation.primitive == "concatenate" and names[-1] == "transpose" else main + 1
        self._note(made[main:stop], equation.source, shapes, seen)
        for one in (*made[:main], *made[stop:]):
            self._note([one], None, (None,), seen)

    def _note(self, made: Sequence[Equation], source: Any, shapes: Any, seen: Sequence[Factored]) -> None:
        for one in made:
            self.builder.mark(one, len(self.rebuilt))
        self.rebuilt.append((source, shapes, seen))

    def _note_pairs(self, atom: Any, value: Any, form: Form, seen: Sequence[Factored]) -> None:
        for d, sizes in enumerate(form):
            for one in seen:
                if len(sizes) == 2 and (atom, d) in one.places:
                    self.pairs[id(one)].add((value, sum(len(before) for before in form[:d])))

    def _form(self, atom: Atom, seen: Sequence[Factored]) -> Form:
        if not isinstance(atom, int):
            return ()
        sizes = [(size,) for size in self.trace.avals[atom].shape]
        found: list[tuple[int, ...]] = []
        for d, whole in enumerate(sizes):
            one = next((one for one in seen if (atom, d) in one.places), None)
            found.append(whole if one is None else (one.size // one.part, one.part))
        return tuple(found)

    def _emit(
        self, equation: Equation, what: str, forms: Sequence[Any], function: Any
    ) -> tuple[list[Equation], list[Any]]:
        """Append a function of an equation's operands under its name; returns the equations and the results."""
        with self.builder.at([]) as items:
            results = self.builder.write(equation, (what, repr(forms)), equation.operands, function)
        self.builder.add(*items)
        return [one for item in items for one in equations_of(item)], results


def _broadcast_with(form: Form, result: Form) -> Form:
    """Split a dim of size 1 in two if the result's dim is split."""
    if len(form) != len(result):
        return form
    return tuple((1,) * len(two) if sizes == (1,) else sizes for sizes, two in zip(form, result, strict=True))
