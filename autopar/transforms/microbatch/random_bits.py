"""Random bits, laid open.

In: `Trace`. Out: `Trace` in which random bits are drawn as JAX draws them, from the positions of their places: a
microbatch then draws the very bits of its own examples, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.frontend.equations import Equation, Item, Nest, items_of, laid
from autopar.frontend.flat_jaxpr import Flattener
from autopar.frontend.trace import Trace
from autopar.jax_interop import compat as jax_compat


def with_drawn_bits(trace: Trace, size: int) -> Trace:
    """The trace with the bits of examples laid open; itself where there are none.

    Args:
        size: number of examples; bits in whose shape it does not go are none of examples'.
    """
    flat = Flattener()
    flat.avals, flat.repeats = list(trace.avals), list(trace.repeats)

    def opened(items: Sequence[Item]) -> list[Item]:
        out: list[Item] = []
        for item in items:
            if isinstance(item, Nest):
                out.append(replace(item, sections=[opened(section) for section in item.sections]))
                continue
            draws = item.primitive == "random_bits" and any(d and d % size == 0 for d in item.source.params["shape"])
            program = jax_compat.drawn_bits(item.source) if draws else None
            out += [item] if program is None else _drawn(flat, item, program)
        return out

    items = opened(items_of(trace.equations, trace.regions))
    if len(flat.avals) == len(trace.avals):
        return trace
    equations, regions = laid(items)
    avals, repeats = tuple(flat.avals), tuple(flat.repeats)
    return replace(trace, equations=equations, regions=regions, avals=avals, repeats=repeats)


def _drawn(flat: Flattener, equation: Equation, program: Any) -> list[Item]:
    flat.items, flat.repeat = [], equation.repeat
    jaxpr, _ = jax_compat.open_jaxpr(program)
    (made,) = flat.inline(jaxpr, dict(zip(jaxpr.invars, equation.operands, strict=True)), None)
    out: list[Item] = []
    for one in flat.items:
        assert isinstance(one, Equation), "bits are drawn without a loop"
        results = tuple(equation.results[0] if v == made else v for v in one.results)
        source = jax_compat.placed_as(one.source, equation.source)
        out.append(replace(equation, source=source, operands=one.operands, results=results))
    return out
