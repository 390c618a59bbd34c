"""From vectors to inverted lists that can be searched.

In: vectors, and how they are to be kept. Out: `InvertedLists`: k-means, then closure if a vector may be in several lists,
then codes in place of vectors if asked for.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from autopar.vector_search.data.metrics import Metric
from autopar.vector_search.ivf.closure import closure
from autopar.vector_search.ivf.lists import InvertedLists, fill, fill_codes
from autopar.vector_search.ivf.product_quantization import train_codebooks
from autopar.vector_search.kernels.k_means import k_means
from autopar.vector_search.kernels.robust_prune import unit


def usual_num_lists(num_vectors: int) -> int:
    """About twice the square root: a query then compares itself with as many centroids as vectors of a few lists."""
    return max(1, min(num_vectors, round(2 * math.sqrt(num_vectors))))


def build_lists(
    vectors: np.ndarray,
    metric: Metric,
    num_lists: int | None = None,
    copies: int = 1,
    num_parts: int | None = None,
    rounds: int = 10,
    seed: int = 0,
) -> InvertedLists:
    """The lists of `vectors`, `[n, d]`, of which there is at least one.

    Args:
        num_lists: at most n; `usual_num_lists`, where it is not given.
        copies: in how many lists a vector may be. num_parts: bytes of a code; the lists hold vectors without it.
    """
    num_lists = min(len(vectors), num_lists or usual_num_lists(len(vectors)))
    near = np.asarray(unit(jnp.asarray(vectors))) if metric == "cosine" else vectors
    placed = jnp.asarray(near)
    clusters = k_means(placed, num_lists, rounds, seed)
    lists = clusters.lists if copies == 1 else closure(placed, clusters.centroids, clusters.lists, copies)
    centroids, where = np.asarray(clusters.centroids), np.asarray(lists)
    if num_parts is None:
        return fill(vectors, centroids, where, metric)
    differences = placed.astype(jnp.float32) - clusters.centroids[clusters.lists]
    num_codes = min(256, len(vectors))
    books = train_codebooks(differences, num_parts, rounds, seed, num_codes)
    return fill_codes(near, centroids, where, metric, books)
