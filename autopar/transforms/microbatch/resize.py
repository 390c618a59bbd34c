"""Run an equation on a part of the batch.

In: JAX's equation, and the shapes of its operands and results for the part. Out: a function of the part's operands, to
be traced (`jax_compat.staged`). Most primitives take their shapes from their operands; the table below lists the
parameters of the others that hold sizes. The code that traces the function refuses a result of an unexpected shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.frontend.kernel_loops import loops_of, part_params
from autopar.jax_interop import compat as jax_compat
from autopar.rules.elementwise import ELEMENTWISE

Shape = tuple[int, ...]
#: From an equation, the whole shapes of its operands, and the part's operand and result shapes: the parameters to change.
_Changed = Callable[[Any, Sequence[Shape], Sequence[Shape], Sequence[Shape]], Mapping[str, Any]]


def resized(source: Any, operands: Sequence[Any], whole: Sequence[Shape], results: Sequence[Shape]) -> Sequence[Any]:
    """Run an equation on a part of the batch.

    Args:
        operands: operands of the part.
        whole: shapes of the whole operands.
        results: shapes of the part's results.
    """
    change = _SIZES.get(source.primitive.name)
    shapes = [getattr(operand, "shape", ()) for operand in operands]
    changed = change(source, whole, shapes, results) if change else {}
    return jax_compat.bind(source.replace(params={**source.params, **changed}), operands)


def is_as_written(source: Any) -> bool:
    """Whether the equation runs on a part unchanged: an elementwise operation whose parameters hold no sizes."""
    return source.primitive.name in ELEMENTWISE and not any(isinstance(v, tuple) for v in source.params.values())


def _result(name: str) -> _Changed:
    return lambda source, whole, part, results: {name: tuple(results[0])}


def _sliced(source: Any, whole: Sequence[Shape], part: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    limits = [
        local if local != size else limit
        for limit, size, local in zip(source.params["limit_indices"], whole[0], part[0], strict=True)
    ]
    return {"limit_indices": tuple(limits)}


def _taken(source: Any, whole: Sequence[Shape], part: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    """Shrink `slice_sizes` to the part's size in the dims that a slice takes whole."""
    sizes = [
        local if local != size and taken == size else taken
        for taken, size, local in zip(source.params["slice_sizes"], whole[0], part[0], strict=True)
    ]
    return {"slice_sizes": tuple(sizes)}


def _kernel(source: Any, whole: Sequence[Shape], part: Sequence[Shape], results: Sequence[Shape]) -> Mapping[str, Any]:
    return part_params(source.params, loops_of(source), [v.aval.shape for v in source.outvars], part, results)


_SIZES: dict[str, _Changed] = {
    "broadcast_in_dim": _result("shape"),
    "iota": _result("shape"),
    "empty": _result("shape"),
    "reshape": _result("new_sizes"),
    "slice": _sliced,
    "dynamic_slice": _taken,
    "gather": _taken,
    "pallas_call": _kernel,
}
