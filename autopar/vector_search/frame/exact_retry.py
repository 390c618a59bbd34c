"""Retry an exact search for queries whose result rounding makes uncertain.

In: a search, as a function of queries and of the number of re-ranked candidates. Out: certain results for all queries:
with more candidates, and finally by direct distances to all vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.kernels.exact_top_k import EXTRA

#: Re-ranked candidates beyond k, by attempt; None: direct distances to all vectors.
_EXTRA_BY_TRY: tuple[int | None, ...] = (EXTRA, 16 * EXTRA, None)

#: Distances and positions, `[num_queries, k]`, and whether they are certain, `[num_queries]`; None: all are.
Answers = tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_] | None]


class ExactRetry:
    """Retries on one corpus. It remembers how many candidates made most queries certain, and starts there."""

    def __init__(self) -> None:
        self._first = 0

    def search(
        self, queries: NDArray[Any], run: Callable[[NDArray[Any], int | None], Answers]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Distances and positions, `[num_queries, k]`, that are certain.

        Args:
            queries: `[num_queries, d]`.
            run: searches some queries with a number of re-ranked candidates.
        """
        first = self._first
        distances, positions, is_certain = run(queries, _EXTRA_BY_TRY[first])
        if is_certain is None or is_certain.all():
            return distances, positions
        left = np.flatnonzero(~is_certain)
        if 2 * len(left) > len(queries):
            self._first = min(first + 1, len(_EXTRA_BY_TRY) - 1)
        distances, positions = distances.copy(), positions.copy()
        for extra in _EXTRA_BY_TRY[first + 1 :]:
            distances[left], positions[left], is_certain = run(queries[left], extra)
            if is_certain is None or is_certain.all():
                break
            left = left[~is_certain]
        return distances, positions
