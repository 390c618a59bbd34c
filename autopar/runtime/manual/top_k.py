"""Run top-k along a sharded dim: a local top-k, an all-gather of the candidates, and a final top-k.

In: inside `jax.shard_map`, the local shard of an array.
Out: the primitive's result for the whole array, on every device. Ties and NaNs have the same order as on one device, as
each local result keeps its order and the candidates are concatenated in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.manual.part import Part, num_parts, position


def sharded_top_k(part: jax.Array, k: int, axes: tuple[str, ...], *, axis: int = -1) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` along a dim that is sharded evenly over mesh axes.

    Args:
        part: the local shard, `[..., size / devices, ...]`.
        k: the k of the whole dim; may be larger than the shard.
        axes: mesh axes, major first.
        axis: the dim.

    Returns:
        Values and their positions in the whole dim, `[..., k, ...]`. Each device sends `min(k, shard size)` candidates
        per row.
    """
    axis %= part.ndim
    values, indices = _top_k(part, min(k, part.shape[axis]), axis)
    values, indices = _gather_candidates(values, indices, part.shape[axis], axes, axis)
    values, places = _top_k(values, k, axis)
    return values, jnp.take_along_axis(indices, places, axis)


def top_k(part: Part, x: jax.Array) -> Sequence[jax.Array]:
    """`lax.top_k`."""
    axis = part.params["axis"]
    return sharded_top_k(x, part.params["k"], part.operands[0].dims[axis], axis=axis)


def approx_top_k(part: Part, x: jax.Array) -> Sequence[jax.Array]:
    """`lax.approx_max_k` and `approx_min_k`: approximate in each shard as in the whole, then exact."""
    params = part.params
    axis, k, size = params["reduction_dimension"] % x.ndim, params["k"], x.shape[params["reduction_dimension"]]
    axes = part.operands[0].dims[axis]
    of_part = lax.approx_max_k if params["is_max_k"] else lax.approx_min_k
    override = params["reduction_input_size_override"]
    values, indices = of_part(
        x,
        min(k, size),
        reduction_dimension=axis,
        recall_target=params["recall_target"],
        reduction_input_size_override=override if override > 0 else size * num_parts(axes),
    )
    values, indices = _gather_candidates(values, indices, size, axes, axis)
    _, places = lax.top_k(values if params["is_max_k"] else -values, k, axis=axis)
    return jnp.take_along_axis(values, places, axis), jnp.take_along_axis(indices, places, axis)


def arg_extreme(part: Part, x: jax.Array) -> Sequence[jax.Array]:
    """`lax.argmax` and `lax.argmin`; `part.bind` is one of them."""
    (axis,) = part.params["axes"]
    axes = part.operands[0].dims[axis]
    (index,) = part.bind([x])
    value = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(index, axis), axis), axis)
    values, indices = _gather_candidates(value[None], index[None], x.shape[axis], axes, 0)
    of_all = lax.argmin if _is_min(part) else lax.argmax
    best = of_all(values, 0, index.dtype)
    return [jnp.take_along_axis(indices, best[None], 0)[0]]


def _top_k(x: jax.Array, k: int, axis: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` on the rows of a matrix if possible: for more dims XLA's CPU backend sorts everything."""
    if axis != x.ndim - 1 or x.ndim < 3 or not x.size:
        values, indices = lax.top_k(x, k, axis=axis)
        return values, indices
    values, indices = lax.top_k(x.reshape(-1, x.shape[-1]), k)
    shape = (*x.shape[:-1], k)
    return values.reshape(shape), indices.reshape(shape)


def _is_min(part: Part) -> bool:
    return part.name == "argmin"


def _gather_candidates(values: Any, indices: Any, size: int, axes: tuple[str, ...], dim: int) -> tuple[Any, Any]:
    """The candidates of all shards along a dim, with positions in the whole."""
    indices = indices + (position(axes) * size).astype(indices.dtype)
    return tuple(lax.all_gather(each, axes, axis=dim, tiled=True) for each in (values, indices))  # type: ignore[return-value]
