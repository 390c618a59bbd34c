"""Represent a top-k result, and deduplicate and mask results."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.data.metrics import NO_ID, worst_score


class Best(NamedTuple):
    """`scores` `[num_queries, k]`, best first, and int32 `positions` in the corpus; `NO_ID` and the worst score for no
    result."""

    scores: jax.Array
    positions: jax.Array


class LeftOut(NamedTuple):
    """Vectors that a query excludes: itself and its duplicates, if the query is a vector of the corpus.

    Args:
        groups: int32 `[n]`, the group of equal vectors that each vector belongs to.
        own: int32 `[num_queries]`, the group that each query excludes.
    """

    groups: Any
    own: Any

    def has(self, positions: jax.Array, own: jax.Array) -> jax.Array:
        """bool, shape of `positions`: whether the query with group `own` (broadcast) excludes a vector."""
        return self.groups[jnp.maximum(positions, 0)] == own


def distinct(found: Best, k: int) -> Best:
    """The k best distinct results."""
    is_duplicate = ~is_first(found.positions) & (found.positions != NO_ID)
    worst = worst_score(found.scores.dtype)
    best, place = lax.top_k(jnp.where(is_duplicate, worst, found.scores), k)
    return Best(best, jnp.where(best == worst, NO_ID, jnp.take_along_axis(found.positions, place, axis=1)))


def is_first(table: jax.Array) -> jax.Array:
    """bool `[rows, m]`: whether no earlier entry of the row is equal."""
    same = table[:, :, None] == table[:, None, :]
    return ~jnp.any(jnp.tril(same, -1), axis=-1)
