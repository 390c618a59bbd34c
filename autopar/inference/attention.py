"""Where a decoder's keys and values go, and what its queries see of them.

The decoder makes queries, keys and values of new tokens, and hands them to an `Attend` with a cache that is the caller's: any
pytree. It comes back with the new tokens in it. Here are the two that need nothing else: over a whole sequence without a
cache, and over one contiguous array for each of keys and values. Pages are another `Attend`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from autopar.inference.config import DecoderConfig


class Attend(Protocol):
    """Attention of one layer."""

    def __call__(
        self, cache: Any, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Take the new tokens' keys and values, and attend.

        Args:
            cache: as the layer before returned it.
            queries: [batch, tokens, heads, head_dim], turned by their positions; not scaled.
            keys, values: [batch, tokens, kv_heads, head_dim] of the same tokens. Head h of the queries reads head
                h // (heads / kv_heads) of these.

        Returns:
            What is attended to, shaped as the queries; and the cache.
        """
        ...


def attend_causally(
    cache: Any, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, Any]:
    """Whole sequences: each token sees itself and those before. The cache is passed through."""
    return jax.nn.dot_product_attention(queries, keys, values, is_causal=True), cache


class ContiguousCache(NamedTuple):
    """Keys and values, each [layers, batch, length, kv_heads, head_dim]; of positions not yet written, anything finite."""

    keys: jax.Array
    values: jax.Array

    @classmethod
    def empty(cls, config: DecoderConfig, batch: int, length: int, dtype: Any = jnp.float32) -> ContiguousCache:
        """Room for `length` tokens of each sequence."""
        shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class AttendContiguous:
    """New tokens at their positions in a `ContiguousCache`; each sees all positions up to its own."""

    def __init__(self, positions: jax.Array) -> None:
        """Of one call of the decoder.

        Args:
            positions: int, [batch, tokens]; all before them are in the cache. What is at or past the cache's end (a slot
                without a sequence) is not written.
        """
        self.positions = positions

    def __call__(
        self, cache: ContiguousCache, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, ContiguousCache]:
        """As `Attend` says."""
        rows = jnp.arange(self.positions.shape[0])[:, None]
        place = (layer, rows, self.positions)
        cache = ContiguousCache(
            cache.keys.at[place].set(keys.astype(cache.keys.dtype), mode="drop"),
            cache.values.at[place].set(values.astype(cache.values.dtype), mode="drop"),
        )
        seen = jnp.arange(cache.keys.shape[2]) <= self.positions[:, None, :, None]  # [batch, 1, tokens, length]
        stored = (cache.keys[layer].astype(queries.dtype), cache.values[layer].astype(queries.dtype))
        return jax.nn.dot_product_attention(queries, *stored, mask=seen), cache
