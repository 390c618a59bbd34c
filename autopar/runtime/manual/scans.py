"""Run cumulative operations along a sharded dim: a local scan, then the combination with the preceding shards' totals.

In: inside `jax.shard_map`, the local shard of an array.
Out: the local shard of the result. Only the totals of the shards are communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.manual.part import Part, num_parts, position

_COMBINE: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": jnp.logaddexp,
}


def cumulative(part: Part, x: jax.Array) -> Sequence[jax.Array]:
    """`lax.cumsum` and similar operations, forwards or in reverse."""
    axis, reverse = part.params["axis"], part.params["reverse"]
    axes = part.operands[0].dims[axis]
    (own,) = part.bind([x])
    end = 0 if reverse else x.shape[axis] - 1
    totals = lax.all_gather(lax.slice_in_dim(own, end, end + 1, axis=axis), axes, axis=axis, tiled=True)
    (so_far,) = part.bind([totals])
    here, last = position(axes), num_parts(axes) - 1
    before = here + 1 if reverse else here - 1
    rest = lax.dynamic_slice_in_dim(so_far, jnp.clip(before, 0, last), 1, axis)
    return [jnp.where((before < 0) | (before > last), own, _COMBINE[part.name](jnp.broadcast_to(rest, own.shape), own))]
