"""What a search has found so far: the best of each query, and how two such findings become one."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.data.metrics import NO_ID, Metric, score_dtype, worst_score


class Best(NamedTuple):
    """`scores` `[num_queries, k]`, best first, and int32 `positions` of the corpus; `NO_ID` where there is none, with
    the worst score there is."""

    scores: jax.Array
    positions: jax.Array


class LeftOut(NamedTuple):
    """What queries are not to find: themselves and their equals, where they are some of the vectors.

    groups: int32 `[n]`: vectors of one number are equal. own: int32 `[num_queries]`: the number that each query leaves out.
    """

    groups: Any
    own: Any

    def has(self, positions: jax.Array, own: jax.Array) -> jax.Array:
        """bool, as `positions`: whether a vector is left out by the query whose `own`, broadcast to them, is given."""
        return self.groups[jnp.maximum(positions, 0)] == own


def nothing(num_queries: int, k: int, dtype: jnp.dtype, metric: Metric) -> Best:
    """Found of vectors of a dtype before any has been looked at."""
    made = score_dtype(dtype, metric)
    return Best(jnp.full((num_queries, k), worst_score(made), made), jnp.full((num_queries, k), NO_ID, jnp.int32))


def distinct(found: Best, k: int) -> Best:
    """The best k of which none is there twice."""
    is_again = ~is_first(found.positions) & (found.positions != NO_ID)
    worst = worst_score(found.scores.dtype)
    best, place = lax.top_k(jnp.where(is_again, worst, found.scores), k)
    return Best(best, jnp.where(best == worst, NO_ID, jnp.take_along_axis(found.positions, place, axis=1)))


def is_first(table: jax.Array) -> jax.Array:
    """bool, of `[rows, m]`: no equal one stands before it in its row."""
    same = table[:, :, None] == table[:, None, :]
    return ~jnp.any(jnp.tril(same, -1), axis=-1)
