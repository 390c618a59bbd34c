"""Re-rank candidates by vectors in host memory.

In: queries and positions of their candidates. Out: the k best. The host gathers the candidates' vectors, `[num_queries,
m, d]`, and a planned program scores them on the devices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.api.planned_function import Planned
from autopar.vector_search.data.metrics import NO_ID, Metric, distances_of
from autopar.vector_search.data.placement import Place
from autopar.vector_search.kernels.exact_top_k import needs_rerank
from autopar.vector_search.kernels.rerank import best_of
from autopar.vector_search.kernels.tiling import rounded


class HostRerank:
    """Re-ranking by vectors, `[n, d]`, in host memory."""

    def __init__(self, vectors: NDArray[Any], metric: Metric, place: Place) -> None:
        self._vectors, self._place = vectors, place
        self._metric: Metric = metric
        self._programs: dict[tuple[int, int, int], Planned] = {}

    def best(
        self, queries: NDArray[Any], candidates: NDArray[np.int32], k: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Distances and positions of the k best candidates, `[num_queries, k]`.

        Args:
            queries: `[num_queries, d]`.
            candidates: `[num_queries, m]`, distinct; m is at least k.
        """
        num, places = len(queries), rounded(max(1, len(queries)))
        padded = np.zeros((places, queries.shape[1]), queries.dtype)
        padded[:num] = queries
        which = np.full((places, candidates.shape[1]), -1, np.int32)
        which[:num] = candidates
        gathered = self._vectors[np.maximum(which, 0)]
        distances, positions = self._program(places, candidates.shape[1], k).run(padded, gathered, which)
        return np.asarray(distances)[:num], np.asarray(positions)[:num]

    def _program(self, places: int, num_candidates: int, k: int) -> Planned:
        key = (places, num_candidates, k)
        if key not in self._programs:
            dim, dtype, struct = self._vectors.shape[1], self._vectors.dtype, jax.ShapeDtypeStruct

            def rerank(queries: jax.Array, gathered: jax.Array, candidates: jax.Array) -> tuple[jax.Array, jax.Array]:
                if needs_rerank(dtype, self._metric):  # direct differences do not cancel
                    vectors = gathered.astype(jnp.float32)
                    far = jnp.sum((queries.astype(jnp.float32)[:, None] - vectors) ** 2, axis=-1)
                    nearest, place = jax.lax.top_k(-jnp.where(candidates == NO_ID, jnp.inf, far), k)
                    return -nearest, jnp.take_along_axis(candidates, place, axis=1)
                best = best_of(gathered, queries, candidates, k, self._metric)
                return distances_of(best.scores, queries, self._metric), best.positions

            rerank.__qualname__ = "rerank"
            arguments = (
                struct((places, dim), dtype),
                struct((places, num_candidates, dim), dtype),
                struct((places, num_candidates), np.int32),
            )
            self._programs[key] = Planned.of(rerank, arguments, self._place.options)
        return self._programs[key]
