"""Order lists so that near ones are in the same run of the order, which is one server's.

In: centroids. Out: the order. Each list has a number, and lists are sorted by it; the numbers vary as little as they can
between near lists. They are the second eigenvector of the graph of near centroids (Fiedler's), found by power iteration
from the direction in which the centroids vary most. A long chain of nearest centroids, as lists have in a file, winds
through the whole space: its runs are less compact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Near lists of each list, rounds of the iteration, and lists whose distances are computed at a time.
_NEAR, _ROUNDS, _ROWS = 32, 300, 512


def smooth_order(centroids: NDArray[np.float32]) -> NDArray[np.int64]:
    """The lists, int64 `[num_lists]`, in the order of their numbers.

    Args:
        centroids: f32 `[num_lists, d]`.
    """
    num = len(centroids)
    near = _near(centroids, min(_NEAR, num - 1))
    if not near.size:
        return np.arange(num)
    targets = near.reshape(-1)
    degrees = near.shape[1] + np.bincount(targets, minlength=num)
    constant = np.sqrt(degrees / degrees.sum())  # the first eigenvector
    found = _main_direction(centroids) * constant
    for _ in range(_ROUNDS):
        found = found - constant * (constant @ found)
        found = found / max(float(np.linalg.norm(found)), 1e-30)
        scaled = found / np.sqrt(degrees)
        around = scaled[near].sum(axis=1) + np.bincount(targets, np.repeat(scaled, near.shape[1]), num)
        found = found + around / np.sqrt(degrees)  # half of it stays, so no eigenvalue is negative
    return np.argsort(found / np.sqrt(degrees), kind="stable")


def _near(centroids: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The nearest other lists of each list, `[num_lists, count]`."""
    squares = (centroids**2).sum(axis=1)
    found = np.zeros((len(centroids), count), np.int64)
    for start in range(0, len(centroids), _ROWS):
        some = centroids[start : start + _ROWS]
        far = squares[None] - 2 * some @ centroids.T
        far[np.arange(len(some)), start + np.arange(len(some))] = np.inf
        found[start : start + _ROWS] = np.argpartition(far, count - 1, axis=1)[:, :count] if count else 0
    return found


def _main_direction(centroids: NDArray[np.float32]) -> NDArray[np.float64]:
    """f64 `[num_lists]`, the coordinate of each centroid in the direction in which they vary most."""
    centred = centroids.astype(np.float64) - centroids.mean(axis=0, dtype=np.float64)
    return centred @ np.linalg.eigh(centred.T @ centred)[1][:, -1]
