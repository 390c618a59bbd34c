"""Find the lists of a few vectors on the host: the nearest centroids, and SPANN's closure.

In: prepared vectors and centroids. Out: lists. The same rule as `ivf.closure`, in NumPy: the number of lists changes with
each split, and a compiled program would be compiled anew.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID

#: Vectors that are compared with all centroids at a time.
_ROWS = 512
#: Candidate lists per copy; factor on squared distances, as in `robust_prune`.
_CANDIDATES, _ALPHA = 4, 2.0


class Near(NamedTuple):
    """The nearest lists of vectors, `[n, m]`, nearest first, and their squared distances."""

    lists: NDArray[np.int64]
    squares: NDArray[np.float32]


def squared_distances(vectors: NDArray[np.float32], centroids: NDArray[np.float32]) -> NDArray[np.float32]:
    """f32 `[n, num_lists]`."""
    found = (vectors**2).sum(axis=1)[:, None] + (centroids**2).sum(axis=1)[None] - 2 * (vectors @ centroids.T)
    return np.maximum(found, 0)


def nearest(vectors: NDArray[np.float32], centroids: NDArray[np.float32], num: int) -> Near:
    """The `num` nearest lists of each vector.

    Args:
        vectors: `[n, d]`, `prepared`.
    """
    num = min(num, len(centroids))
    lists, squares = np.zeros((len(vectors), num), np.int64), np.zeros((len(vectors), num), np.float32)
    for at in range(0, len(vectors), _ROWS):
        found = squared_distances(vectors[at : at + _ROWS], centroids)
        some = np.argpartition(found, num - 1, axis=1)[:, :num] if num < len(centroids) else None
        some = np.broadcast_to(np.arange(num), found.shape) if some is None else some
        far = np.take_along_axis(found, some, axis=1)
        order = np.lexsort((some, far), axis=1)
        lists[at : at + _ROWS] = np.take_along_axis(some, order, axis=1)
        squares[at : at + _ROWS] = np.take_along_axis(far, order, axis=1)
    return Near(lists, squares)


def closure(
    vectors: NDArray[np.float32], centroids: NDArray[np.float32], copies: int, reach: float
) -> NDArray[np.int64]:
    """The lists of each vector, int64 `[n, copies]`, first the nearest; `NO_ID` for fewer.

    Args:
        vectors: `[n, d]`, `prepared`.
        copies: maximum number of lists per vector.
        reach: maximum distance of a further centroid, relative to the nearest one.
    """
    near = nearest(vectors, centroids, 1 + _CANDIDATES * (copies - 1))
    found = np.full((len(vectors), copies), NO_ID, np.int64)
    found[:, 0] = near.lists[:, 0]
    if copies == 1:
        return found
    is_candidate = near.squares <= reach**2 * near.squares[:, :1]
    for row in np.flatnonzero(is_candidate[:, 1:].any(axis=1)):
        which = np.flatnonzero(is_candidate[row])
        some = centroids[near.lists[row, which]]
        between, own = squared_distances(some, some), near.squares[row, which]
        kept = [0]
        for place in range(1, len(which)):
            if len(kept) < copies and not (_ALPHA * between[kept, place] < own[place]).any():
                kept.append(place)
        found[row, : len(kept)] = near.lists[row, which[kept]]
    return found


def halves(vectors: NDArray[np.float32], least: float = 0.35) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """Divide vectors into two: which are in the second half, and the two centroids, f32 `[2, d]`.

    Two-means, each half with at least the share `least` of the vectors; equal vectors are divided by their order.

    Args:
        vectors: `[n, d]`, at least 2.
    """
    centred = vectors - vectors.mean(axis=0)
    direction = centred[np.argmax((centred**2).sum(axis=1))]
    for _ in range(8):
        direction = centred.T @ (centred @ direction)
        direction = direction / max(float(np.linalg.norm(direction)), 1e-30)
    along = centred @ direction
    fewest = max(1, int(least * len(vectors)))
    is_second = np.zeros(len(vectors), np.bool_)
    is_second[np.argsort(along, kind="stable")[len(vectors) // 2 :]] = True
    for _ in range(8):
        means = np.stack([vectors[~is_second].mean(axis=0), vectors[is_second].mean(axis=0)])
        squares = squared_distances(vectors, means)
        margin = squares[:, 1] - squares[:, 0]
        order = np.argsort(margin, kind="stable")  # nearest to the second first
        second = int(np.clip((margin < 0).sum(), fewest, len(vectors) - fewest))
        again = np.zeros(len(vectors), np.bool_)
        again[order[:second]] = True
        if (again == is_second).all():
            break
        is_second = again
    means = np.stack([vectors[~is_second].mean(axis=0), vectors[is_second].mean(axis=0)])
    return is_second, means.astype(np.float32)
