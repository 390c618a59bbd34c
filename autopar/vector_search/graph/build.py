"""From vectors to the graph of near ones.

In: vectors. Out: `NeighbourGraph`, connected by what inverted lists find near to each vector: not all of the nearest,
which pruning and reverse edges make up for. Walks begin at the vectors nearest to a few centroids, and where none of
these leads to (`entries`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from autopar.vector_search.data.metrics import Metric, scores, terms
from autopar.vector_search.graph.entry_points import with_entries_for_all
from autopar.vector_search.graph.neighbor_graph import NeighbourGraph, connect
from autopar.vector_search.ivf.build import build_lists, usual_num_lists
from autopar.vector_search.ivf.lists import InvertedLists
from autopar.vector_search.ivf.search import search
from autopar.vector_search.kernels.k_means import k_means

#: Queries in one search of the lists.
_AT_ONCE = 2048


def build_graph(
    vectors: np.ndarray,
    metric: Metric,
    degree: int = 32,
    num_entries: int = 32,
    num_probes: int = 12,
    rounds: int = 6,
    seed: int = 0,
) -> NeighbourGraph:
    """The graph of `vectors`, `[n, d]`, of which there is at least one.

    Args:
        num_entries: nodes that walks begin at, before it is known which they need; no more in all than there are lists.
        num_probes: lists in which each vector's near ones are looked for, `2 * degree` of them.
    """
    nearness: Metric = "cosine" if metric == "cosine" else "l2"
    placed = jnp.asarray(vectors)
    if metric == "inner_product":
        vectors = of_one_length(vectors)
    held, placed = placed, jnp.asarray(vectors)
    lists = build_lists(vectors, nearness, rounds=rounds, seed=seed)
    near = near_in_lists(lists, placed, 2 * degree, num_probes)
    middles = k_means(lists.centroids, min(num_entries, lists.num_lists), rounds, seed).centroids
    entries = jnp.argmax(scores(middles.astype(placed.dtype), placed, nearness), axis=1)
    graph = connect(placed, near, jnp.unique(entries), nearness, degree)
    graph = replace(graph, metric=metric, vectors=held, terms=terms(held, metric))
    return with_entries_for_all(graph, most=usual_num_lists(len(vectors)), seed=seed)


def of_one_length(vectors: np.ndarray) -> np.ndarray:
    """f32 `[n, d + 1]`: with an element more, that makes all as long as the longest. Of a query with 0 there, whose product
    with each is the same as before, the nearest are then those of the largest product."""
    wide = np.asarray(vectors, np.float64)
    squares = (wide * wide).sum(axis=1, keepdims=True)
    return np.concatenate([wide, np.sqrt(squares.max() - squares)], axis=1).astype(np.float32)


def near_in_lists(lists: InvertedLists, vectors: jax.Array, most: int, num_probes: int) -> jax.Array:
    """int32 `[n, most + 1]`: positions of what is near to each of `vectors`, `[n, d]`, itself among it."""
    run = jax.jit(partial(search, k=most + 1, num_probes=num_probes))
    num = vectors.shape[0]
    at_once = min(_AT_ONCE, num)
    # the last batch begins earlier, so that all are of one shape
    starts = [*range(0, num - at_once, at_once), num - at_once]
    parts = [run(lists, vectors[start : start + at_once]).positions for start in starts]
    return jnp.concatenate([*parts[:-1], parts[-1][at_once - (num - len(parts[:-1]) * at_once) :]])
