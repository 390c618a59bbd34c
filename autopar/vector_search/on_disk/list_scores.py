"""Score the vectors of lists against the queries that probe them, and keep the best of each query.

In: vectors and their positions, as they arrive from the disk; which query is compared with which vector. Out: the best k
so far. A program per number of queries and of vectors, both rounded up to powers of two, so few programs are compiled.
A vector that is in several lists is kept once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import (
    NO_ID,
    Metric,
    distances_of,
    score_dtype,
    scores,
    sorted_dtype,
    worst_score,
)
from autopar.vector_search.kernels.top_k_merge import Best

#: Minimum rows of a program.
_MIN_ROWS = 1024


class ListScores:
    """The best k vectors of each query so far.

    Args:
        queries: `[num_queries, d]`, checked, in the dtype of the vectors.
        centre: f32 `[d]`, subtracted from queries and vectors; None: not centred.
        copies: maximum number of lists per vector.
    """

    def __init__(
        self, queries: NDArray[Any], k: int, metric: Metric, centre: NDArray[np.float32] | None, copies: int
    ) -> None:
        self._num_queries, self._k, self._copies = len(queries), k, copies
        self._metric: Metric = metric
        self._centre = centre
        padded = np.zeros((power_of_two(len(queries)), queries.shape[1]), queries.dtype)
        padded[: len(queries)] = queries
        self._queries = jnp.asarray(padded if centre is None else padded.astype(np.float32) - centre)
        self._worst_dtype = score_dtype(queries.dtype, metric)
        shape = (len(padded), k)
        worst = jnp.full(shape, worst_score(self._worst_dtype), self._worst_dtype)
        self._best = Best(worst, jnp.full(shape, NO_ID, jnp.int32))

    def add(self, vectors: NDArray[Any], positions: NDArray[np.int32], is_compared: NDArray[np.bool_]) -> None:
        """Compare queries with some vectors. Returns before the scores are computed.

        Args:
            vectors: `[m, d]`.
            positions: int32 `[m]`.
            is_compared: bool `[num_queries, m]`.
        """
        which = np.flatnonzero(is_compared.any(axis=1))
        if not which.size:
            return
        rows, num = max(_MIN_ROWS, power_of_two(len(vectors))), len(vectors)
        padded = np.zeros((rows, vectors.shape[1]), vectors.dtype)
        padded[:num] = vectors
        places = np.full(rows, NO_ID, np.int32)
        places[:num] = positions
        some = np.full(power_of_two(len(which)), len(self._queries), np.int32)  # beyond the queries: dropped
        some[: len(which)] = which
        mask = np.zeros((len(some), rows), np.bool_)
        mask[: len(which), :num] = is_compared[which]
        of = {"k": self._k, "copies": self._copies, "metric": self._metric}
        self._best = _better(self._best, self._queries, some, padded, places, mask, self._centre, **of)

    def best(self) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and positions, `[num_queries, k]`, best first; `NO_ID` for no result."""
        distances = _distances(self._best.scores, self._queries, metric=self._metric)
        return np.asarray(distances)[: self._num_queries], np.asarray(self._best.positions)[: self._num_queries]


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number` and 1."""
    return 1 << max(0, number - 1).bit_length()


@partial(jax.jit, static_argnames=("k", "copies", "metric"))
def _better(
    best: Best,
    queries: jax.Array,
    some: jax.Array,
    vectors: jax.Array,
    positions: jax.Array,
    is_compared: jax.Array,
    centre: jax.Array | None,
    *,
    k: int,
    copies: int,
    metric: Metric,
) -> Best:
    """The best k of `best` and of the vectors that are compared with the queries `some`."""
    vectors = vectors if centre is None else vectors.astype(jnp.float32) - centre
    found = scores(queries.at[some].get(mode="clip"), vectors, metric)
    worst = worst_score(found.dtype)
    found = jnp.where(is_compared, found, worst)
    num_candidates = min(k * copies, found.shape[1])  # holds k distinct vectors, if so many are compared
    if found.dtype != sorted_dtype(vectors.dtype, metric, vectors.shape[1]):
        place = lax.top_k(jnp.where(is_compared, found.astype(jnp.float32), -jnp.inf), num_candidates)[1]
        top = jnp.take_along_axis(found, place, axis=1)
    else:
        top, place = lax.top_k(found, num_candidates)
    which = jnp.where(top == worst, NO_ID, positions[place])
    every = jnp.concatenate([best.scores.at[some].get(mode="clip"), top], axis=1)
    places = jnp.concatenate([best.positions.at[some].get(mode="clip"), which], axis=1)
    # by position, equal ones by falling score: all but the first of each position are copies
    below = every if every.dtype == jnp.float32 else every.astype(jnp.float32)
    places, _, every = lax.sort((places, -below, every), dimension=1, num_keys=2)
    is_copy = jnp.concatenate([jnp.zeros_like(places[:, :1], bool), places[:, 1:] == places[:, :-1]], axis=1)
    kept, place = lax.top_k(jnp.where(is_copy | (places == NO_ID), worst, every), k)
    positions = jnp.where(kept == worst, NO_ID, jnp.take_along_axis(places, place, axis=1))
    return Best(best.scores.at[some].set(kept, mode="drop"), best.positions.at[some].set(positions, mode="drop"))


@partial(jax.jit, static_argnames=("metric",))
def _distances(found: jax.Array, queries: jax.Array, *, metric: Metric) -> jax.Array:
    return distances_of(found, queries, metric)
