"""Where in a step, as an exported file names places, the values stand that a plan splits.

In: a step's function, and its trace as the planner has it. Out: `Places`: by value and by operand the place's name.
The function is run as an exported file runs it, with a mark on each value that it names; traced like any step, this is
the planner's trace with marks in it.
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
    """Names of places.

    Args:
        made: by value of the trace, where it is made. read: by equation and operand, where it is read; outputs of the
            step are no place.
    """

    made: Mapping[int, str]
    read: Mapping[tuple[int, int], str]


def places_of(function: Callable[..., Any], trees: Sequence[Any], planned: Trace) -> Places:
    """The places of a step.

    Args:
        function: pure, of trees of arrays. trees: its arguments, or their shapes.
        planned: its trace.

    Raises:
        ExportError: where the step, run operation by operation, is another program.
    """
    closed = jax.make_jaxpr(function)(*trees)

    def marked(*args: Any) -> Sequence[Any]:
        return export_runtime.interpret(closed, jax.tree.leaves(args), _mark)

    return _placed(trace(marked, trees, names=[f"{n}" for n in range(len(trees))]), planned)


def _mark(place: str, value: Any) -> Any:
    if not hasattr(value, "shape") or jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    return checkpoint_name(value, place)


def _placed(marked: Trace, planned: Trace) -> Places:
    """Take the marks out of a trace, and hold what is left against the planned one."""
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
            if not isinstance(value, int) or value not in same:  # a scalar or a constant of the program
                continue
            same[result] = same[value]
            if ", operand " not in place and ", gives " not in place:
                made.setdefault(same[value], place)
            continue
        while n < len(planned.equations) and _of_scalars(planned.equations[n]) and not _of_scalars(equation):
            n += 1  # run again, JAX has done it while tracing
        if n == len(planned.equations) or planned.equations[n].primitive != equation.primitive:
            raise ExportError(
                f"operation {n} is a {equation.primitive} where the plan has another: this cannot be exported"
            )
        for i, atom in enumerate(equation.operands):
            if isinstance(atom, int) and atom in mark_of:
                read[n, i] = mark_of[atom]
        same.update(zip(equation.results, planned.equations[n].results, strict=True))
        n += 1
    return Places(made, read)


def _of_scalars(equation: Equation) -> bool:
    """Whether an operation converts a scalar that is written into the program."""
    return traits_of(equation.primitive).casts and not isinstance(equation.operands[0], int)
