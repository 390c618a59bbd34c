"""Shard the heads instead of the sequence around one kernel call, by all-to-alls (DeepSpeed Ulysses, Jacobs et al. 2023).

In: inside `jax.shard_map`, one device's part of queries, keys and values, and the mesh axes that shard the tokens.
Out: its part of the output and the log-sum-exp, or of the gradients.

Key heads that do not divide by the number of devices are repeated up to the least common multiple of both: a device then
receives each key head that its query heads need, in fewer bytes than all heads have. Segment ids are all-gathered.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.context_parallel.blocks import Attention, Gradients, Keys, Output, Queries
from autopar.runtime.manual.part import num_parts


def forward(attention: Attention, queries: Queries, keys: Keys, axes: tuple[str, ...]) -> Output:
    """Attention of the device's queries to all keys."""
    out = attention.own(_heads_of(queries, axes), _heads_of(_repeated(keys, axes), axes))
    return _tokens_of(out.rounded(queries), axes)


def backward(attention: Attention, queries: Queries, keys: Keys, axes: tuple[str, ...]) -> Gradients:
    """The gradients of the device's queries, keys and values."""
    gradients = attention.own_gradients(_heads_of(queries, axes), _heads_of(_repeated(keys, axes), axes))
    query, key, value = _tokens_of(gradients.rounded(queries), axes)
    return Gradients(query, _summed(key, keys.key), _summed(value, keys.value))


def _heads_of(tree: Any, axes: tuple[str, ...]) -> Any:
    """All tokens of the device's heads, from its tokens of all heads."""

    def moved(x: jax.Array) -> jax.Array:
        if x.ndim == 2:  # segment ids
            return lax.all_gather(x, axes, axis=1, tiled=True)
        return lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)

    return jax.tree.map(moved, tree)


def _tokens_of(tree: Any, axes: tuple[str, ...]) -> Any:
    """The device's tokens of all heads, from all tokens of its heads."""
    return jax.tree.map(lambda x: lax.all_to_all(x, axes, split_axis=1, concat_axis=2, tiled=True), tree)


def _repeated(keys: Keys, axes: tuple[str, ...]) -> Keys:
    """Keys and values with a number of heads that divides by the number of devices."""
    num_heads = keys.key.shape[2]
    times = math.lcm(num_heads, num_parts(axes)) // num_heads
    if times == 1:
        return keys
    return keys._replace(key=jnp.repeat(keys.key, times, 2), value=jnp.repeat(keys.value, times, 2))


def _summed(gradient: jax.Array, operand: jax.Array) -> jax.Array:
    """The gradient of keys or values from that of their repeated heads."""
    if gradient.shape == operand.shape:
        return gradient
    parts = gradient.reshape(*operand.shape[:3], -1, operand.shape[3])
    return jnp.sum(parts, axis=3, dtype=jnp.promote_types(gradient.dtype, jnp.float32)).astype(gradient.dtype)
