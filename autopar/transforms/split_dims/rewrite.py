"""A trace whose cut dims are two dims.

In: `Trace`, and its graph. Out: `Trace` of the same inputs, outputs and numbers. Where a value is wanted in the other
form, a reshape stands; it takes the name stack, the phase and the source line of what reads it, and a rewritten equation
keeps its own. Values cross the border of a loop or a branch as the program has them.
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
    """The trace with dims that are cut into equal parts seen as two, where this pays; itself where it does not.

    Args:
        graph: of the trace.
    """
    factored = factored_loops(graph, REBUILD.keys())
    return _Rewriting(trace, factored).run() if factored else trace


class _Rewriting:
    """Writes the equations anew; the one mutable object of this module."""

    def __init__(self, trace: Trace, factored: Sequence[Factored]) -> None:
        self.trace, self.builder = trace, TraceBuilder(trace)
        self.seen_at: dict[int, list[Factored]] = {}
        self.loops_of: dict[int, list[Factored]] = defaultdict(list)  # value -> the loops among its dims
        for one in factored:
            for value in {value for value, _ in one.places}:
                self.loops_of[value].append(one)
            for n in one.nodes:
                self.seen_at.setdefault(n, []).append(one)
        self.form: dict[int, int] = {}  # value -> what is made in its place
        #: Value and shape -> the value in that shape, as far as it is known where the pass stands.
        self.known: dict[tuple[int, tuple[int, ...]], int] = {}
        self.pairs: dict[int, set[tuple[int, int]]] = defaultdict(set)  # of a loop: where its two dims stand
        #: What equations stand for that see a dim as two, but for where they begin and end and where the dims stand.
        self.rebuilt: list[tuple[Any, Any, Sequence[Factored]]] = []

    def run(self) -> Trace:
        """The whole trace anew."""
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
        """A loop or branches at a new place. What is reshaped in a section is known in it alone."""
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
        """What stands for a value, in the shape that the program has it in."""
        if not isinstance(atom, int) or atom not in self.form:
            return atom
        return self._value(atom, self.trace.avals[atom].shape, reader)

    def _value(self, value: int, shape: tuple[int, ...], reader: Equation) -> int:
        """A value in a shape, reshaped at its first reader that wants it so."""
        made = self.form.get(value, value)
        if self.builder.avals[made].shape == shape:
            return made
        if (value, shape) not in self.known:
            # A piece stands at a border, and its operand on one side of it.
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
        """What has been made is an equation anew, and reshapes before or after it."""
        names = [one.primitive for one in made]
        if not names:  # a reshape to what its operand is seen as
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
        """Append what a function of an equation's operands does, under the equation's name; the equations, and what stands
        for its results."""
        with self.builder.at([]) as items:
            results = self.builder.write(equation, (what, repr(forms)), equation.operands, function)
        self.builder.add(*items)
        return [one for item in items for one in equations_of(item)], results


def _broadcast_with(form: Form, result: Form) -> Form:
    """A dim of size 1 beside one that is seen as two is seen as two as well."""
    if len(form) != len(result):
        return form
    return tuple((1,) * len(two) if sizes == (1,) else sizes for sizes, two in zip(form, result, strict=True))
