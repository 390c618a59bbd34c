"""Generate synthetic vectors: FAISS's synthetic set without FAISS, and clusters of very unequal size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class VectorSet(NamedTuple):
    """Three f32 arrays `[n, d]`: training vectors, corpus, queries."""

    train: np.ndarray
    corpus: np.ndarray
    queries: np.ndarray


def faiss_synthetic(dim: int, num_train: int, num_vectors: int, num_queries: int, seed: int = 1338) -> VectorSet:
    """The vectors of `faiss.contrib.datasets.SyntheticDataset`: a Gaussian of 10 dimensions, mapped linearly into
    `dim`, then passed through a sine."""
    intrinsic = 10
    draw = np.random.RandomState(seed)  # FAISS's own generator, for the same numbers
    vectors = draw.normal(size=(num_vectors + num_train + num_queries, intrinsic)) @ draw.rand(intrinsic, dim)
    vectors = np.sin(vectors * (draw.rand(dim) * 4 + 0.1)).astype(np.float32)
    return VectorSet(*np.split(vectors, [num_train, num_train + num_vectors]))


def skewed_clusters(
    dim: int, num_vectors: int, num_queries: int, num_clusters: int = 200, exponent: float = 1.0, seed: int = 0
) -> VectorSet:
    """Vectors and queries from Gaussian clusters; the i-th is `i ** -exponent` as likely as the first (Zipf)."""
    draw = np.random.default_rng(seed)
    share = np.arange(1, num_clusters + 1) ** -exponent
    cluster = draw.choice(num_clusters, size=num_vectors + num_queries, p=share / share.sum())
    centers = draw.normal(size=(num_clusters, dim))
    width = draw.uniform(0.1, 0.5, size=num_clusters)
    noise = draw.normal(size=(len(cluster), dim)) * width[cluster, None]
    vectors = (centers[cluster] + noise).astype(np.float32)
    return VectorSet(vectors[:num_vectors], vectors[:num_vectors], vectors[num_vectors:])
