"""Candidates of an inexact search, scored again by the vectors themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.data.metrics import NO_ID, Metric, scores, worst_score
from autopar.vector_search.data.placement import CACHED_BYTES
from autopar.vector_search.kernels.top_k_merge import Best


def rerank(vectors: jax.Array, queries: jax.Array, candidates: jax.Array, k: int, metric: Metric) -> Best:
    """The best k of each query's candidates.

    Args:
        vectors: `[n, d]`. queries: `[num_queries, d]`, of the same dtype.
        candidates: int32 `[num_queries, m]`, positions, none twice; `NO_ID` counts for nothing. m is at least k.
    """

    def of_one(each: tuple[jax.Array, jax.Array]) -> Best:
        query, which = each
        found = best_of(vectors[jnp.maximum(which, 0)][None], query[None], which[None], k, metric)
        return Best(found.scores[0], found.positions[0])

    # what is fetched for some queries stays in a CPU's caches: for all of them it is 3 times as slow
    at_once = max(1, CACHED_BYTES // (candidates.shape[1] * vectors.shape[1] * vectors.dtype.itemsize))
    return lax.map(of_one, (queries, candidates), batch_size=min(at_once, queries.shape[0]))


def best_of(held: jax.Array, queries: jax.Array, candidates: jax.Array, k: int, metric: Metric) -> Best:
    """The same, of candidates that have been fetched: `held`, `[num_queries, m, d]`."""
    found = jax.vmap(lambda q, x: scores(q[None], x, metric)[0])(queries, held)
    best, place = lax.top_k(jnp.where(candidates == NO_ID, worst_score(found.dtype), found), k)
    return Best(best, jnp.take_along_axis(candidates, place, axis=1))
