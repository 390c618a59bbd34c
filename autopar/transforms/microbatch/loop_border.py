"""Pass values into the loop over microbatches and out of it.

In: a classified trace. Out: `LoopBorder`: the loop, and the equations before and after it that cut values into microbatches,
accumulate partial values and put the microbatches' results together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.frontend.equations import Atom, Equation, Item, Piece
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import LoopBuilder, TraceBuilder
from autopar.jax_interop import compat as jax_compat
from autopar.transforms.microbatch import slices as parts
from autopar.transforms.microbatch.classify import Split
from autopar.transforms.microbatch.slices import Cut
from autopar.transforms.microbatch.value_kinds import PARTIAL


class LoopBorder:
    """Writes the values that enter a loop over `m` microbatches and those that leave it.

    Attributes:
        body: what runs in the loop. before, after: what runs before and after it.
        early: values known before the loop.
        wanted: values made inside the loop and read after it.
    """

    def __init__(self, trace: Trace, split: Split, m: int) -> None:
        self.trace, self.split, self.m = trace, split, m
        self.builder = TraceBuilder(trace)
        self.loop = LoopBuilder(jax_compat.scan_of(m))
        self.body = self.loop.body
        self.before: list[Item] = []
        self.after: list[Item] = []
        self.entered: dict[int, int] = {}  # value from outside -> the same value, or a part of it, inside the loop
        self.counter: int | None = None
        made = {v for n in split.before for v in trace.equations[n].results}
        self.early = {*trace.inputs, *self.builder.constants, *made}
        later = {v for n in split.after for v in trace.equations[n].results}
        read = {v for n in split.after for v in trace.equations[n].reads}
        self.wanted = (read | {v for v in trace.outputs if isinstance(v, int)}) - self.early - later

    def finish(self) -> Trace:
        """The trace with the loop."""
        self.builder.add(*self.before, self.loop.nest(), *self.after)
        return self.builder.finish(microbatches=self.loop.source)

    def cut(self, value: int) -> Cut | None:
        """How a value is cut into microbatches; None if it has no batch dim."""
        place = self.split.batch.of(value)
        return None if place is None else Cut(place, self.split.batch.size, self.m)

    def local(self, value: int) -> Any:
        """The type of a microbatch's part of a value."""
        aval, cut = self.trace.avals[value], self.cut(value)
        return aval if cut is None else aval.update(shape=cut.local(aval.shape))

    def enter(self, value: int, equation: Equation) -> int:
        """A value from outside the loop as an equation inside reads it: whole, or the microbatch's part."""
        if value in self.entered:
            return self.entered[value]
        if value in self.split.batch.places:
            return self._enter_parts(value, equation)
        n = self.trace.producers.get(value)
        if n is None and value in self.builder.constants:
            return value
        producer = None if n is None else self.trace.equations[n]
        if producer is not None and producer.piece is None and not producer.reads:
            # A constant without operands is made inside the loop rather than kept.
            self.body.append(again := self.builder.copy(producer, {}, times=self.m))
            self.entered.update(zip(producer.results, again.results, strict=True))
            return self.entered[value]
        self.entered[value] = self._give("enter_const", value, equation, self.trace.avals[value])
        return self.entered[value]

    def _give(self, piece: Piece, value: int, equation: Equation, aval: Any) -> int:
        """Bring a value into the loop; the piece is attributed to the value's first user."""
        inside = self.builder.new(aval, float(self.m))
        self.loop.give(equation, piece, value, inside)
        return inside

    def _enter_parts(self, value: int, equation: Equation) -> int:
        """The microbatch's part of a value, sliced out in each iteration: a copy of all parts would be as large as the
        value."""
        cut, shape = self.cut(value), self.trace.avals[value].shape
        assert cut is not None
        apart = self._at(self.before, equation, ("apart", repr(cut)), [value], cut.apart)
        assert isinstance(apart, int)
        entered, j = self._give("enter_const", apart, equation, self.builder.avals[apart]), self.index(equation)
        part = self._at(self.body, equation, ("one", repr(cut)), [entered, j], lambda x, j: cut.one(x, j, shape))
        assert isinstance(part, int)
        self.entered[value] = part
        return part

    def index(self, equation: Equation) -> int:
        """The index of the microbatch."""
        if self.counter is None:
            counts = self._at(self.before, equation, "index", [], lambda: lax.broadcasted_iota("uint32", (self.m,), 0))
            assert isinstance(counts, int)
            self.counter = self._give("enter_slice", counts, equation, self.builder.avals[counts].update(shape=()))
        return self.counter

    def leave(self, value: int, made: Atom) -> None:
        """Let a value, of which a microbatch makes `made`, leave the loop: stacked, accumulated, their mean, or the last one."""
        equation = self.trace.equations[self.trace.producers[value]]
        kind, aval = self.split.kinds[value], self.trace.avals[value]
        # Such as a maximum. The mean of own sums, each of which stands for the batch's, is the whole sum.
        if value in self.split.own and kind != "sum" and jnp.issubdtype(aval.dtype, jnp.floating):
            kind = "own"
        if kind == "rows":
            cut = self.cut(value)
            assert cut is not None
            stack = self.builder.new(aval.update(shape=(self.m, *self.local(value).shape)))
            self.loop.stack(equation, made, stack)
            self._named(value, equation, ("merged", repr(cut), aval.shape), stack, lambda x: cut.merged(x, aval.shape))
        elif kind in PARTIAL:
            self._accumulate(value, made, kind, equation)
        elif kind == "own" and self.m > 1:
            share = self._at(self.body, equation, ("share",), [made], lambda x: x / np.dtype(x.dtype).type(self.m))
            self._accumulate(value, share, "sum", equation)
        else:  # equal in all microbatches: take the last one's
            key = "zeros", repr(aval)
            start = self._at(self.before, equation, key, [], lambda: jnp.zeros(aval.shape, aval.dtype))
            self._carry(start, lambda _: made, value, equation)

    def _accumulate(self, value: int, term: Atom, kind: str, equation: Equation) -> None:
        """Accumulate a microbatch's term. Narrow floating-point sums and products are accumulated in float32, as a
        matmul does."""
        aval, dtype = self.trace.avals[value], self.trace.avals[value].dtype
        narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 and kind in ("sum", "prod")
        wide = jnp.dtype("float32") if narrow else dtype
        begin = (kind, aval.shape, str(wide))
        start = self._at(self.before, equation, begin, [], lambda: parts.identity(*begin))

        def add(carry: int) -> Atom:
            one, body = term, self.body
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
        inside = self.builder.new(self.builder.avals[result], float(self.m))
        self.loop.carry(equation, start, inside, step(inside), result)

    def own(self, value: int, made: Atom) -> Atom:
        """The microbatch's own sum, to use in place of the batch's, times the number of microbatches: the divisor of a
        mean was traced for the whole batch."""
        if self.split.kinds[value] == "sum":
            equation = self.trace.equations[self.trace.producers[value]]
            made = self._at(self.body, equation, ("own",), [made], lambda x: x * np.dtype(x.dtype).type(self.m))
        return made

    def _at(self, to: list[Item], equation: Equation, what: Any, atoms: Sequence[Atom], function: Any) -> Atom:
        """Append a function of operands before the loop, in its body or after it."""
        repeat = float(self.m) if to is self.body else 1.0
        with self.builder.at(to):
            (made,) = self.builder.write(equation, what, atoms, lambda values: [function(*values)], repeat)
        return made

    def _named(self, value: int, equation: Equation, what: Any, operand: int, function: Any) -> None:
        """Append a function after the loop, and let its result replace a value of the trace."""
        made = self._at(self.after, equation, what, [operand], function)
        with self.builder.at(self.after):
            self.builder.name(made, value)
