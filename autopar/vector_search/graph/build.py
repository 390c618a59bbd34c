"""Build a neighbour graph from vectors.

In: vectors. Out: a `NeighbourGraph`. Inverted lists give approximate neighbours of each vector; pruning and reverse
edges make up for the neighbours that they miss. The entry points are the vectors nearest to a few centroids, and
further nodes where these do not lead (`entry_points`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.vector_search.data.metrics import Metric, is_integer, scores, terms
from autopar.vector_search.graph.entry_points import add_entry_points
from autopar.vector_search.graph.neighbor_graph import CHUNK, NeighbourGraph, connect
from autopar.vector_search.ivf.build import build_lists, usual_num_lists
from autopar.vector_search.ivf.lists import InvertedLists
from autopar.vector_search.ivf.search import search
from autopar.vector_search.kernels.by_row import by_row
from autopar.vector_search.kernels.k_means import k_means_on_host

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
    devices: Sequence[Any] = (),
) -> NeighbourGraph:
    """Build the graph of `vectors`, `[n, d]`, with n of at least 1.

    Args:
        num_entries: initial entry points; the total stays within the number of lists.
        num_probes: probed lists for the `2 * degree` neighbours of each vector.
        devices: devices that find neighbours and prune them, each of a part of the vectors; none: the default one.
    """
    graph = connected(vectors, metric, degree, num_entries, num_probes, iterations, seed, devices=devices)
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
    devices: Sequence[Any] = (),
    shares_programs: bool = False,
) -> NeighbourGraph:
    """The graph with its initial entry points only, as `build_graph`.

    Args:
        at_once: queries of one search of the lists.
        chunk: nodes pruned at a time. Both bound the temporary memory of a device.
        shares_programs: compile nothing again for other vectors, as many; a search takes longer.
    """
    list_metric: Metric = "cosine" if metric == "cosine" else "l2"
    placed = jnp.asarray(vectors)
    if metric == "inner_product":
        vectors = with_equal_norms(vectors)
    original, placed = placed, jnp.asarray(vectors)
    lists = build_lists(vectors, list_metric, iterations=iterations, seed=seed, shares_programs=shares_programs)
    near = near_in_lists(lists, placed, 2 * degree, num_probes, at_once, devices)
    near_entries = k_means_on_host(np.asarray(lists.centroids), num_entries, iterations, seed)
    if is_integer(placed.dtype) and list_metric == "cosine":  # of unit length: integers would be 0
        near_entries *= np.iinfo(placed.dtype).max / np.maximum(np.abs(near_entries).max(axis=1, keepdims=True), 1e-30)
    entries = np.unique(_nearest(jnp.asarray(near_entries), placed, metric=list_metric))
    graph = connect(placed, np.asarray(near), entries, list_metric, degree, chunk=chunk, devices=devices)
    if metric == list_metric:
        return graph
    return replace(graph, metric=metric, vectors=original, terms=terms(original, metric))


@partial(jax.jit, static_argnames="metric")
def _nearest(points: jax.Array, vectors: jax.Array, *, metric: Metric) -> jax.Array:
    """int32 `[num]`, the vector nearest to each point, `[num, d]`."""
    return jnp.argmax(scores(points.astype(vectors.dtype), vectors, metric), axis=1).astype(jnp.int32)


def with_equal_norms(vectors: np.ndarray) -> np.ndarray:
    """f32 `[n, d + 1]`: add an element that makes all norms equal. For a query with 0 in that element, inner products
    stay the same, and the nearest vector in l2 then has the largest inner product."""
    wide = np.asarray(vectors, np.float64)
    squares = (wide * wide).sum(axis=1, keepdims=True)
    return np.concatenate([wide, np.sqrt(squares.max() - squares)], axis=1).astype(np.float32)


def near_in_lists(
    lists: InvertedLists,
    vectors: jax.Array,
    most: int,
    num_probes: int,
    at_once: int = AT_ONCE,
    devices: Sequence[Any] = (),
) -> jax.Array:
    """int32 `[n, most + 1]`: positions of the approximate neighbours of `vectors`, `[n, d]`, itself included."""
    of = {"k": most + 1, "num_probes": num_probes, "at_once": at_once}
    return by_row(_near_rows, lists, vectors, devices or jax.devices()[:1], **of)


def _near_rows(lists: InvertedLists, queries: jax.Array, *, k: int, num_probes: int, at_once: int) -> jax.Array:
    num = queries.shape[0]
    at_once = min(at_once, num)
    parts = jnp.pad(queries, ((0, -num % at_once), (0, 0))).reshape(-1, at_once, queries.shape[1])
    found = lax.map(lambda part: search(lists, part, k, num_probes).positions, parts)
    return found.reshape(-1, k)[:num]
