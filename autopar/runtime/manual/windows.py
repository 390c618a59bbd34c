"""Run convolutions and poolings on local shards with halo exchange.

In: inside `jax.shard_map`, the local operands of an equation.
Out: the local results; unreduced if the loop over the kernel's elements is sharded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.rules.factors import Rule
from autopar.rules.halo_window import LocalWindow
from autopar.rules.table import rule_for
from autopar.runtime.manual.part import Part, num_parts, position


def _extended(
    part: Part, operands: Sequence[Any], fills: Sequence[Any]
) -> tuple[Rule, list[Any], dict[int, LocalWindow]]:
    """Operands extended by their halos, and the remaining local window by dim of the first operand.

    Args:
        fills: for each operand, the value beyond its edges.
    """
    rule = rule_for(part.view)
    assert rule is not None, f"{part.name} has no rule"
    out, left = list(operands), {}
    for halo in rule.halos:
        axes = part.operands[halo.operand].dims[halo.dim]
        if axes:
            local = halo.window.local(num_parts(axes))
            assert local is not None, f"{part.name} cannot be split over {axes} in {halo.window}"
            out[halo.operand] = _extend(out[halo.operand], halo.dim, local, axes, fills[halo.operand])
            left.setdefault(halo.dim, local)
    return rule, out, left


def _extend(block: Any, dim: int, local: LocalWindow, axes: tuple[str, ...], fill: Any) -> Any:
    own = block.shape[dim]
    if local.reads_own(own):
        return block
    place, last = position(axes), num_parts(axes) - 1

    def beyond(width: int) -> Any:
        return jnp.full((*block.shape[:dim], width, *block.shape[dim + 1 :]), fill, block.dtype)

    def halo_slice(start: int, width: int, shift: int, edge: int) -> Any:
        pairs = [(i, i + shift) for i in range(last + 1) if 0 <= i + shift <= last]
        sent = lax.ppermute(lax.slice_in_dim(block, start, start + width, axis=dim), axes, pairs)
        return sent if fill == 0 else jnp.where(place == edge, beyond(width), sent)  # what nobody sends is zero

    pieces = [beyond(local.outside[0])] if local.outside[0] else []
    pieces += [halo_slice(own - local.low, local.low, 1, 0)] if local.low else []
    pieces += [block]
    pieces += [halo_slice(0, local.high, -1, last)] if local.high else []
    pieces += [beyond(local.outside[1])] if local.outside[1] else []
    whole = _concatenated(pieces, dim, fill)
    if local.step:
        return lax.dynamic_slice_in_dim(whole, local.start + local.step * place, local.length, axis=dim)
    return lax.slice_in_dim(whole, local.start, local.start + local.length, axis=dim)


def _concatenated(pieces: Sequence[Any], dim: int, fill: Any) -> Any:
    """Concatenate pieces along a dim by padding and combining them. XLA fuses this with the producers and prices it
    as a copy; it overestimates a concatenation along any but the first dim by 20 times."""
    starts = [0, *itertools.accumulate(piece.shape[dim] for piece in pieces)]
    over = lax.add if fill == 0 else lax.max if fill < 0 else lax.min
    padded: list[Any] = []
    for piece, start, end in zip(pieces, starts, starts[1:], strict=False):
        config = [(0, 0, 0)] * piece.ndim
        config[dim] = (start, starts[-1] - end, 0)
        padded.append(lax.pad(piece, jnp.asarray(fill, piece.dtype), config))
    return functools.reduce(over, padded)


def convolution(part: Part, *operands: Any) -> Sequence[Any]:
    """`lax.conv_general_dilated` with local padding for sharded spatial dims and local numbers of groups."""
    params = part.view.params
    numbers = params["dimension_numbers"]
    _, blocks, left = _extended(part, operands, (0, 0))
    padding = [left[d].padding if d in left else params["padding"][i] for i, d in enumerate(numbers["lhs_spec"][2:])]
    parts = num_parts(part.operands[1].dims[numbers["rhs_spec"][0]])
    groups = {name: params[name] for name in ("feature_group_count", "batch_group_count")}
    groups = {name: count // parts if count > 1 else 1 for name, count in groups.items()}
    return part.bind(blocks, padding=tuple(padding), **groups)


def pooling(part: Part, operand: Any) -> Sequence[Any]:
    """`lax.reduce_window` with a sum, a maximum or a minimum."""
    _, blocks, left = _extended(part, [operand], [_identity(part.name, operand.dtype)])
    padding = [left[d].padding if d in left else given for d, given in enumerate(part.view.params["padding"])]
    return part.bind(blocks, padding=tuple(padding))


def unpooling(part: Part, gradient: Any, operand: Any) -> Sequence[Any]:
    """`select_and_scatter_add`. All windows that reach into this device's part are whole here; what they add to their
    other parts, the devices there compute themselves."""
    never = "min" if part.view.params["select_prim"] in ("le", "lt") else "max"  # what is never selected
    rule, blocks, left = _extended(part, [gradient, operand], [0, _identity(never, operand.dtype)])
    padding = [(0, 0) if d in left else given for d, given in enumerate(part.view.params["padding"])]
    (result,) = part.bind(blocks, padding=tuple(padding))
    for halo in rule.halos:
        if halo.operand == 1 and halo.dim in left:
            own = operand.shape[halo.dim]
            result = lax.slice_in_dim(result, halo.window.padding, halo.window.padding + own, axis=halo.dim)
    return [result]


def _identity(name: str, dtype: Any) -> Any:
    """The identity element of a sum, a maximum or a minimum."""
    if name.endswith("sum"):
        return 0
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf if name.endswith("max") else jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.min if name.endswith("max") else limits.max
