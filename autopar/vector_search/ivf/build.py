"""Build inverted lists: k-means, optional closure assignment, optional product quantization.

In: vectors and list parameters. Out: `InvertedLists`.
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
    """About 2 sqrt(n), at which scoring all centroids costs about as much as scoring the vectors of a few lists."""
    return max(1, min(num_vectors, round(2 * math.sqrt(num_vectors))))


def build_lists(
    vectors: np.ndarray,
    metric: Metric,
    num_lists: int | None = None,
    copies: int = 1,
    num_parts: int | None = None,
    iterations: int = 10,
    seed: int = 0,
    shares_programs: bool = False,
) -> InvertedLists:
    """Build the lists of `vectors`, `[n, d]`, with n of at least 1.

    Args:
        num_lists: at most n; by default `usual_num_lists`.
        copies: maximum number of lists per vector.
        num_parts: bytes of a code; None: the lists hold vectors.
        shares_programs: as in `fill`; for lists of vectors.
    """
    num_lists = min(len(vectors), num_lists or usual_num_lists(len(vectors)))
    normalized = np.asarray(unit(jnp.asarray(vectors))) if metric == "cosine" else vectors
    placed = jnp.asarray(normalized)
    clusters = k_means(placed, num_lists, iterations, seed)
    lists = clusters.lists if copies == 1 else closure(placed, clusters.centroids, clusters.lists, copies)
    centroids, assignment = np.asarray(clusters.centroids), np.asarray(lists)
    if num_parts is None:
        return fill(vectors, centroids, assignment, metric, shares_programs=shares_programs)
    residuals = placed.astype(jnp.float32) - clusters.centroids[clusters.lists]
    num_codes = min(256, len(vectors))
    books = train_codebooks(residuals, num_parts, iterations, seed, num_codes)
    return fill_codes(normalized, centroids, assignment, metric, books)
