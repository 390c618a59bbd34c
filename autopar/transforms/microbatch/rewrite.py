"""Rewrite a trace into a loop over microbatches.

In: `Trace`, its graph, a number of microbatches. Out: `Trace` with the same inputs, outputs and results. The loop over
microbatches is built of the same pieces as any other loop, so planning, pricing and execution need no special case.
Microbatch *j* of *m* takes the examples *j, m + j, 2 m + j, ...*: a batch that is sharded over devices therefore needs
no resharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from autopar.errors import MicrobatchError
from autopar.frontend.equations import Atom, Equation, Item, Nest, Region, items_of
from autopar.frontend.from_jaxpr import graph_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder
from autopar.ir.graph import Graph
from autopar.jax_interop import compat as jax_compat
from autopar.transforms.microbatch import slices as parts
from autopar.transforms.microbatch.batch_dims import Places, leading_dim
from autopar.transforms.microbatch.classify import Split, classify
from autopar.transforms.microbatch.loop_border import LoopBorder
from autopar.transforms.microbatch.random_bits import with_drawn_bits
from autopar.transforms.microbatch.resize import is_as_written, resized
from autopar.transforms.microbatch.slices import Cut
from autopar.transforms.microbatch.value_kinds import PARTIAL


def split_batch(trace: Trace, graph: Graph, num_microbatches: int, *, own_statistics: bool = False) -> Trace:
    """The trace with a loop over microbatches.

    Args:
        graph: graph of the trace.
        num_microbatches: number of microbatches; at least 2.
        own_statistics: as in `classify`.

    Raises:
        MicrobatchError: the number does not divide the batch, or the batch cannot be split.
    """
    check_divides(graph, num_microbatches)
    trace, graph = laid_for_parts(trace, graph)
    places = Places(graph)
    split = classify(trace, graph, places, own_statistics=own_statistics)
    return rewritten(trace, graph, places, split, num_microbatches)


def check_divides(graph: Graph, num_microbatches: int, parts: str = "microbatches") -> None:
    """Refuse a number of microbatches that does not divide the batch.

    Args:
        parts: what they are, in the message.

    Raises:
        MicrobatchError: the number does not divide the batch; the error lists numbers that do.
    """
    size, inputs = leading_dim(graph)
    if size % num_microbatches:
        paths = ", ".join(f"`{graph.input_paths[position]}`" for position in inputs[:3])
        fits = [str(n) for n in range(2, size + 1) if size % n == 0]
        raise MicrobatchError(
            f"{size} examples ({paths}) cannot be split into {num_microbatches} equal {parts}: choose one of"
            f" {', '.join(fits[:8])}, or change the batch"
        )


def laid_for_parts(trace: Trace, graph: Graph) -> tuple[Trace, Graph]:
    """The trace with random bits that can be drawn in parts, and its graph."""
    drawn = with_drawn_bits(trace, leading_dim(graph)[0])
    return (trace, graph) if drawn is trace else (drawn, graph_of(drawn, graph.carried))


def rewritten(trace: Trace, graph: Graph, places: Places, split: Split, num_microbatches: int) -> Trace:
    """The classified trace with a loop over microbatches; one microbatch gives a loop of one iteration.

    Args:
        trace: a trace from `laid_for_parts`.
        graph, places: its graph and batch dims.
    """
    border = LoopBorder(trace, split, num_microbatches)
    write_microbatch(trace, graph, places, split, border)
    return border.finish()


class Border(Protocol):
    """How values pass into the microbatch's version of a step and out of it; see `LoopBorder`."""

    m: int
    builder: TraceBuilder
    body: list[Item]
    before: list[Item]
    after: list[Item]
    early: set[int]
    wanted: set[int]

    def cut(self, value: int) -> Cut | None: ...
    def local(self, value: int) -> Any: ...
    def enter(self, value: int, equation: Equation) -> int: ...
    def index(self, equation: Equation) -> int: ...
    def own(self, value: int, made: Atom) -> Atom: ...
    def leave(self, value: int, made: Atom) -> None: ...


def write_microbatch(trace: Trace, graph: Graph, places: Places, split: Split, border: Border) -> None:
    """Write the microbatch's version of what runs inside the loop to a border's body, and list what runs outside.

    Args:
        trace, graph, places, split: as for `rewritten`.
    """
    _Rewriting(trace, graph, places, split, border).run()


class _Rewriting:
    """Writes the microbatch's version of each equation inside the loop; the one mutable object of this module."""

    def __init__(self, trace: Trace, graph: Graph, places: Places, split: Split, border: Border) -> None:
        self.trace, self.graph, self.places, self.split, self.m = trace, graph, places, split, border.m
        self.border, self.builder = border, border.builder
        self.inner: dict[int, Atom] = {}  # value -> its replacement inside the loop
        self.own: dict[int, Atom] = {}  # sum -> the microbatch's own value that replaces it

    def run(self) -> None:
        """Rewrite the whole trace."""
        items = items_of(self.trace.equations, self.trace.regions)
        for (start, stop, _), item in zip(self.trace.walk(), items, strict=True):
            if start in self.split.before:
                self.border.before.append(item)
            if start in self.split.inside:
                self._inside(start, stop)
            if start in self.split.after:
                self.border.after.append(item)

    def _inside(self, start: int, stop: int) -> None:
        with self.builder.at(self.border.body):
            self._span(start, stop)
            for value in (v for n in range(start, stop) for v in self.trace.equations[n].results):
                if value in self.split.own:
                    self.own[value] = self.border.own(value, self.inner[value])
                if value in self.border.wanted:
                    self.border.leave(value, self.inner[value])

    def _span(self, start: int, stop: int) -> None:
        for n, _, region in self.trace.walk(start, stop):
            if region is None:
                self._equation(n)
            else:
                self._region(region)

    def _region(self, region: Region) -> None:
        enter = [self._copied(n) for n in range(*region.enter)]
        sections = self.builder.sections(region.sections, lambda span: self._span(*span))
        leave = [self._copied(n) for n in range(*region.exit)]
        self.builder.add(Nest(region.kind, region.source, enter, sections, leave))

    def _equation(self, n: int) -> None:
        factor = self.split.factors.get(n)
        equation = self.trace.equations[n]
        if factor is None or (equation.piece is None and is_as_written(equation.source)):
            self.builder.add(self._copied(n))
        elif self.places.created(n, factor):
            self._made(n)
        else:
            self._resized(n)

    def _copied(self, n: int) -> Equation:
        """Copy an equation whose parameters hold no size of the batch."""
        equation = self.trace.equations[n]
        copied = self.builder.copy(equation, lambda v: self._value(v, n), types=self.border.local, times=self.m)
        self.inner.update(zip(equation.results, copied.results, strict=True))
        return copied

    def _resized(self, n: int) -> None:
        equation = self.trace.equations[n]
        whole = [self.trace.avals[atom].shape if isinstance(atom, int) else () for atom in equation.operands]
        shapes = [self.border.local(value).shape for value in equation.results]
        self._part(n, "part", equation.operands, lambda values: resized(equation.source, values, whole, shapes))

    def _made(self, n: int) -> None:
        """Compute values that depend on positions for the microbatch's positions, or else slice the whole."""
        equation = self.trace.equations[n]
        cuts = [self.border.cut(value) for value in equation.results]
        shapes = [self.trace.avals[value].shape for value in equation.results]

        def part(values: Sequence[Any]) -> Sequence[Any]:
            *operands, j = values
            cut = next(cut for cut in cuts if cut is not None)
            own = parts.made(equation.source, operands, cut, shapes[0], j)
            if own is not None:
                return own
            results = jax_compat.bind(equation.source, operands)
            return [
                one if cut is None else cut.one(cut.apart(one), j, one.shape)
                for one, cut in zip(results, cuts, strict=True)
            ]

        self._part(n, "made", equation.operands, part, self.border.index(equation))

    def _part(self, n: int, what: str, atoms: Sequence[Atom], function: Any, *others: int) -> None:
        """Append a function of an equation's operands as the microbatch's version of that equation."""
        equation = self.trace.equations[n]
        local = [self.border.local(value) for value in equation.results]
        operands = [*(self._value(atom, n) if isinstance(atom, int) else atom for atom in atoms), *others]
        places = [self.split.batch.of(v) for v in (*atoms, *equation.results) if isinstance(v, int)]
        whole = [self.trace.avals[v] for v in equation.results]
        key = what, equation.params_text, repr(places), repr(whole)
        made = self.builder.write(equation, key, operands, function, self.m * equation.repeat)
        for value, one, expected in zip(equation.results, made, local, strict=True):
            aval = self.builder.avals[one] if isinstance(one, int) else jax_compat.shape_struct(one.value)
            if (aval.shape, aval.dtype) != (expected.shape, expected.dtype):
                node = self.graph.nodes[n]
                raise MicrobatchError(
                    f"the batch cannot be split into microbatches: `{node.primitive}` at"
                    f" {node.source or 'an unknown line'} is written for one shape,"
                    f" {list(self.trace.avals[value].shape)}; it gives {list(aval.shape)}, not {list(expected.shape)}"
                )
        self.inner.update(zip(equation.results, made, strict=True))

    def _value(self, value: int, reader: int) -> Atom:
        """The value that an equation inside the loop reads in place of a value of the trace."""
        if value in self.inner and (value in self.split.batch.places or value not in self.border.early):
            takes_own = value in self.own and not self._adds_up(reader)
            return self.own[value] if takes_own else self.inner[value]
        return self.border.enter(value, self.trace.equations[reader])

    def _adds_up(self, reader: int) -> bool:
        """Whether an equation adds partial sums. If not, it reads a microbatch's own value in place of the total."""
        return any(self.split.kinds.get(v) in PARTIAL for v in self.trace.equations[reader].results)
