"""Place inverted lists in a stream of page payloads, so that lists that are probed together are adjacent.

In: centroids, and the bytes of each list. Out: the order of the lists, and the offset of each in the stream. A list
takes no more pages than its bytes fill. As far as that allows, it starts where the list before it ends, so both share a
page, which a query that probes both reads once; else it starts a page. Adjacent lists are read by one request.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES

#: Maximum centroids that are chained; more are bisected first. A chain takes quadratic time.
_MAX_CHAIN = 4096
#: Power iterations for the direction of a bisection.
_ITERATIONS = 8


def order_of(centroids: NDArray[np.float32]) -> NDArray[np.int64]:
    """The lists, ordered so that near centroids are adjacent: each is followed by the nearest that is left.

    Args:
        centroids: `[num_lists, d]`.
    """
    parts = [np.arange(len(centroids))]
    while any(len(part) > _MAX_CHAIN for part in parts):
        parts = [half for part in parts for half in (_halves(centroids, part) if len(part) > _MAX_CHAIN else (part,))]
    return np.concatenate([part[_chain(centroids[part])] for part in parts])


def packed(num_bytes: NDArray[np.int64], order: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """The offset of each list in the stream of payloads, int64 `[num_lists]`, and the length of the stream.

    Args:
        num_bytes: bytes of each list.
        order: the lists in the order in which they are placed.
    """
    starts, end = np.zeros(len(num_bytes), np.int64), 0
    for which in order.tolist():
        size = int(num_bytes[which])
        room = -end % PAYLOAD_BYTES
        if size and (size - 1) % PAYLOAD_BYTES + 1 > room:  # it would take one page more than it fills
            end += room
        starts[which] = end
        end += size
    return starts, end


def _halves(centroids: NDArray[np.float32], part: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bisect some centroids at the median along the direction in which they vary most."""
    some = centroids[part] - centroids[part].mean(axis=0)
    direction = some[np.argmax((some**2).sum(axis=1))]
    for _ in range(_ITERATIONS):
        direction = some.T @ (some @ direction)
        direction = direction / max(float(np.linalg.norm(direction)), 1e-30)
    order = np.argsort(some @ direction, kind="stable")
    return part[order[: len(part) // 2]], part[order[len(part) // 2 :]]


def _chain(centroids: NDArray[np.float32]) -> NDArray[np.int64]:
    """An order in which each centroid is followed by the nearest one that is left."""
    squares = (centroids**2).sum(axis=1)
    is_left, at, chain = np.ones(len(centroids), bool), int(np.argmin(squares)), []
    for _ in range(len(centroids)):
        chain.append(at)
        is_left[at] = False
        distances = np.where(is_left, squares - 2 * (centroids @ centroids[at]), np.inf)
        at = int(np.argmin(distances))
    return np.array(chain, np.int64)
