"""Build a neighbour graph from vectors.

In: vectors. Out: a `NeighbourGraph`. Inverted lists give approximate neighbours of each vector; pruning and reverse
edges make up for the neighbours that they miss. The entry points are the vectors nearest to a few centroids, and
further nodes where these do not lead (`entry_points`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from autopar.vector_search.data.metrics import Metric, scores, terms
from autopar.vector_search.graph.entry_points import add_entry_points
from autopar.vector_search.graph.neighbor_graph import CHUNK, NeighbourGraph, connect
from autopar.vector_search.ivf.build import build_lists, usual_num_lists
from autopar.vector_search.ivf.lists import InvertedLists
from autopar.vector_search.ivf.search import search
from autopar.vector_search.kernels.k_means import k_means

#: Queries of one search of the lists.
AT_ONCE = 2048


def build_graph(
    vectors: np.ndarray,
    metric: Metric,
    degree: int = 32,
    num_entries: int = 32,
    num_probes: int = 12,
    iterations: int = 6,
    seed: int = 0,
) -> NeighbourGraph:
    """Build the graph of `vectors`, `[n, d]`, with n of at least 1.

    Args:
        num_entries: initial entry points; the total stays within the number of lists.
        num_probes: probed lists for the `2 * degree` neighbours of each vector.
    """
    graph = connected(vectors, metric, degree, num_entries, num_probes, iterations, seed)
    return add_entry_points(graph, most=usual_num_lists(len(vectors)), seed=seed)


def connected(
    vectors: np.ndarray,
    metric: Metric,
    degree: int = 32,
    num_entries: int = 32,
    num_probes: int = 12,
    iterations: int = 6,
    seed: int = 0,
    at_once: int = AT_ONCE,
    chunk: int = CHUNK,
) -> NeighbourGraph:
    """The graph with its initial entry points only, as `build_graph`.

    Args:
        at_once: queries of one search of the lists.
        chunk: nodes pruned at a time. Both bound the temporary memory.
    """
    list_metric: Metric = "cosine" if metric == "cosine" else "l2"
    placed = jnp.asarray(vectors)
    if metric == "inner_product":
        vectors = with_equal_norms(vectors)
    original, placed = placed, jnp.asarray(vectors)
    lists = build_lists(vectors, list_metric, iterations=iterations, seed=seed)
    near = near_in_lists(lists, placed, 2 * degree, num_probes, at_once)
    entry_centroids = k_means(lists.centroids, min(num_entries, lists.num_lists), iterations, seed).centroids
    entries = jnp.argmax(scores(entry_centroids.astype(placed.dtype), placed, list_metric), axis=1)
    graph = connect(placed, near, jnp.unique(entries), list_metric, degree, chunk=chunk)
    return replace(graph, metric=metric, vectors=original, terms=terms(original, metric))


def with_equal_norms(vectors: np.ndarray) -> np.ndarray:
    """f32 `[n, d + 1]`: add an element that makes all norms equal. For a query with 0 in that element, inner products
    stay the same, and the nearest vector in l2 then has the largest inner product."""
    wide = np.asarray(vectors, np.float64)
    squares = (wide * wide).sum(axis=1, keepdims=True)
    return np.concatenate([wide, np.sqrt(squares.max() - squares)], axis=1).astype(np.float32)


def near_in_lists(
    lists: InvertedLists, vectors: jax.Array, most: int, num_probes: int, at_once: int = AT_ONCE
) -> jax.Array:
    """int32 `[n, most + 1]`: positions of the approximate neighbours of `vectors`, `[n, d]`, itself included."""
    run = jax.jit(partial(search, k=most + 1, num_probes=num_probes))
    num = vectors.shape[0]
    at_once = min(at_once, num)
    # the last batch overlaps the one before, so that all have the same shape
    starts = [*range(0, num - at_once, at_once), num - at_once]
    parts = [run(lists, vectors[start : start + at_once]).positions for start in starts]
    return jnp.concatenate([*parts[:-1], parts[-1][at_once - (num - len(parts[:-1]) * at_once) :]])
