"""Read and write windows of a tensor along sharded dims: each device handles its part of the window.

In: inside `jax.shard_map`, the local shard of a tensor and the start of the window in the whole.
Out: for a read, the window with zeros where other devices have it; for a write, the local shard. A start beyond the
last valid position is clamped, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.manual.part import Part, num_parts, position


def dynamic_slice(part: Part, x: jax.Array, *starts: jax.Array) -> Sequence[jax.Array]:
    """`lax.dynamic_slice`: one term of a sum over devices."""
    whole = part.params["slice_sizes"]
    axes = part.operands[0].dims
    cut = [d for d in range(x.ndim) if axes[d] and x.shape[d] * num_parts(axes[d]) != whole[d]]
    sizes = [size if d in cut or axes[d] else whole[d] for d, size in enumerate(x.shape)]
    raw, typed = _raw(x)
    begin = [jnp.int32(0) if axes[d] else _clamped(start, x.shape[d] - whole[d]) for d, start in enumerate(starts)]
    words = raw.shape[x.ndim :]
    taken = lax.dynamic_slice(raw, [*begin, *[jnp.int32(0)] * len(words)], [*sizes, *words])
    for d in cut:
        size = x.shape[d]
        start = _clamped(starts[d], size * num_parts(axes[d]) - whole[d])
        places = start + jnp.arange(whole[d], dtype=jnp.int32) - position(axes[d]) * size
        is_inside = _along((places >= 0) & (places < size), d, taken.ndim)
        taken = jnp.where(is_inside, jnp.take(taken, places, axis=d, mode="clip"), jnp.zeros((), taken.dtype))
    return [typed(taken)]


def dynamic_update_slice(part: Part, x: jax.Array, update: jax.Array, *starts: jax.Array) -> Sequence[jax.Array]:
    """`lax.dynamic_update_slice`. It reads and writes only a window of the shard, so the rest may stay in place."""
    axes = part.operands[0].dims
    cut = [d for d in range(x.ndim) if axes[d] and not part.operands[1].dims[d]]
    sizes = [min(size, x.shape[d]) for d, size in enumerate(update.shape)]
    begin = [_clamped(start, x.shape[d] - sizes[d]) for d, start in enumerate(starts)]
    mask = jnp.ones((1,) * x.ndim, bool)
    for d in cut:
        size, window = x.shape[d], update.shape[d]
        start = _clamped(starts[d], size * num_parts(axes[d]) - window) - position(axes[d]) * size
        begin[d] = jnp.clip(start, 0, size - sizes[d])
        places = begin[d] - start + jnp.arange(sizes[d], dtype=jnp.int32)
        mask &= _along((places >= 0) & (places < window), d, x.ndim)
        update = jnp.take(update, places, axis=d, mode="clip")
    new = jnp.where(mask, update, lax.dynamic_slice(x, begin, sizes))
    return [lax.dynamic_update_slice(x, new, begin)]


def _clamped(start: jax.Array, last: int) -> jax.Array:
    return jnp.clip(_as_int32(start), 0, last)


def _as_int32(start: jax.Array) -> jax.Array:
    """The start as int32; a value beyond the range of int32 is clamped."""
    start = jnp.asarray(start)
    limits, own = jnp.iinfo(jnp.int32), jnp.iinfo(start.dtype)
    if own.max > limits.max:
        start = jnp.minimum(start, limits.max)
    if own.min < limits.min:
        start = jnp.maximum(start, limits.min)
    return start.astype(jnp.int32)


def _along(mask: jax.Array, dim: int, rank: int) -> jax.Array:
    return mask.reshape([-1 if d == dim else 1 for d in range(rank)])


def _raw(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """An array that can be added to zeros, and the inverse: for PRNG keys their raw data."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x, lambda raw: raw
    return jax.random.key_data(x), lambda raw: jax.random.wrap_key_data(raw, impl=jax.random.key_impl(x))
