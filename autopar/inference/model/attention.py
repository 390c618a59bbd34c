"""Define how a decoder stores keys and values, and compute attention over them.

In: the queries, keys and values of new tokens, and a KV cache, which can be any pytree of the caller. Out: the attention
outputs, and the cache with the new tokens. The interface is `Attend`. This module has two implementations: causal
attention over whole sequences without a cache, and attention over a contiguous cache. `step` has the one over pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.kv_cache.scores import PLAIN, Scores
from autopar.inference.model.config import DecoderConfig


class Attend(Protocol):
    """The attention of one layer."""

    def __call__(
        self, cache: Any, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array, scores: Scores
    ) -> tuple[jax.Array, Any]:
        """Store the keys and values of the new tokens, and attend to the cache.

        Args:
            cache: the cache that the layer before returned.
            queries: [batch, tokens, heads, head_dim], after the rotary embedding; not scaled.
            keys, values: [batch, tokens, kv_heads, head_dim] of the same tokens. Query head h reads key head
                h // (heads / kv_heads).
            scores: how dot products become weights.

        Returns:
            The outputs, in the shape of the queries; and the cache.
        """
        ...


def attend_causally(
    cache: Any, layer: int, queries: jax.Array, keys: jax.Array, values: jax.Array, scores: Scores = PLAIN
) -> tuple[jax.Array, Any]:
    """Attend causally within whole sequences. The cache is returned unchanged."""
    if scores == PLAIN:
        return jax.nn.dot_product_attention(queries, keys, values, is_causal=True), cache
    positions = jnp.broadcast_to(jnp.arange(queries.shape[1]), queries.shape[:2])
    return kv_pages.attend(queries, keys, values, positions, scores), cache


class ContiguousCache(NamedTuple):
    """The keys and values of each layer; each array is [batch, length, kv_heads, head_dim]."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def empty(cls, config: DecoderConfig, batch: int, length: int, dtype: Any = jnp.float32) -> ContiguousCache:
        """A cache of zeros for `length` tokens of each sequence."""
        shape = (batch, length, config.num_kv_heads, config.head_dim)
        keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
        return cls(keys, values)


class AttendContiguous:
    """Causal attention over a `ContiguousCache`, to which the new tokens are written.

    Args:
        positions: int, [batch, tokens], of the new tokens; all earlier positions are in the cache. Negative ones are
            padding. Padding, and tokens past the end of the cache, are not written, and their outputs are meaningless.
    """

    def __init__(self, positions: jax.Array) -> None:
        self.positions = positions

    def __call__(
        self,
        cache: ContiguousCache,
        layer: int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        scores: Scores = PLAIN,
    ) -> tuple[jax.Array, ContiguousCache]:
        """See `Attend`."""
        keys, values = self._written(cache.keys[layer], keys), self._written(cache.values[layer], values)
        stored = (keys.astype(queries.dtype), values.astype(queries.dtype))
        cache = ContiguousCache(_replaced(cache.keys, layer, keys), _replaced(cache.values, layer, values))
        return kv_pages.attend(queries, *stored, self.positions, scores), cache

    def _written(self, stored: jax.Array, new: jax.Array) -> jax.Array:
        rows = jnp.arange(new.shape[0])[:, None]
        positions = jnp.where(self.positions < 0, stored.shape[1], self.positions)
        return stored.at[rows, positions].set(new.astype(stored.dtype), mode="drop")


def _replaced(layers: tuple[jax.Array, ...], layer: int, array: jax.Array) -> tuple[jax.Array, ...]:
    return (*layers[:layer], array, *layers[layer + 1 :])
