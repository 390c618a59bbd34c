"""Exact nearest neighbours by brute force: the reference for indexes."""

from __future__ import annotations

import numpy as np


def exact_scores(queries: np.ndarray, vectors: np.ndarray, metric: str) -> np.ndarray:
    """`[num_queries, n]`, in f64, larger is better: of l2 minus the squared distance."""
    wide, other = queries.astype(np.float64), vectors.astype(np.float64)
    if metric == "l2":
        return -((wide[:, None, :] - other[None, :, :]) ** 2).sum(axis=-1)
    if metric == "cosine":
        other = other / np.linalg.norm(other, axis=1, keepdims=True)
    return wide @ other.T


def exact_nearest(queries: np.ndarray, vectors: np.ndarray, k: int, metric: str = "l2") -> np.ndarray:
    """`[num_queries, k]`: positions, best first."""
    if metric != "l2":
        return np.argsort(-exact_scores(queries, vectors, metric), axis=1, kind="stable")[:, :k]
    parts = np.array_split(queries, max(1, len(queries) // 8))
    return np.concatenate([np.argsort(-exact_scores(p, vectors, metric), axis=1, kind="stable")[:, :k] for p in parts])


def recall(found: np.ndarray, truth: np.ndarray) -> float:
    """The part of `truth` that is found, by position, in each row."""
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), truth.tolist(), strict=True)]))
