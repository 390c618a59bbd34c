"""Find the nearest of some points in memory: one by one, or by a graph over them where there are many.

In: points, such as the centroids of lists or the entry points of a larger graph. Out: the nearest of each query. A graph
is built where comparing all points costs more than a beam search does.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, Metric, scores, terms
from autopar.vector_search.graph import beam_search as beam
from autopar.vector_search.graph.build import build_graph
from autopar.vector_search.graph.neighbor_graph import NeighbourGraph

#: Points from which on a graph is built. A beam search of 256 nodes compares some thousands, each at a random place.
GRAPH_FROM = 100_000
#: Edges per point.
_DEGREE = 32
#: Nodes of a beam per point that is wanted, and the least; points expanded at a time.
_BEAM_PER_POINT, _LEAST_BEAM, _WIDTH = 2, 128, 8


class PointGraph(NamedTuple):
    """Edges int32 `[n, degree]` and entry points int32 `[num_entries]` of a graph over points."""

    edges: NDArray[np.int32]
    entries: NDArray[np.int32]


def point_graph(points: NDArray[np.float32], metric: Metric) -> PointGraph | None:
    """The graph over points, `[n, d]`; None where there are few."""
    if len(points) < GRAPH_FROM:
        return None
    graph = build_graph(points, metric, _DEGREE)
    return PointGraph(np.asarray(graph.edges), np.asarray(graph.entries))


class NearestPoints:
    """Points in memory.

    Args:
        points: f32 `[n, d]`.
        graph: `point_graph` of these points.
    """

    def __init__(self, points: NDArray[np.float32], metric: Metric, graph: PointGraph | None) -> None:
        self._metric: Metric = metric
        self._points = jnp.asarray(points)
        self._graph = None
        if graph is not None:
            edges, entries = jnp.asarray(graph.edges), jnp.asarray(graph.entries)
            self._graph = NeighbourGraph(self._points, terms(self._points, metric), edges, entries, metric)

    def nearest(self, queries: NDArray[np.float32], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The `count` nearest points of each query, `[num_queries, count]`, nearest first, and their scores.

        By the graph, a few may be others than the nearest; if it finds fewer than `count`, points are compared one by
        one.

        Args:
            queries: `[num_queries, d]`.
            count: at most the number of points.
        """
        padded = np.zeros((1 << max(0, len(queries) - 1).bit_length(), queries.shape[1]), np.float32)
        padded[: len(queries)] = queries
        size = max(_LEAST_BEAM, _BEAM_PER_POINT * count)
        if self._graph is not None and size * _DEGREE < len(self._points):
            found = _by_graph(self._graph, padded, k=count, size=size)
            positions = np.asarray(found.positions)[: len(queries)]
            if (positions != NO_ID).all():
                return positions.astype(np.int64), np.asarray(found.scores)[: len(queries)]
        found, positions = _one_by_one(
            padded, self._points, metric=self._metric, k=power_of_two(count, len(self._points))
        )
        return np.asarray(positions)[: len(queries), :count].astype(np.int64), np.asarray(found)[: len(queries), :count]


def power_of_two(count: int, most: int) -> int:
    """The least power of two that is at least `count`, or `most`: few programs serve all counts."""
    return min(most, 1 << max(0, count - 1).bit_length())


@partial(jax.jit, static_argnames=("metric", "k"))
def _one_by_one(queries: jax.Array, points: jax.Array, *, metric: Metric, k: int) -> Any:
    return lax.top_k(scores(queries, points, metric), k)


@partial(jax.jit, static_argnames=("k", "size"))
def _by_graph(graph: NeighbourGraph, queries: jax.Array, *, k: int, size: int) -> beam.BeamSearchResult:
    return beam.search(graph, queries, k, size, _WIDTH)


def why_invalid_graph(graph: PointGraph, num_points: int) -> str | None:
    """Why arrays of a file are no graph over so many points, as text."""
    edges, entries = graph
    if edges.dtype != np.int32 or edges.ndim != 2 or len(edges) != num_points or not edges.shape[1]:
        return f"the edges of its graph over {num_points:,} points are {edges.dtype} of shape {list(edges.shape)}"
    if entries.dtype != np.int32 or entries.ndim != 1 or not len(entries):
        return f"the entry points of its graph are {entries.dtype} of shape {list(entries.shape)}"
    for array, least in ((edges, NO_ID), (entries, 0)):
        if not least <= int(array.min()) <= int(array.max()) < num_points:
            return f"its graph points outside the {num_points:,} points"
    return None
