"""Where a decoder's keys and values go, and what its queries see of them.

The decoder makes queries, keys and values of new tokens, and hands them to an `Attend` with a cache that is the caller's: any
pytree. It comes back with the new tokens in it. Here are the two that need nothing else: over a whole sequence without a
cache, and over contiguous arrays, one of keys and one of values for each layer. Pages are another `Attend`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.model.config import DecoderConfig


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
    """Keys and values of each layer, each array [batch, length, kv_heads, head_dim]."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def empty(cls, config: DecoderConfig, batch: int, length: int, dtype: Any = jnp.float32) -> ContiguousCache:
        """Room for `length` tokens of each sequence."""
        shape = (batch, length, config.num_kv_heads, config.head_dim)
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
        return cls(keys, values)


class AttendContiguous:
    """New tokens at their positions in a `ContiguousCache`; each sees all positions up to its own."""

    def __init__(self, positions: jax.Array) -> None:
        """Of one call of the decoder.

        Args:
            positions: int, [batch, tokens]; all before them are in the cache. Negative ones are padding: these tokens, and
                those past the cache's end, are not written, and what comes out for them is of no worth.
        """
        self.positions = positions

    def __call__(
        self, cache: ContiguousCache, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array
    ) -> tuple[jax.Array, ContiguousCache]:
        """As `Attend` says."""
        keys, values = self._written(cache.keys[layer], keys), self._written(cache.values[layer], values)
        stored = (keys.astype(queries.dtype), values.astype(queries.dtype))
        cache = ContiguousCache(_replaced(cache.keys, layer, keys), _replaced(cache.values, layer, values))
        return kv_pages.attend(queries, *stored, self.positions), cache

    def _written(self, stored: jax.Array, new: jax.Array) -> jax.Array:
        rows = jnp.arange(new.shape[0])[:, None]
        places = jnp.where(self.positions < 0, stored.shape[1], self.positions)
        return stored.at[rows, places].set(new.astype(stored.dtype), mode="drop")


def _replaced(layers: tuple[jax.Array, ...], layer: int, array: jax.Array) -> tuple[jax.Array, ...]:
    return (*layers[:layer], array, *layers[layer + 1 :])
