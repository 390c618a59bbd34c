"""Vectors made up: FAISS's synthetic set, the same numbers without FAISS, and clusters of very unequal size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class VectorSet(NamedTuple):
    """f32 `[n, d]` each: vectors to train on, to search, and to search by."""

    train: np.ndarray
    corpus: np.ndarray
    queries: np.ndarray


def faiss_synthetic(dim: int, num_train: int, num_vectors: int, num_queries: int, seed: int = 1338) -> VectorSet:
    """What `faiss.contrib.datasets.SyntheticDataset` draws: a Gaussian of 10 dimensions, laid linearly into `dim`, then
    bent by a sine."""
    intrinsic = 10
    draw = np.random.RandomState(seed)  # FAISS's own generator: the same numbers
    vectors = draw.normal(size=(num_vectors + num_train + num_queries, intrinsic)) @ draw.rand(intrinsic, dim)
    vectors = np.sin(vectors * (draw.rand(dim) * 4 + 0.1)).astype(np.float32)
    return VectorSet(*np.split(vectors, [num_train, num_train + num_vectors]))


def skewed_clusters(
    dim: int, num_vectors: int, num_queries: int, num_clusters: int = 200, exponent: float = 1.0, seed: int = 0
) -> VectorSet:
    """Gaussian clusters, the i-th of them `i ** -exponent` as likely as the first (Zipf), in vectors and in queries."""
    draw = np.random.default_rng(seed)
    share = np.arange(1, num_clusters + 1) ** -exponent
    cluster = draw.choice(num_clusters, size=num_vectors + num_queries, p=share / share.sum())
    centers = draw.normal(size=(num_clusters, dim))
    width = draw.uniform(0.1, 0.5, size=num_clusters)
    noise = draw.normal(size=(len(cluster), dim)) * width[cluster, None]
    vectors = (centers[cluster] + noise).astype(np.float32)
    return VectorSet(vectors[:num_vectors], vectors[:num_vectors], vectors[num_vectors:])
