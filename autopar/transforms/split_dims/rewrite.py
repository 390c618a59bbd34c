"""A trace whose cut dims are two dims.

In: `Trace`, and its graph. Out: `Trace` of the same inputs, outputs and numbers. Where a value is wanted in the other
form, a reshape stands; it takes the name stack, the phase and the source line of what reads it, and a rewritten equation
keeps its own. Values cross the border of a loop or a branch as the program has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.frontend.equations import Equation, LiteralOperand, Region
from autopar.frontend.trace import Rewritten, Trace
from autopar.ir.graph import Graph
from autopar.transforms.rewriting.equation_writer import Writer
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
    """Collects the new equations; the one mutable object of this module."""

    def __init__(self, trace: Trace, factored: Sequence[Factored]) -> None:
        self.trace = trace
        self.equations: list[Equation] = []
        self.regions: list[Region] = []
        self.writer = Writer(trace)
        self.region_at = {region.enter[0]: region for region in trace.regions}
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
        self.rebuilt: list[tuple[int, int, Any, Any, Sequence[Factored]]] = []

    def run(self) -> Trace:
        """The whole trace anew."""
        self._span(0, len(self.trace.equations))
        producers = self.trace.producers
        outputs = tuple(
            self._plain(atom, self.trace.equations[producers[atom]])
            if isinstance(atom, int) and atom in producers
            else atom
            for atom in self.trace.outputs
        )
        return replace(
            self.trace,
            equations=tuple(self.equations),
            regions=tuple(self.regions),
            avals=tuple(self.writer.avals),
            repeats=tuple(self.writer.repeats),
            outputs=outputs,
            rewritten=tuple(self._rewritten(*one) for one in self.rebuilt),
        )

    def _span(self, start: int, stop: int) -> None:
        n = start
        while n < stop:
            region = self.region_at.get(n)
            if region is not None:
                self._region(region)
                n = region.exit[1]
                continue
            equation, seen = self.trace.equations[n], self.seen_at.get(n)
            if seen:
                self._rebuild(equation, seen)
            else:
                self.equations.append(self._as_it_was(equation))
            n += 1

    def _region(self, region: Region) -> None:
        """A loop or branches at a new place. What is reshaped in a section is known in it alone."""
        pieces = self.trace.equations
        enter = self._append([self._as_it_was(pieces[n]) for n in range(*region.enter)])
        leaving = {n: list(pieces[n].operands) for n in range(*region.exit)}
        outside, sections = self.known, []
        for section, span in enumerate(region.sections):
            self.known, start = dict(outside), len(self.equations)
            self._span(*span)
            for n, i in region.leaving(section, pieces):
                leaving[n][i] = self._plain(leaving[n][i], pieces[n])
            sections.append((start, len(self.equations)))
        self.known = outside
        left = self._append([replace(pieces[n], operands=tuple(operands)) for n, operands in leaving.items()])
        self.regions.append(replace(region, enter=enter, sections=tuple(sections), exit=left))

    def _append(self, equations: Sequence[Equation]) -> tuple[int, int]:
        start = len(self.equations)
        self.equations += equations
        return start, len(self.equations)

    def _as_it_was(self, equation: Equation) -> Equation:
        return replace(equation, operands=tuple(self._plain(atom, equation) for atom in equation.operands))

    def _rewritten(self, start: int, stop: int, source: Any, shapes: Any, seen: Sequence[Factored]) -> Rewritten:
        pairs = frozenset(pair for one in seen for pair in self.pairs[id(one)])
        return Rewritten(start, stop, source, shapes, pairs)

    def _plain(self, atom: int | LiteralOperand, reader: Equation) -> int | LiteralOperand:
        if not isinstance(atom, int) or atom not in self.form:
            return atom
        return self._value(atom, self.trace.avals[atom].shape, reader)

    def _value(self, value: int, shape: tuple[int, ...], reader: Equation) -> int:
        """A value in a shape, reshaped at its first reader that wants it so."""
        made = self.form.get(value, value)
        if self.writer.avals[made].shape == shape:
            return made
        if (value, shape) not in self.known:
            # A piece stands at a border, and its operand on one side of it.
            equation = replace(reader, operands=(made,), repeat=self.trace.repeats[value], piece=None)
            n = len(self.equations)
            (self.known[value, shape],) = self._emit(
                equation, "reshape", [shape], lambda values: [jax.lax.reshape(values[0], shape)]
            )
            self.rebuilt.append((n, n + 1, None, (None,), self.loops_of[value]))
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
        source, rebuild, start = equation.source, REBUILD[equation.primitive], len(self.equations)
        results = self._emit(
            replace(equation, operands=tuple(operands)),
            repr(sorted(source.params.items(), key=lambda item: item[0])),
            [*before, *after],
            lambda values: rebuild(source, values, before, after),
        )
        self.form.update(zip(equation.results, results, strict=True))
        was, now = (*equation.operands, *equation.results), (*operands, *results)
        for atom, value, form in zip(was, now, (*before, *after), strict=True):
            self._note_pairs(atom, value, form, seen)
        self._note_rebuilt(start, equation, seen)

    def _note_rebuilt(self, start: int, equation: Equation, seen: Sequence[Factored]) -> None:
        """What has been emitted since `start` is an equation anew, and reshapes before or after it."""
        names = [one.primitive for one in self.equations[start:]]
        if not names:  # a reshape to what its operand is seen as
            return
        main = start + names.index(equation.primitive) if equation.primitive != "reshape" else start
        shapes = tuple(self.trace.avals[atom].shape if isinstance(atom, int) else None for atom in equation.operands)
        stop = main + 1
        if equation.primitive == "concatenate" and names[-1] == "transpose":
            stop = start + len(names)
        self.rebuilt.append((main, stop, equation.source, shapes, seen))
        others = [*range(start, main), *range(stop, len(self.equations))]
        self.rebuilt += [(n, n + 1, None, (None,), seen) for n in others]

    def _note_pairs(self, atom: Any, value: Any, form: Form, seen: Sequence[Factored]) -> None:
        for d, sizes in enumerate(form):
            for one in seen:
                if len(sizes) == 2 and (atom, d) in one.places:
                    self.pairs[id(one)].add((value, sum(len(before) for before in form[:d])))

    def _form(self, atom: int | LiteralOperand, seen: Sequence[Factored]) -> Form:
        if not isinstance(atom, int):
            return ()
        sizes = [(size,) for size in self.trace.avals[atom].shape]
        found: list[tuple[int, ...]] = []
        for d, whole in enumerate(sizes):
            one = next((one for one in seen if (atom, d) in one.places), None)
            found.append(whole if one is None else (one.size // one.part, one.part))
        return tuple(found)

    def _emit(self, equation: Equation, what: str, forms: Sequence[Any], function: Any) -> list[Any]:
        """Append what a function of an equation's operands does, under the equation's name; its results' numbers."""
        return self.writer.write(self.equations, equation, (what, repr(forms)), equation.operands, function)


def _broadcast_with(form: Form, result: Form) -> Form:
    """A dim of size 1 beside one that is seen as two is seen as two as well."""
    if len(form) != len(result):
        return form
    return tuple((1,) * len(two) if sizes == (1,) else sizes for sizes, two in zip(form, result, strict=True))
