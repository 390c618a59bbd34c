"""Re-rank the candidates of an approximate search by their vectors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.data.metrics import NO_ID, Metric, scores, worst_score
from autopar.vector_search.data.placement import CACHED_BYTES
from autopar.vector_search.kernels.top_k_merge import Best


def rerank(vectors: jax.Array, queries: jax.Array, candidates: jax.Array, k: int, metric: Metric) -> Best:
    """The k best candidates of each query.

    Args:
        vectors: `[n, d]`.
        queries: `[num_queries, d]`, of the same dtype.
        candidates: int32 `[num_queries, m]`, distinct positions; `NO_ID` is ignored; m is at least k.
    """

    def of_one(each: tuple[jax.Array, jax.Array]) -> Best:
        query, which = each
        found = best_of(vectors[jnp.maximum(which, 0)][None], query[None], which[None], k, metric)
        return Best(found.scores[0], found.positions[0])

    # a chunk's gathered vectors fit a CPU's caches; gathering all of them is 3 times slower
    at_once = max(1, CACHED_BYTES // (candidates.shape[1] * vectors.shape[1] * vectors.dtype.itemsize))
    return lax.map(of_one, (queries, candidates), batch_size=min(at_once, queries.shape[0]))


def best_of(gathered: jax.Array, queries: jax.Array, candidates: jax.Array, k: int, metric: Metric) -> Best:
    """The k best of candidates whose vectors are already gathered: `gathered`, `[num_queries, m, d]`."""
    found = jax.vmap(lambda q, x: scores(q[None], x, metric)[0])(queries, gathered)
    best, place = lax.top_k(jnp.where(candidates == NO_ID, worst_score(found.dtype), found), k)
    return Best(best, jnp.take_along_axis(candidates, place, axis=1))
