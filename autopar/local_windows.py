"""Convolutions and poolings on one device's part, with what its neighbours send of theirs.

In: inside a manual region, one equation's operands as this device has them. Out: its part of the results; where the loop
over a kernel's elements is split, its part of their sum.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar import jax_compat
from autopar.plan import Region
from autopar.rules.factors import Rule
from autopar.rules.registry import NodeView
from autopar.rules.window import LocalWindow


@dataclass(frozen=True, slots=True)
class Part:
    """One equation in a region: what it is, how it is split, and over how many devices each axis goes."""

    equation: Any
    view: NodeView
    rule: Rule
    region: Region
    sizes: Mapping[str, int]

    def num_parts(self, axes: Sequence[str]) -> int:
        parts = 1
        for axis in axes:
            parts *= self.sizes[axis]
        return parts

    def bind(self, operands: Sequence[Any], **changed: Any) -> Sequence[Any]:
        """The primitive itself on this device's operands."""
        return jax_compat.bind(self.equation, operands, **changed)

    def extended(self, operands: Sequence[Any], fills: Sequence[Any]) -> tuple[list[Any], dict[int, LocalWindow]]:
        """Operands with the strips of their neighbours, and the window that is left to do by dim of the first one.

        Args:
            fills: of each operand, what lies beyond its edges.
        """
        out, left = list(operands), {}
        for halo in self.rule.halos:
            axes = self.region.operands[halo.operand].dims[halo.dim]
            if axes:
                local = halo.window.local(self.num_parts(axes))
                assert local is not None, f"{self.view.primitive} cannot be split over {axes} in {halo.window}"
                out[halo.operand] = _extend(
                    out[halo.operand], halo.dim, local, axes, self.num_parts(axes), fills[halo.operand]
                )
                left.setdefault(halo.dim, local)
        return out, left


def _extend(block: Any, dim: int, local: LocalWindow, axes: tuple[str, ...], num_parts: int, fill: Any) -> Any:
    own = block.shape[dim]
    if local.reads_own(own):
        return block
    place = lax.axis_index(axes)

    def beyond(width: int) -> Any:
        return jnp.full((*block.shape[:dim], width, *block.shape[dim + 1 :]), fill, block.dtype)

    def strip(start: int, width: int, shift: int, edge: int) -> Any:
        pairs = [(i, i + shift) for i in range(num_parts) if 0 <= i + shift < num_parts]
        sent = lax.ppermute(lax.slice_in_dim(block, start, start + width, axis=dim), axes, pairs)
        return sent if fill == 0 else jnp.where(place == edge, beyond(width), sent)  # what nobody sends is zero

    pieces = [beyond(local.outside[0])] if local.outside[0] else []
    pieces += [strip(own - local.low, local.low, 1, 0)] if local.low else []
    pieces += [block]
    pieces += [strip(0, local.high, -1, num_parts - 1)] if local.high else []
    pieces += [beyond(local.outside[1])] if local.outside[1] else []
    whole = _joined(pieces, dim, fill)
    if local.step:
        return lax.dynamic_slice_in_dim(whole, local.start + local.step * place, local.length, axis=dim)
    return lax.slice_in_dim(whole, local.start, local.start + local.length, axis=dim)


def _joined(pieces: Sequence[Any], dim: int, fill: Any) -> Any:
    """Pieces side by side: each padded, all laid over each other. XLA fuses that with what makes them, and takes it for
    what it is, a copy; a concatenation along any but the first dim it takes for 20 times the work."""
    starts = [0, *itertools.accumulate(piece.shape[dim] for piece in pieces)]
    over = lax.add if fill == 0 else lax.max if fill < 0 else lax.min
    padded: list[Any] = []
    for piece, start, end in zip(pieces, starts, starts[1:], strict=False):
        config = [(0, 0, 0)] * piece.ndim
        config[dim] = (start, starts[-1] - end, 0)
        padded.append(lax.pad(piece, jnp.asarray(fill, piece.dtype), config))
    return functools.reduce(over, padded)


def _convolution(part: Part, operands: Sequence[Any]) -> Sequence[Any]:
    params = part.view.params
    numbers = params["dimension_numbers"]
    blocks, left = part.extended(operands, (0, 0))
    padding = [left[d].padding if d in left else params["padding"][i] for i, d in enumerate(numbers["lhs_spec"][2:])]
    parts = part.num_parts(part.region.operands[1].dims[numbers["rhs_spec"][0]])
    groups = {name: params[name] for name in ("feature_group_count", "batch_group_count")}
    groups = {name: count // parts if count > 1 else 1 for name, count in groups.items()}
    return part.bind(blocks, padding=tuple(padding), **groups)


def _pooling(part: Part, operands: Sequence[Any], fill: str) -> Sequence[Any]:
    blocks, left = part.extended(operands, (_limit(operands[0].dtype, fill),))
    padding = [left[d].padding if d in left else given for d, given in enumerate(part.view.params["padding"])]
    return part.bind(blocks, padding=tuple(padding))


def _unpooling(part: Part, operands: Sequence[Any]) -> Sequence[Any]:
    """All windows that reach into this device's part are whole here; what they add to their other parts, the devices
    there compute themselves."""
    never = "highest" if part.view.params["select_prim"] in ("le", "lt") else "lowest"  # never selected
    blocks, left = part.extended(operands, (0, _limit(operands[1].dtype, never)))
    padding = [(0, 0) if d in left else given for d, given in enumerate(part.view.params["padding"])]
    (result,) = part.bind(blocks, padding=tuple(padding))
    for halo in part.rule.halos:
        if halo.operand == 1 and halo.dim in left:
            own = operands[1].shape[halo.dim]
            result = lax.slice_in_dim(result, halo.window.padding, halo.window.padding + own, axis=halo.dim)
    return [result]


def _limit(dtype: Any, kind: str) -> Any:
    if kind == "zero":
        return 0
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf if kind == "lowest" else jnp.inf
    limits = jnp.iinfo(dtype)
    return limits.min if kind == "lowest" else limits.max


#: How an equation's own part of the results is computed from the parts of its operands.
LOCAL: Mapping[str, Callable[[Part, Sequence[Any]], Sequence[Any]]] = MappingProxyType(
    {
        "conv_general_dilated": _convolution,
        "reduce_window_sum": functools.partial(_pooling, fill="zero"),
        "reduce_window_max": functools.partial(_pooling, fill="lowest"),
        "reduce_window_min": functools.partial(_pooling, fill="highest"),
        "select_and_scatter_add": _unpooling,
    }
)
