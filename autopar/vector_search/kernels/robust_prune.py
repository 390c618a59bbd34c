"""Of what is near, what lies in different directions: the rule by which a graph keeps edges, and a vector its lists.

In: near ones, nearest first, and how far all are apart. Out: which are kept. One after the other, nearest first, each
is kept unless one that is kept already is nearer to it than the middle is, by the factor `alpha`. All middles are
decided side by side.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def diverse(far: jax.Array, apart: jax.Array, is_there: jax.Array, alpha: float) -> jax.Array:
    """bool `[n, m]`: which are kept.

    Args:
        far: `[n, m]`: squared distances from each of n middles, none less than the one before it.
        apart: `[n, m, m]`: squared distances between those m. is_there: bool `[n, m]`: what may be kept.
        alpha: of squared distances: 1 keeps fewest.
    """

    def decide(place: jax.Array, is_kept: jax.Array) -> jax.Array:
        to_others = lax.dynamic_index_in_dim(apart, place, axis=1, keepdims=False)
        own = lax.dynamic_index_in_dim(far, place, axis=1)
        is_led_to = jnp.any(is_kept & (alpha * to_others < own), axis=1)
        there = lax.dynamic_index_in_dim(is_there, place, axis=1, keepdims=False)
        return lax.dynamic_update_index_in_dim(is_kept, there & ~is_led_to, place, axis=1)

    return lax.fori_loop(0, far.shape[1], decide, jnp.zeros(far.shape, bool))


def squared_distances(some: jax.Array, others: jax.Array) -> jax.Array:
    """f32 `[n, a, b]`, between `[n, a, d]` and `[n, b, d]`."""
    some, others = some.astype(jnp.float32), others.astype(jnp.float32)
    products = jnp.einsum("nad,nbd->nab", some, others, precision=lax.Precision.HIGHEST)
    found = jnp.sum(some * some, axis=-1)[:, :, None] + jnp.sum(others * others, axis=-1)[:, None, :] - 2 * products
    return jnp.maximum(found, 0)


def unit(vectors: jax.Array) -> jax.Array:
    """f32 `[.., d]`, each of length 1, or 0: of cosine, l2 of these says which is nearer."""
    vectors = vectors.astype(jnp.float32)
    length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.where(length > 0, length, 1)
