"""Assign vectors to lists: nearest centroid, and further lists near a border (SPANN's closure).

In: a corpus, and a sample of it. Out: centroids, and up to `copies` lists of each vector. The further lists
are those of `ivf.closure`. Which of them take the vector is decided when all are known (`whole_pages`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import Metric, is_integer
from autopar.vector_search.graph.nearest_points import GRAPH_FROM, NearestPoints, PointGraph, point_graph
from autopar.vector_search.ivf.closure import closure, closure_among, num_candidates
from autopar.vector_search.kernels.k_means import Sums, means, nearest, split_long_lists, sums, train
from autopar.vector_search.on_disk.chunks import Chunks
from autopar.vector_search.on_disk.probing import prepared

#: Maximum distance of a further centroid relative to the nearest one, and the alpha of `robust_prune`.
REACH, _ALPHA = 1.35, 2.0
#: Iterations of k-means; those on a sample with fewer than `ENOUGH` vectors per list, and then on the whole corpus.
_ITERATIONS, _FIRST_ITERATIONS, _PASSES = 10, 4, 3
ENOUGH = 256


class Near(NamedTuple):
    """The lists that vectors may be in, `[m, copies]`, first the nearest; `NO_ID` for fewer. And the distances of their
    centroids relative to the nearest one."""

    lists: NDArray[np.int32]
    ratios: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Centroids, and which lists a vector belongs to.

    Args:
        centroids: f32 `[num_lists, d]`, of `prepared` vectors.
        centre: f32 `[d]`, subtracted from vectors; None: not centred.
        copies: maximum number of lists per vector.
        rows: vectors that are assigned at a time.
        radii: f32 `[num_lists]`, rms distance of the vectors that it was trained with from the nearest centroid.
        num_trained: int64 `[num_lists]`, vectors that each centroid is the mean of.
        points, graph: find the nearest centroids, where there are many; None: all are compared.
    """

    centroids: NDArray[np.float32]
    centre: NDArray[np.float32] | None
    metric: Metric
    copies: int
    rows: int
    radii: NDArray[np.float32]
    num_trained: NDArray[np.int64]
    points: NearestPoints | None = None
    graph: PointGraph | None = None

    def near(self, vectors: NDArray[Any]) -> Near:
        """The lists that vectors may be in.

        Args:
            vectors: `[m, d]`, at most `rows`.
        """
        lists = self._lists_of(vectors)
        compared = prepared(vectors, self.metric, self.centre)
        squares = np.empty(lists.shape, np.float32)
        for column in range(lists.shape[1]):
            squares[:, column] = ((compared - self.centroids[lists[:, column]]) ** 2).sum(axis=1)
        nearest_one = np.maximum(squares[:, :1], np.finfo(np.float32).tiny)
        return Near(lists, np.sqrt(np.maximum(squares / nearest_one, 1)))

    def _lists_of(self, vectors: NDArray[Any]) -> NDArray[np.int32]:
        padded = np.zeros((self.rows, vectors.shape[1]), np.float32)  # one program for all chunks
        padded[: len(vectors)] = prepared(vectors, self.metric, self.centre)
        if self.points is None:
            return np.asarray(_assigned(padded, self.centroids, self.copies))[: len(vectors)]
        near = self.points.nearest(padded, num_candidates(self.copies, len(self.centroids)))[0].astype(np.int32)
        if self.copies == 1:
            return near[: len(vectors), :1]
        of = (jnp.asarray(padded), jnp.asarray(self.centroids), jnp.asarray(near))
        return np.asarray(closure_among(*of, self.copies, REACH, _ALPHA))[: len(vectors)]


def trained(
    sample: NDArray[Any], chunks: Chunks, metric: Metric, num_lists: int, copies: int, rows: int, seed: int = 0
) -> Assignment:
    """Train centroids: on a sample, and on the whole corpus if the sample has few vectors per list, as centroids of few
    vectors are far from the others. A graph over many centroids is built, too.

    Args:
        sample: `[m, d]`, at least `num_lists` vectors.
        chunks: the corpus, which is read `_PASSES` times if the sample is small.
        rows: vectors that are assigned at a time.
    """
    is_centred = metric == "l2" and not is_integer(sample.dtype)
    centre = sample.astype(np.float32).mean(axis=0, dtype=np.float64).astype(np.float32) if is_centred else None
    placed = jnp.asarray(prepared(sample, metric, centre))
    key = jax.random.key(seed)
    start = placed[jax.random.permutation(key, len(sample))[:num_lists]]
    is_small = len(sample) < min(chunks.num_vectors, ENOUGH * num_lists) and num_lists < GRAPH_FROM
    centroids = train(placed, start, _FIRST_ITERATIONS if is_small else _ITERATIONS, key, chunk=min(rows, 8192))
    if is_small:
        centroids, cells = _refined(centroids, chunks, metric, centre, rows, key)
    else:
        cells = _cells(placed, centroids, rows)
    centroids, counts = np.asarray(centroids), np.asarray(cells.counts).astype(np.int64)
    squares = np.asarray(cells.squared_distances)
    mean = squares.sum() / max(1, counts.sum())
    radii = np.sqrt(np.where(counts > 0, squares / np.maximum(counts, 1), mean)).astype(np.float32)
    graph = point_graph(centroids, "l2")
    points = None if graph is None else NearestPoints(centroids, "l2", graph)
    return Assignment(centroids, centre, metric, min(copies, num_lists), rows, radii, counts, points, graph)


def _refined(
    centroids: jax.Array, chunks: Chunks, metric: Metric, centre: NDArray[np.float32] | None, rows: int, key: jax.Array
) -> tuple[jax.Array, Sums]:
    """Centroids after iterations of k-means over the whole corpus, and the cells that they are the means of."""
    found: Sums | None = None
    for left in reversed(range(_PASSES)):
        found = None
        for _, chunk in chunks:
            part = _cells(jnp.asarray(prepared(chunk, metric, centre)), centroids, rows)
            found = part if found is None else jax.tree.map(jnp.add, found, part)
        assert found is not None
        mean = means(found, centroids)
        centroids = split_long_lists(mean, found, jax.random.fold_in(key, left)) if left else mean
    assert found is not None
    return centroids, found


def _cells(placed: jax.Array, centroids: jax.Array, rows: int) -> Sums:
    """For each list, the sum of the vectors that it is the nearest of, their number, and squared distances."""
    num = -(-len(placed) // rows) * rows  # one program for all chunks
    padded = jnp.pad(placed, ((0, num - len(placed)), (0, 0))).reshape(-1, rows, placed.shape[1])
    return _sums(padded, (jnp.arange(num) < len(placed)).reshape(-1, rows), centroids)


@jax.jit
def _sums(chunks: jax.Array, is_vector: jax.Array, centroids: jax.Array) -> Sums:
    return sums(chunks, is_vector, centroids)


@jax.jit
def _nearest(vectors: jax.Array, centroids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return nearest(vectors, centroids)


def _assigned(vectors: NDArray[np.float32], centroids: NDArray[np.float32], copies: int) -> jax.Array:
    placed, near = jnp.asarray(vectors), jnp.asarray(centroids)
    if copies == 1:
        return _nearest(placed, near)[0][:, None]
    return closure(placed, near, None, copies, REACH, _ALPHA)
