"""Map the values of a planned trace to the names that an exported file uses for them.

In: a step's function, its planned trace. Out: `Places`: the name of each value and of each operand. The function is
traced through the exported file's interpreter, which marks each value with its name; apart from the marks, the result
is the planned trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from autopar.code_export import runtime as export_runtime
from autopar.errors import ExportError
from autopar.frontend.equations import Equation
from autopar.frontend.trace import Trace
from autopar.frontend.tracing import trace
from autopar.rules.table import traits_of


@dataclass(frozen=True, slots=True)
class Places:
    """Names of values and operands.

    Args:
        made: value of the trace -> name of the place that produces it.
        read: equation and operand -> name of the operand; outputs of the step have none.
    """

    made: Mapping[int, str]
    read: Mapping[tuple[int, int], str]


def places_of(function: Callable[..., Any], trees: Sequence[Any], planned: Trace) -> Places:
    """Find the names of a step's values.

    Args:
        function: pure function of pytrees of arrays.
        trees: its arguments, or their shapes.
        planned: its planned trace.

    Raises:
        ExportError: the interpreted step differs from the planned trace.
    """
    closed = jax.make_jaxpr(function)(*trees)

    def marked(*args: Any) -> Sequence[Any]:
        return export_runtime.interpret(closed, jax.tree.leaves(args), _mark)

    return _match(trace(marked, trees, names=[f"{n}" for n in range(len(trees))]), planned)


def _mark(place: str, value: Any) -> Any:
    if not hasattr(value, "shape") or jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    return checkpoint_name(value, place)


def _match(marked: Trace, planned: Trace) -> Places:
    """Read the marks of a trace, and match its other equations with the planned ones."""
    same = dict(zip(marked.inputs, planned.inputs, strict=True))
    same |= {own: other for (own, _), (other, _) in zip(marked.constants, planned.constants, strict=False)}
    mark_of: dict[int, str] = {}
    made: dict[int, str] = {}
    read: dict[tuple[int, int], str] = {}
    n = 0
    for equation in marked.equations:
        if equation.primitive == "name":
            (value,), (result,), place = equation.operands, equation.results, equation.source.params["name"]
            mark_of[result] = place
            if not isinstance(value, int) or value not in same:  # a scalar, or a constant of the program
                continue
            same[result] = same[value]
            if ", operand " not in place:
                made.setdefault(same[value], place)  # the producer's mark is first; that at the end of a body is later
            continue
        while n < len(planned.equations) and _of_scalars(planned.equations[n]) and not _of_scalars(equation):
            n += 1  # JAX folds this conversion when it traces the program again
        if n == len(planned.equations) or planned.equations[n].primitive != equation.primitive:
            raise ExportError(
                f"operation {n} of the step is {equation.primitive}, but the plan has another one there, so the plan cannot"
                " be exported: run it by `autopar.parallelize(step, plan=...)`"
            )
        for i, atom in enumerate(equation.operands):
            if isinstance(atom, int) and atom in mark_of:
                read[n, i] = mark_of[atom]
        same.update(zip(equation.results, planned.equations[n].results, strict=True))
        n += 1
    return Places(made, read)


def _of_scalars(equation: Equation) -> bool:
    """Whether an operation converts a scalar literal."""
    return traits_of(equation.primitive).casts and not isinstance(equation.operands[0], int)
