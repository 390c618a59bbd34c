"""Candidates of an inexact search, scored again by the vectors themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.best import Best
from autopar.vector_search.metrics import NO_ID, Metric, scores, worst_score


def rerank(vectors: jax.Array, queries: jax.Array, candidates: jax.Array, k: int, metric: Metric) -> Best:
    """The best k of each query's candidates.

    Args:
        vectors: `[n, d]`. queries: `[num_queries, d]`, of the same dtype.
        candidates: int32 `[num_queries, m]`, positions, none twice; `NO_ID` counts for nothing. m is at least k.
    """
    return best_of(vectors[jnp.maximum(candidates, 0)], queries, candidates, k, metric)


def best_of(held: jax.Array, queries: jax.Array, candidates: jax.Array, k: int, metric: Metric) -> Best:
    """The same, of candidates that have been fetched: `held`, `[num_queries, m, d]`."""
    found = jax.vmap(lambda q, x: scores(q[None], x, metric)[0])(queries, held)
    best, place = lax.top_k(jnp.where(candidates == NO_ID, worst_score(found.dtype), found), k)
    return Best(best, jnp.take_along_axis(candidates, place, axis=1))
