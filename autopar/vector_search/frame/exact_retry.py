"""Exact searches again, of the queries of which the first is not certain.

In: a search, as a function of queries and of how many candidates are scored again. Out: answers that are certain, of each
query: by more candidates, and at last by the differences of all vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.kernels.exact_top_k import EXTRA

#: Candidates beyond k, one search after the other; None: all vectors, by differences.
_TRIES: tuple[int | None, ...] = (EXTRA, 16 * EXTRA, None)

#: Distances and positions, `[num_queries, k]`, and whether these are certain, `[num_queries]`; None: all are.
Answers = tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_] | None]


class Certain:
    """Searches of one corpus. It keeps with how many candidates most queries were certain, to begin there."""

    def __init__(self) -> None:
        self._first = 0

    def search(
        self, queries: NDArray[Any], run: Callable[[NDArray[Any], int | None], Answers]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Distances and positions, `[num_queries, k]`.

        Args:
            queries: `[num_queries, d]`. run: a search of some of them, with as many candidates.
        """
        first = self._first
        distances, positions, is_certain = run(queries, _TRIES[first])
        if is_certain is None or is_certain.all():
            return distances, positions
        left = np.flatnonzero(~is_certain)
        if 2 * len(left) > len(queries):
            self._first = min(first + 1, len(_TRIES) - 1)
        distances, positions = distances.copy(), positions.copy()
        for extra in _TRIES[first + 1 :]:
            distances[left], positions[left], is_certain = run(queries[left], extra)
            if is_certain is None or is_certain.all():
                break
            left = left[~is_certain]
        return distances, positions
