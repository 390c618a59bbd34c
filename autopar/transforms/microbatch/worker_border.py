"""Pass values into a worker's part of a step, and out of it to the server.

In: a classified trace, the number of workers. Out: `WorkerBorder`, which stands where `LoopBorder` stands in gradient accumulation: the
loop over microbatches is unrolled over workers, so a worker's share of the batch is an argument, and its terms of the sums over the
batch are results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.frontend.equations import Atom, Equation
from autopar.frontend.trace import Trace
from autopar.jax_interop import compat as jax_compat
from autopar.transforms.microbatch.classify import Split
from autopar.transforms.microbatch.loop_border import LoopBorder
from autopar.transforms.microbatch.slices import Cut
from autopar.transforms.microbatch.value_kinds import PARTIAL


class WorkerBorder:
    """Writes what a worker takes and gives.

    Args:
        m: the number of workers.
        wide: whether narrow sums leave in float32, as sums of several of them are to be accumulated.

    Attributes:
        shares: value with a batch dim -> the worker's share of it, an input.
        number: the worker's number, an input; None if nothing depends on it.
        left: value -> what the worker makes in its place.
    """

    def __init__(self, trace: Trace, split: Split, m: int, *, wide: bool = False) -> None:
        self._loop = LoopBorder(trace, split, m)
        self.trace, self.split, self.m, self.wide = trace, split, m, wide
        self.builder, self.body = self._loop.builder, self._loop.body
        self.before, self.after = self._loop.before, self._loop.after
        self.early, self.wanted = self._loop.early, self._loop.wanted
        self.shares: dict[int, int] = {}
        self.number: int | None = None
        self.left: dict[int, Atom] = {}
        self._again: dict[int, int] = {}

    def cut(self, value: int) -> Cut | None:
        """As `LoopBorder.cut`."""
        return self._loop.cut(value)

    def local(self, value: int) -> Any:
        """As `LoopBorder.local`."""
        return self._loop.local(value)

    def own(self, value: int, made: Atom) -> Atom:
        """As `LoopBorder.own`."""
        return self._loop.own(value, made)

    def enter(self, value: int, equation: Equation) -> int:
        """A value from outside as the worker reads it: whole, or its share."""
        if value in self.split.batch.places:
            if value not in self.shares:
                self.shares[value] = self.builder.new(self.local(value))
            return self.shares[value]
        n = self.trace.producers.get(value)
        producer = None if n is None else self.trace.equations[n]
        if producer is None or producer.piece is not None or producer.reads:
            return value
        if value not in self._again:  # a constant without operands is made by the worker
            self.body.append(again := self.builder.copy(producer, {}))
            self._again.update(zip(producer.results, again.results, strict=True))
        return self._again[value]

    def index(self, equation: Equation) -> int:
        """The worker's number."""
        if self.number is None:
            self.number = self.builder.new(jax_compat.scalar_type("uint32"))
        return self.number

    def leave(self, value: int, made: Atom) -> None:
        """Give the worker's term of a value, by the rules of `LoopBorder.leave`."""
        equation = self.trace.equations[self.trace.producers[value]]
        dtype = self.trace.avals[value].dtype
        is_float = jnp.issubdtype(dtype, jnp.floating)
        if self.kind(value) == "own" and is_float:
            made = self._at(equation, ("share",), made, lambda x: x / np.dtype(x.dtype).type(self.m))
        if self.wide and self.is_summed(value) and is_float and jnp.finfo(dtype).bits < 32:
            made = self._at(equation, ("wide",), made, lambda x: lax.convert_element_type(x, jnp.float32))
        self.left[value] = made

    def kind(self, value: int) -> str:
        """The kind of a value, as `LoopBorder.leave` takes it."""
        kind = self.split.kinds[value]
        is_float = jnp.issubdtype(self.trace.avals[value].dtype, jnp.floating)
        return "own" if value in self.split.own and kind != "sum" and is_float else kind

    def is_summed(self, value: int) -> bool:
        """Whether the workers' terms of a value are added up."""
        return self.kind(value) in ("sum", "own")

    def is_term(self, value: int) -> bool:
        """Whether workers differ in a value that is made inside."""
        return self.kind(value) in PARTIAL or self.kind(value) in ("own", "rows")

    def _at(self, equation: Equation, what: Any, atom: Atom, function: Callable[[Any], Any]) -> Atom:
        with self.builder.at(self.body):
            (made,) = self.builder.write(equation, what, [atom], lambda values: [function(*values)])
        return made
