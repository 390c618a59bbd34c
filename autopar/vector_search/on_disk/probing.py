"""Choose the lists that a query probes: the nearest centroids, pruned by distance (SPANN, arXiv 2111.08566, 3.3).

In: queries and centroids. Out: which query probes which list. A query probes at most `effort` lists, and of these only
those whose centroid is at most `1 + pruning` times as far as the nearest one. So easy queries read fewer lists.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import Metric, scores


class Probing(NamedTuple):
    """How many lists a query probes.

    Args:
        effort: maximum lists per query.
        pruning: maximum distance of a centroid, relative to the nearest one, minus 1; None: no pruning.
        least: lists that are never pruned.
    """

    effort: int
    pruning: float | None = None
    least: int = 1


class Nearest(NamedTuple):
    """The nearest lists of queries, nearest first.

    Args:
        lists: `[num_queries, effort]`.
        ratios: f32 `[num_queries, effort]`, distance of the centroid relative to the nearest one; 1 for inner products,
            which have no such rule.
    """

    lists: NDArray[np.int64]
    ratios: NDArray[np.float32]


def prepared(vectors: NDArray[Any], metric: Metric, centre: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Vectors or queries as they are compared with centroids: f32, centred for l2, of unit length for cosine."""
    wide = vectors.astype(np.float32)
    if centre is not None:
        return wide - centre
    if metric != "cosine":
        return wide
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    return (wide / np.where(length > 0, length, 1)).astype(np.float32)


def nearest_lists(queries: NDArray[np.float32], centroids: NDArray[np.float32], metric: Metric, effort: int) -> Nearest:
    """The nearest lists of each query.

    Args:
        queries: `[num_queries, d]`, `prepared`.
        effort: at most the number of lists.
    """
    padded = np.zeros((1 << max(0, len(queries) - 1).bit_length(), queries.shape[1]), np.float32)
    padded[: len(queries)] = queries
    found = np.asarray(_scores(padded, centroids, metric=metric))[: len(queries)]
    near = np.argsort(-found, axis=1, kind="stable")[:, :effort]
    best = np.take_along_axis(found, near, axis=1)
    if metric == "inner_product":
        return Nearest(near, np.ones(best.shape, np.float32))
    # l2 scores lack |q|^2; the cosine is that of a query of unit length
    squares = (queries**2).sum(axis=1, keepdims=True) - best if metric == "l2" else 2 - 2 * best
    distances = np.sqrt(np.maximum(squares, 0))
    ratios = distances / np.maximum(distances[:, :1], np.finfo(np.float32).tiny)
    return Nearest(near, ratios.astype(np.float32))


def probed(nearest: Nearest, probing: Probing, num_lists: int) -> NDArray[np.bool_]:
    """bool `[num_queries, num_lists]`: which query probes which list."""
    is_near = np.ones(nearest.lists.shape, bool)
    if probing.pruning is not None:
        is_near = nearest.ratios <= 1 + probing.pruning
        is_near[:, : probing.least] = True
    is_near[:, probing.effort :] = False
    which = np.zeros((len(nearest.lists), num_lists), bool)
    np.put_along_axis(which, nearest.lists, is_near, axis=1)
    return which


@partial(jax.jit, static_argnames=("metric",))
def _scores(queries: jax.Array, centroids: jax.Array, *, metric: Metric) -> jax.Array:
    return scores(queries, jnp.asarray(centroids), metric)
