"""Compute masks and other cheap constants of loops inside the loops.

In: `Trace`. Out: `Trace` with the same inputs, outputs and results. JAX moves what does not depend on an iteration out of a `scan`: a
causal mask, and the constant that it selects, become whole tensors of the size of the scores. Each iteration would read them from
memory, and a plan's shardings of them keep XLA from moving them back. A value that is computed from positions and scalars alone,
element by element, costs less than its memory traffic, so each iteration computes it in the kernels that read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.frontend.equations import Atom, Equation, Item, Nest, items_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder
from autopar.jax_interop import compat as jax_compat
from autopar.rules.table import traits_of

#: Bytes of the smallest constant that is worth computing again.
_LEAST_BYTES = 1 << 20
#: Equations of the longest computation that counts as cheap.
_MOST_EQUATIONS = 24
#: Primitives of one instruction for each element. Others, such as the sines of rotary positions, would be computed again for each
#: head that reads them.
_CHEAP = frozenset(
    (
        "add",
        "sub",
        "mul",
        "neg",
        "max",
        "min",
        "and",
        "or",
        "xor",
        "not",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "select_n",
    )
)


def sink_constants(trace: Trace) -> Trace:
    """The trace with large cheap constants of its scans computed in each iteration; the same trace if there are none."""
    if not any(equation.takes_constant for equation in trace.equations):
        return trace
    sinking = _Sinking(trace)
    sinking.write(items_of(trace.equations, trace.regions), {})
    return sinking.builder.finish() if sinking.found else trace


class _Sinking:
    def __init__(self, trace: Trace) -> None:
        self.trace, self.builder = trace, TraceBuilder(trace)
        #: Cheap value -> the equations that compute it, in order.
        self.cheap: dict[int, tuple[Equation, ...]] = {}
        self.found = False

    def write(self, items: Sequence[Item], env: dict[int, Atom]) -> None:
        """Append items.

        Args:
            env: the values that replace constants of the loops around.
        """
        for item in items:
            if isinstance(item, Nest):
                self._write_nest(item, env)
                continue
            equation = item.reading(env)
            self.builder.add(equation)
            self._note(equation)

    def _write_nest(self, nest: Nest, env: dict[int, Atom]) -> None:
        enter = [piece.reading(env) for piece in nest.enter]
        sunk = [piece for piece in enter if nest.kind == "scan" and piece.takes_constant and self._is_worth(piece)]
        own = dict(env)

        def section(items: Sequence[Item]) -> None:
            own.update({piece.results[0]: self._copied(piece) for piece in sunk})
            self.write(items, own)

        sections = self.builder.sections(nest.sections, section)
        exits = [piece.reading(own) for piece in nest.exit]
        self.found |= bool(sunk)
        self.builder.add(Nest(nest.kind, nest.source, enter, sections, exits))

    def _note(self, equation: Equation) -> None:
        """Record a result that is computed from positions and scalars alone, element by element."""
        traits = traits_of(equation.primitive)
        is_iota = traits.moves == "fixed" and not equation.operands
        is_simple = equation.primitive in _CHEAP or traits.lays_out or is_iota
        if equation.piece or equation.effects or not is_simple or len(equation.results) != 1:
            return
        above = [self.cheap.get(value) for value in equation.reads]
        known = [one for one in above if one is not None]
        if len(known) < len(above):
            return
        equations = (*{one.results: one for of in known for one in of}.values(), equation)
        if len(equations) <= _MOST_EQUATIONS:
            self.cheap[equation.results[0]] = equations

    def _is_worth(self, piece: Equation) -> bool:
        (operand,) = piece.operands
        if not isinstance(operand, int) or operand not in self.cheap:
            return False
        aval = self.trace.avals[piece.results[0]]
        return math.prod(aval.shape) * jax_compat.itemsize(aval) >= _LEAST_BYTES

    def _copied(self, piece: Equation) -> int:
        """The value of a constant, computed at the start of an iteration."""
        (operand,) = piece.operands
        assert isinstance(operand, int)
        env: dict[int, Atom] = {}
        times = float(piece.source.params["length"])
        for one in self.builder.copies(self.cheap[operand], env, times):
            self.builder.add(one)
            self._note(one)
        value = env[operand]
        assert isinstance(value, int)
        return value
