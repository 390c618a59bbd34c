"""Prune neighbours that lie in the same direction: the robust-prune rule of graph edges and of closure lists.

In: candidates sorted by distance, and their pairwise distances. Out: which candidates are kept. In order of distance, a
candidate is kept unless a kept one is nearer to it than the node is, by the factor `alpha`. All nodes run in parallel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def robust_prune(distances: jax.Array, pairwise: jax.Array, is_valid: jax.Array, alpha: float) -> jax.Array:
    """bool `[n, m]`: which candidates are kept.

    Args:
        distances: `[n, m]`, squared distances from each of n nodes, ascending.
        pairwise: `[n, m, m]`, squared distances between the candidates.
        is_valid: bool `[n, m]`, valid candidates.
        alpha: factor on squared distances; 1 keeps the fewest.
    """

    def decide(place: jax.Array, is_kept: jax.Array) -> jax.Array:
        to_kept = lax.dynamic_index_in_dim(pairwise, place, axis=1, keepdims=False)
        own = lax.dynamic_index_in_dim(distances, place, axis=1)
        is_dominated = jnp.any(is_kept & (alpha * to_kept < own), axis=1)
        valid = lax.dynamic_index_in_dim(is_valid, place, axis=1, keepdims=False)
        return lax.dynamic_update_index_in_dim(is_kept, valid & ~is_dominated, place, axis=1)

    return lax.fori_loop(0, distances.shape[1], decide, jnp.zeros(distances.shape, bool))


def squared_distances(some: jax.Array, others: jax.Array) -> jax.Array:
    """f32 `[n, a, b]`, between `[n, a, d]` and `[n, b, d]`."""
    some, others = some.astype(jnp.float32), others.astype(jnp.float32)
    products = jnp.einsum("nad,nbd->nab", some, others, precision=lax.Precision.HIGHEST)
    found = jnp.sum(some * some, axis=-1)[:, :, None] + jnp.sum(others * others, axis=-1)[:, None, :] - 2 * products
    return jnp.maximum(found, 0)


def unit(vectors: jax.Array) -> jax.Array:
    """f32 `[.., d]`, normalized to length 1, or 0; l2 of unit vectors orders like cosine."""
    vectors = vectors.astype(jnp.float32)
    length = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.where(length > 0, length, 1)
