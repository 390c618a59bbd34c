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
from autopar.vector_search.graph.nearest_points import NearestPoints


class Probing(NamedTuple):
    """How many lists a query probes.

    Args:
        effort: maximum lists per query.
        pruning: maximum distance of a centroid, relative to the nearest one, minus 1; None: no pruning.
        least: lists that are never pruned.
        is_usual: whether the user gave neither an effort nor a filter.
    """

    effort: int
    pruning: float | None = None
    least: int = 1
    is_usual: bool = False


class Nearest(NamedTuple):
    """The nearest lists of queries, nearest first.

    Args:
        lists: `[num_queries, effort]`.
        ratios: f32 `[num_queries, effort]`, distance of the centroid relative to the nearest one; 1 for inner products,
            which have no such rule.
        distances: f32 `[num_queries, effort]`, distance of the centroid; for inner products, after a further element
            has made the lengths of all centroids equal.
    """

    lists: NDArray[np.int64]
    ratios: NDArray[np.float32]
    distances: NDArray[np.float32]

    def of(self, some: slice) -> Nearest:
        """Those of some queries."""
        return Nearest(self.lists[some], self.ratios[some], self.distances[some])


def prepared(vectors: NDArray[Any], metric: Metric, centre: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Vectors or queries as they are compared with centroids: f32, centred for l2, of unit length for cosine."""
    wide = vectors.astype(np.float32)
    if centre is not None:
        return wide - centre
    if metric != "cosine":
        return wide
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    return (wide / np.where(length > 0, length, 1)).astype(np.float32)


def nearest_lists(
    queries: NDArray[np.float32],
    centroids: NDArray[np.float32],
    metric: Metric,
    effort: int,
    graph: NearestPoints | None = None,
) -> Nearest:
    """The nearest lists of each query.

    Args:
        queries: `[num_queries, d]`, `prepared`.
        effort: at most the number of lists.
        graph: finds the centroids near a query, where there are many; None: all are compared.
    """
    if graph is None:
        padded = np.zeros((1 << max(0, len(queries) - 1).bit_length(), queries.shape[1]), np.float32)
        padded[: len(queries)] = queries
        found = np.asarray(_scores(padded, centroids, metric=metric))[: len(queries)]
        near = np.argsort(-found, axis=1, kind="stable")[:, :effort]
        best = np.take_along_axis(found, near, axis=1)
    else:
        near, best = graph.nearest(queries, effort)
    if metric == "cosine":  # that of a query of unit length
        squares = 2 - 2 * best
    else:  # l2 scores lack |q|^2, inner products both squares
        squares = (queries**2).sum(axis=1, keepdims=True) - (best if metric == "l2" else 2 * best)
        squares = squares + (0 if metric == "l2" else (centroids**2).sum(axis=1).max())
    distances = np.sqrt(np.maximum(squares, 0)).astype(np.float32)
    if metric == "inner_product":
        return Nearest(near, np.ones(best.shape, np.float32), distances)
    with np.errstate(over="ignore"):
        ratios = distances / np.maximum(distances[:, :1], np.finfo(np.float32).tiny)
    return Nearest(near, ratios.astype(np.float32), distances)


def without_own(nearest: Nearest, counts: NDArray[np.int64]) -> Nearest:
    """The nearest lists as they would be if the queries were not among the vectors that the centroids are means of.

    A query that is a vector of the corpus has pulled the centroid of its list, the mean of n vectors, by 1 / n of the
    distance. Other queries have not; so what is learned from the former does not fit them.

    Args:
        nearest: not of inner products.
        counts: `[num_lists]`, vectors that each centroid is the mean of.
    """
    distances, num = nearest.distances.copy(), counts[nearest.lists[:, 0]]
    grown = distances[:, 0] * (num / np.maximum(num - 1, 1))
    distances[:, 0] = np.where(num > 1, grown, distances.max(axis=1))  # without the query there would be no such list
    order = np.argsort(distances, axis=1, kind="stable")
    distances = np.take_along_axis(distances, order, axis=1).astype(np.float32)
    with np.errstate(over="ignore"):
        ratios = distances / np.maximum(distances[:, :1], np.finfo(np.float32).tiny)
    return Nearest(np.take_along_axis(nearest.lists, order, axis=1), ratios.astype(np.float32), distances)


def of_lists(nearest: Nearest, is_near: NDArray[np.bool_], num_lists: int) -> NDArray[np.bool_]:
    """bool `[num_queries, num_lists]`, from bool `[num_queries, effort]`, which of the nearest lists are probed."""
    which = np.zeros((len(nearest.lists), num_lists), bool)
    np.put_along_axis(which, nearest.lists, is_near, axis=1)
    return which


def probed(nearest: Nearest, probing: Probing, num_lists: int) -> NDArray[np.bool_]:
    """bool `[num_queries, num_lists]`: which query probes which list."""
    is_near = np.ones(nearest.lists.shape, bool)
    if probing.pruning is not None:
        is_near = nearest.ratios <= 1 + probing.pruning
        is_near[:, : probing.least] = True
    is_near[:, probing.effort :] = False
    return of_lists(nearest, is_near, num_lists)


@partial(jax.jit, static_argnames=("metric",))
def _scores(queries: jax.Array, centroids: jax.Array, *, metric: Metric) -> jax.Array:
    return scores(queries, jnp.asarray(centroids), metric)
