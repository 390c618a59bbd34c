"""Assign vectors to lists: nearest centroid, and further lists near a border within a limit of space (SPANN's closure).

In: a sample of the corpus, and its chunks. Out: centroids, and up to `copies` lists of each vector. The further lists
are those of `ivf.closure`. How far they may be is set on the sample, so that the corpus takes at most `space` entries
per vector.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, Metric, is_integer
from autopar.vector_search.graph.nearest_points import NearestPoints, PointGraph, point_graph
from autopar.vector_search.ivf.closure import closure, closure_among, num_candidates
from autopar.vector_search.kernels.k_means import nearest, train
from autopar.vector_search.on_disk.probing import prepared

#: Tried distances of a further centroid relative to the nearest one, and the alpha of `robust_prune`.
_REACHES, _ALPHA = (1.3, 1.25, 1.2, 1.17, 1.14, 1.11, 1.08, 1.05, 1.02), 2.0
#: Sample that the reach is chosen with.
_REACH_SAMPLE = 4096
_ITERATIONS = 10


@dataclass(frozen=True, slots=True)
class Assignment:
    """Centroids, and which lists a vector belongs to.

    Args:
        centroids: f32 `[num_lists, d]`, of `prepared` vectors.
        centre: f32 `[d]`, subtracted from vectors; None: not centred.
        copies: maximum number of lists per vector.
        reach: maximum distance of a further centroid, relative to the nearest one.
        rows: vectors that are assigned at a time.
        radii: f32 `[num_lists]`, rms distance of the sample's vectors from the nearest centroid.
        points, graph: find the nearest centroids, where there are many; None: all are compared.
    """

    centroids: NDArray[np.float32]
    centre: NDArray[np.float32] | None
    metric: Metric
    copies: int
    reach: float
    rows: int
    radii: NDArray[np.float32]
    points: NearestPoints | None = None
    graph: PointGraph | None = None

    def lists_of(self, vectors: NDArray[Any]) -> NDArray[np.int32]:
        """int32 `[m, copies]`: the lists of each vector, first the nearest; `NO_ID` for fewer.

        Args:
            vectors: `[m, d]`, at most `rows`.
        """
        padded = np.zeros((self.rows, vectors.shape[1]), np.float32)  # one program for all chunks
        padded[: len(vectors)] = prepared(vectors, self.metric, self.centre)
        if self.points is None:
            return np.asarray(_assigned(padded, self.centroids, self.copies, self.reach))[: len(vectors)]
        near = self.points.nearest(padded, num_candidates(self.copies, len(self.centroids)))[0].astype(np.int32)
        if self.copies == 1:
            return near[: len(vectors), :1]
        of = (jnp.asarray(padded), jnp.asarray(self.centroids), jnp.asarray(near))
        return np.asarray(closure_among(*of, self.copies, self.reach, _ALPHA))[: len(vectors)]


def trained(
    sample: NDArray[Any], metric: Metric, num_lists: int, copies: int, space: float, rows: int, seed: int = 0
) -> Assignment:
    """Train centroids on a sample, and choose how far further lists may be. A graph over many centroids is built, too.

    Args:
        sample: `[m, d]`, at least `num_lists` vectors.
        space: maximum mean number of lists per vector.
        rows: vectors that are assigned at a time.
    """
    is_centred = metric == "l2" and not is_integer(sample.dtype)
    centre = sample.astype(np.float32).mean(axis=0, dtype=np.float64).astype(np.float32) if is_centred else None
    placed = jnp.asarray(prepared(sample, metric, centre))
    order = jax.random.permutation(jax.random.key(seed), len(sample))
    start = placed[order[:num_lists]]
    centroids = np.asarray(train(placed, start, _ITERATIONS, jax.random.key(seed), chunk=min(rows, 8192)))
    graph = point_graph(centroids, "l2")
    points = None if graph is None else NearestPoints(centroids, "l2", graph)
    single = Assignment(centroids, centre, metric, 1, 1.0, rows, _radii(placed, centroids, rows), points, graph)
    if min(copies, num_lists) == 1 or space <= 1:
        return single
    some = sample[np.asarray(order[-_REACH_SAMPLE:])]  # vectors at the first centroids are in fewer lists
    for reach in _REACHES:
        tried = replace(single, copies=min(copies, num_lists), reach=reach)
        parts = (some[at : at + rows] for at in range(0, len(some), rows))
        if sum(int((tried.lists_of(part) != NO_ID).sum()) for part in parts) <= space * len(some):
            return tried
    return single


def _radii(placed: jax.Array, centroids: NDArray[np.float32], rows: int) -> NDArray[np.float32]:
    """The rms distance of vectors from the nearest centroid, for each list; the mean for an empty one."""
    squares, counts = np.zeros(len(centroids)), np.zeros(len(centroids))
    for start in range(0, len(placed), rows):
        some = placed[start : start + rows]
        padded = jnp.pad(some, ((0, rows - len(some)), (0, 0)))
        lists, score = (np.asarray(each)[: len(some)] for each in _nearest(padded, jnp.asarray(centroids)))
        far = np.maximum(np.asarray(jnp.sum(some * some, axis=1)) - score, 0)
        squares += np.bincount(lists, far, len(centroids))
        counts += np.bincount(lists, minlength=len(centroids))
    mean = squares.sum() / max(1, counts.sum())
    return np.sqrt(np.where(counts > 0, squares / np.maximum(counts, 1), mean)).astype(np.float32)


@jax.jit
def _nearest(vectors: jax.Array, centroids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return nearest(vectors, centroids)


def _assigned(vectors: NDArray[np.float32], centroids: NDArray[np.float32], copies: int, reach: float) -> jax.Array:
    placed, near = jnp.asarray(vectors), jnp.asarray(centroids)
    if copies == 1:
        return _nearest(placed, near)[0][:, None]
    return closure(placed, near, None, copies, reach, _ALPHA)
