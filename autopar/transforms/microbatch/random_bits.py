"""Expand `random_bits`, so that each microbatch draws exactly the bits of its own examples.

In: `Trace`. Out: `Trace` in which random bits are computed from the positions of their elements, by JAX's own
equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.frontend.equations import Item, Nest, items_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder
from autopar.jax_interop import compat as jax_compat


def with_drawn_bits(trace: Trace, size: int) -> Trace:
    """The trace with the random bits of examples expanded; the same trace if it has none.

    Args:
        size: number of examples. Bits belong to examples if one of their dims is a multiple of it.
    """
    builder = TraceBuilder(trace)

    def write(items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, Nest):
                builder.add(replace(item, sections=builder.sections(item.sections, write)))
                continue
            draws = item.primitive == "random_bits" and any(d and d % size == 0 for d in item.source.params["shape"])
            program = jax_compat.drawn_bits(item.source) if draws else None
            if program is None:
                builder.add(item)
            else:
                (made,) = builder.inline(item, jax_compat.open_jaxpr(program)[0], item.operands)
                builder.name(made, item.results[0])

    write(items_of(trace.equations, trace.regions))
    return trace if len(builder.avals) == len(trace.avals) else builder.finish()
