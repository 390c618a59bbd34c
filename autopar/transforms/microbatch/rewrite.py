"""Rewrite a trace into a loop over microbatches.

In: `Trace`, its graph, a number of microbatches. Out: `Trace` with the same inputs, outputs and results. The loop over
microbatches is built of the same pieces as any other loop, so planning, pricing and execution need no special case.
Microbatch *j* of *m* takes the examples *j, m + j, 2 m + j, ...*: a batch that is sharded over devices therefore needs
no resharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.errors import MicrobatchError
from autopar.frontend.equations import Atom, Equation, Item, Nest, Piece, Region, items_of
from autopar.frontend.from_jaxpr import graph_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import LoopBuilder, TraceBuilder
from autopar.ir.graph import Graph
from autopar.jax_interop import compat as jax_compat
from autopar.transforms.microbatch import slices as parts
from autopar.transforms.microbatch.batch_dims import Places, leading_dim
from autopar.transforms.microbatch.classify import Split, classify
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


def check_divides(graph: Graph, num_microbatches: int) -> None:
    """Refuse a number of microbatches that does not divide the batch.

    Raises:
        MicrobatchError: the number does not divide the batch; the error lists numbers that do.
    """
    size, inputs = leading_dim(graph)
    if size % num_microbatches:
        raise MicrobatchError(_not_divisible(graph, size, inputs, num_microbatches))


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
    return _Rewriting(trace, graph, places, split, num_microbatches).run()


def _not_divisible(graph: Graph, size: int, inputs: Sequence[int], m: int) -> str:
    paths = ", ".join(f"`{graph.input_paths[position]}`" for position in inputs[:3])
    fits = [str(n) for n in range(2, size + 1) if size % n == 0]
    return (
        f"{size} examples ({paths}) cannot be split into {m} equal microbatches: choose one of"
        f" {', '.join(fits[:8])}, or change the batch"
    )


class _Rewriting:
    """Writes the loop and the equations around it; the one mutable object of this module."""

    def __init__(self, trace: Trace, graph: Graph, places: Places, split: Split, m: int) -> None:
        self.trace, self.graph, self.places, self.split, self.m = trace, graph, places, split, m
        self.builder = TraceBuilder(trace)
        self.avals = self.builder.avals
        self.loop = LoopBuilder(jax_compat.scan_of(m))
        self.before: list[Item] = []
        self.after: list[Item] = []
        self.inner: dict[int, Atom] = {}  # value -> its replacement inside the loop
        self.entered: dict[int, int] = {}  # value from outside -> the same value, or a part of it, inside the loop
        self.own: dict[int, Atom] = {}  # sum -> the microbatch's own value that replaces it
        self.counter: int | None = None
        made = {v for n in split.before for v in trace.equations[n].results}
        self.early = {*trace.inputs, *self.builder.constants, *made}
        self.wanted = self._wanted()

    def run(self) -> Trace:
        """Rewrite the whole trace."""
        items = items_of(self.trace.equations, self.trace.regions)
        for (start, stop, _), item in zip(self.trace.walk(), items, strict=True):
            if start in self.split.before:
                self.before.append(item)
            if start in self.split.inside:
                self._inside(start, stop)
            if start in self.split.after:
                self.after.append(item)
        self.builder.add(*self.before, self.loop.nest(), *self.after)
        return self.builder.finish(microbatches=self.loop.source)

    def _wanted(self) -> set[int]:
        """Values made inside the loop and read after it."""
        equations = self.trace.equations
        later = {v for n in self.split.after for v in equations[n].results}
        read = {v for n in self.split.after for v in equations[n].reads}
        read |= {v for v in self.trace.outputs if isinstance(v, int)}
        return read - self.early - later

    # -- what runs inside --------------------------------------------------------------------

    def _inside(self, start: int, stop: int) -> None:
        with self.builder.at(self.loop.body):
            self._span(start, stop)
            for value in (v for n in range(start, stop) for v in self.trace.equations[n].results):
                if value in self.split.own:
                    self._take_own(value)
                if value in self.wanted:
                    self._leave(value)

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
        copied = self.builder.copy(equation, lambda v: self._value(v, n), types=self._local, times=self.m)
        self.inner.update(zip(equation.results, copied.results, strict=True))
        return copied

    def _resized(self, n: int) -> None:
        equation = self.trace.equations[n]
        whole = [self.trace.avals[atom].shape if isinstance(atom, int) else () for atom in equation.operands]
        shapes = [self._local(value).shape for value in equation.results]
        self._part(n, "part", equation.operands, lambda values: resized(equation.source, values, whole, shapes))

    def _made(self, n: int) -> None:
        """Compute values that depend on positions for the microbatch's positions, or else slice the whole."""
        equation = self.trace.equations[n]
        cuts = [self._cut(value) for value in equation.results]
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

        counter = self._trip(equation)
        self._part(n, "made", equation.operands, part, counter)

    def _part(self, n: int, what: str, atoms: Sequence[Atom], function: Any, *others: int) -> None:
        """Append a function of an equation's operands as the microbatch's version of that equation."""
        equation = self.trace.equations[n]
        local = [self._local(value) for value in equation.results]
        operands = [*(self._value(atom, n) if isinstance(atom, int) else atom for atom in atoms), *others]
        places = [self.split.batch.of(v) for v in (*atoms, *equation.results) if isinstance(v, int)]
        whole = [self.trace.avals[v] for v in equation.results]
        made = self.builder.write(
            equation,
            (what, equation.params_text, repr(places), repr(whole)),
            operands,
            function,
            self.m * equation.repeat,
        )
        for value, one, expected in zip(equation.results, made, local, strict=True):
            aval = self.avals[one] if isinstance(one, int) else jax_compat.shape_struct(one.value)
            if (aval.shape, aval.dtype) != (expected.shape, expected.dtype):
                node = self.graph.nodes[n]
                raise MicrobatchError(
                    f"the batch cannot be split into microbatches: `{node.primitive}` at"
                    f" {node.source or 'an unknown line'} is written for one shape,"
                    f" {list(self.trace.avals[value].shape)}; it gives {list(aval.shape)}, not {list(expected.shape)}"
                )
        self.inner.update(zip(equation.results, made, strict=True))

    # -- operands ----------------------------------------------------------------------------

    def _value(self, value: int, reader: int) -> Atom:
        """The value that an equation inside the loop reads in place of a value of the trace."""
        has_batch = value in self.split.batch.places
        if value in self.inner and (has_batch or value not in self.early):
            takes_own = value in self.own and not self._adds_up(reader)
            return self.own[value] if takes_own else self.inner[value]
        if value in self.entered:
            return self.entered[value]
        equation = self.trace.equations[reader]
        if has_batch:
            return self._enter_parts(value, equation)
        n = self.trace.producers.get(value)
        if n is None and value in self.builder.constants:
            return value
        producer = None if n is None else self.trace.equations[n]
        if producer is not None and producer.piece is None and not producer.reads:
            # A constant without operands is made inside the loop rather than kept.
            self.loop.body.append(again := self.builder.copy(producer, {}, times=self.m))
            self.entered.update(zip(producer.results, again.results, strict=True))
            return self.entered[value]
        self.entered[value] = self._enter("enter_const", value, equation, self.trace.avals[value])
        return self.entered[value]

    def _adds_up(self, reader: int) -> bool:
        """Whether an equation adds partial sums. If not, it reads a microbatch's own value in place of the total."""
        return any(self.split.kinds.get(v) in PARTIAL for v in self.trace.equations[reader].results)

    def _enter(self, piece: Piece, value: int, equation: Equation, aval: Any) -> int:
        """Bring a value into the loop; the piece is attributed to the value's first user."""
        inside = self.builder.new(aval, float(self.m))
        self.loop.give(equation, piece, value, inside)
        return inside

    def _enter_parts(self, value: int, equation: Equation) -> int:
        """The microbatch's part of a value, sliced out in each iteration: a copy of all parts would be as large as the
        value."""
        cut, shape = self._cut(value), self.trace.avals[value].shape
        assert cut is not None
        apart = self._at(self.before, equation, ("apart", repr(cut)), [value], cut.apart)
        assert isinstance(apart, int)
        entered, j = self._enter("enter_const", apart, equation, self.avals[apart]), self._trip(equation)
        part = self._at(self.loop.body, equation, ("one", repr(cut)), [entered, j], lambda x, j: cut.one(x, j, shape))
        assert isinstance(part, int)
        self.entered[value] = part
        return part

    def _trip(self, equation: Equation) -> int:
        """The index of the microbatch."""
        if self.counter is None:
            counts = self._at(self.before, equation, "index", [], lambda: lax.broadcasted_iota("uint32", (self.m,), 0))
            assert isinstance(counts, int)
            self.counter = self._enter("enter_slice", counts, equation, self.avals[counts].update(shape=()))
        return self.counter

    # -- what comes out ----------------------------------------------------------------------

    def _leave(self, value: int) -> None:
        equation = self.trace.equations[self.trace.producers[value]]
        kind, made = self.split.kinds[value], self.inner[value]
        if kind == "rows":
            cut = self._cut(value)
            assert cut is not None
            aval = self.trace.avals[value]
            stack = self.builder.new(aval.update(shape=(self.m, *self._local(value).shape)))
            self.loop.stack(equation, made, stack)
            self._named(value, equation, ("merged", repr(cut), aval.shape), stack, lambda x: cut.merged(x, aval.shape))
        elif kind in PARTIAL:
            self._accumulate(value, kind, equation)
        else:  # equal in all microbatches: take the last one's
            aval = self.trace.avals[value]
            start = self._at(
                self.before, equation, ("zeros", repr(aval)), [], lambda: jnp.zeros(aval.shape, aval.dtype)
            )
            self._carry(start, lambda _: made, value, equation)

    def _accumulate(self, value: int, kind: str, equation: Equation) -> None:
        """Accumulate a microbatch's term. Narrow floating-point sums and products are accumulated in float32, as a
        matmul does."""
        aval, term = self.trace.avals[value], self.inner[value]
        dtype = aval.dtype
        narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 and kind in ("sum", "prod")
        wide = jnp.dtype("float32") if narrow else dtype
        begin = (kind, aval.shape, str(wide))
        start = self._at(self.before, equation, begin, [], lambda: parts.identity(*begin))

        def add(carry: int) -> Atom:
            one, body = term, self.loop.body
            if narrow:
                one = self._at(body, equation, ("wide",), [one], lambda x: lax.convert_element_type(x, wide))
            return self._at(body, equation, ("combine", kind), [carry, one], parts.COMBINE[kind])

        if not narrow:
            self._carry(start, add, value, equation)
            return
        total = self.builder.new(aval.update(dtype=wide))
        self._carry(start, add, total, equation)
        self._named(value, equation, ("narrow", str(dtype)), total, lambda x: lax.convert_element_type(x, dtype))

    def _carry(self, start: Atom, step: Callable[[int], Atom], result: int, equation: Equation) -> None:
        """Carry a value from iteration to iteration; `result` is the value after the last one."""
        inside = self.builder.new(self.avals[result], float(self.m))
        self.loop.carry(equation, start, inside, step(inside), result)

    def _take_own(self, value: int) -> None:
        """Let a microbatch use its own sum in place of the batch's, times the number of microbatches: the divisor of a
        mean was traced for the whole batch."""
        made = self.inner[value]
        if self.split.kinds[value] == "sum":
            equation = self.trace.equations[self.trace.producers[value]]
            made = self._at(self.loop.body, equation, ("own",), [made], lambda x: x * np.dtype(x.dtype).type(self.m))
        self.own[value] = made

    # -- equations ---------------------------------------------------------------------------

    def _cut(self, value: int) -> Cut | None:
        place = self.split.batch.of(value)
        return None if place is None else Cut(place, self.split.batch.size, self.m)

    def _local(self, value: int) -> Any:
        """The type of a microbatch's part of a value."""
        aval, cut = self.trace.avals[value], self._cut(value)
        return aval if cut is None else aval.update(shape=cut.local(aval.shape))

    def _at(self, to: list[Item], equation: Equation, what: Any, atoms: Sequence[Atom], function: Any) -> Atom:
        """Append a function of operands before the loop, in its body or after it."""
        repeat = float(self.m) if to is self.loop.body else 1.0
        with self.builder.at(to):
            (made,) = self.builder.write(equation, what, atoms, lambda values: [function(*values)], repeat)
        return made

    def _named(self, value: int, equation: Equation, what: Any, operand: int, function: Any) -> None:
        """Append a function after the loop, and let its result replace a value of the trace."""
        made = self._at(self.after, equation, what, [operand], function)
        with self.builder.at(self.after):
            self.builder.name(made, value)
