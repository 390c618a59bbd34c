"""Find the weights of a stage among its state, and the value that each is updated to.

In: the layout of a stage, its outputs, and its pieces. Out: `updated_weights`, `read_by_backward`.

A weight is floating-point state that passes read, and whose next value is computed from itself and from what the microbatches
have computed. What is computed from the next value of another weight alone, such as an average of weights, is none; nor is what
gradients only decide about, such as the scale of a loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.errors import ScheduleError
from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.cut.extract_stages import LeafKey, Port
from autopar.pipeline.cut.pieces import Layout, Pieces


def updated_weights(
    layout: Layout, outputs: Sequence[Port], carried: Mapping[LeafKey, LeafKey], names: Mapping[int, str]
) -> dict[int, int]:
    """For each weight of a stage, the value that it is updated to and the value of the argument.

    Args:
        outputs: the ports of the stage's outputs.
        carried: the result that replaces each carried argument.
        names: the path of each argument, for errors.

    Raises:
        ScheduleError: a weight is computed from other state than itself, such as a copy in a higher precision.
    """
    trace = layout.trace
    argument_of = {result: argument for argument, result in carried.items()}
    taken = {port.leaf: value for value, port in layout.inputs.items() if port.kind == "argument"}
    read = _before(layout, (layout.trace.equations[n].operands[0] for n in layout.enters))
    updated: dict[int, int] = {}
    for port, value in zip(outputs, trace.outputs, strict=True):
        carries = port.kind == "result" and port.leaf in argument_of
        old = taken.get(argument_of[port.leaf]) if carries else None
        if isinstance(value, int) and old in read and old != value and _is_floating(layout, value):
            updated[value] = old
    bits = {old: 1 << n for n, old in enumerate(updated.values())}
    of_loop = {v for n in (*layout.carries.values(), *layout.stacks) for v in trace.equations[n].results}
    found: dict[int, int] = {}
    for unit in layout.outside:
        reads = [v for v in unit.operands if _is_floating(layout, v)]
        from_loop, mask = not of_loop.isdisjoint(reads), 0
        for value in reads:
            mask |= bits.get(value, 0)
        for value in (v for v in unit.results if _is_floating(layout, v)):
            bits[value] = mask
            old = updated.get(value)
            if old is None or not from_loop:
                of_loop.update([value] if from_loop else [])
                continue
            if not mask & bits[old]:
                raise _computed_from_others(layout, value, names[layout.inputs[old].leaf[0]])
            found[value] = old
    return found


def read_by_backward(layout: Layout, pieces: Pieces, weights: Collection[int]) -> frozenset[int]:
    """Those of some arguments from which backward passes compute, be it after a conversion."""
    entered = {layout.trace.equations[n].results[0]: layout.trace.equations[n].operands[0] for n in layout.enters}
    taken = (slot.value for name, piece in pieces.each.items() if name.startswith("backward") for slot in piece.takes)
    return _before(layout, (entered.get(value, value) for value in taken)).intersection(weights)


def _before(layout: Layout, values: Iterable[Any]) -> frozenset[int]:
    """The values outside the loop from which some are computed, these included."""
    found = {v for v in values if isinstance(v, int)}
    for unit in reversed(layout.outside):
        if not found.isdisjoint(unit.results):
            found.update(unit.operands)
    return frozenset(found)


def _is_floating(layout: Layout, value: int) -> bool:
    return jnp.issubdtype(layout.trace.avals[value].dtype, jnp.inexact)


def _computed_from_others(layout: Layout, value: int, name: str) -> ScheduleError:
    producer = layout.trace.producers.get(value)
    line = jax_compat.user_source(layout.trace.equations[producer].source) if producer is not None else ""
    return ScheduleError(
        f"the weights `{name}` are computed at {line or 'an unknown line'} from other state, such as a copy in a higher precision."
        " PipeMare scales the change of each weight, and the other copy would change by the whole: keep one copy, and convert it"
        " where the loss is computed, or take another `consistency`"
    )
