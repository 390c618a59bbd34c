"""Search a subset of vectors in host memory exactly.

In: vectors on the host, and the positions of a subset. Out: the k best of the subset. The subset moves to the devices
in chunks, so the devices need no memory for all of it. Chunks are padded to powers of two, so few planned programs
serve all subsets. This search gives the true neighbours for measuring recall, and serves selective filters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from autopar.api.planned_function import Planned
from autopar.vector_search.data import metrics
from autopar.vector_search.data.centering import centre_corpus
from autopar.vector_search.data.metrics import NO_ID, Metric
from autopar.vector_search.data.placement import Place
from autopar.vector_search.frame.exact_retry import Answers, ExactRetry
from autopar.vector_search.kernels.exact_top_k import EXTRA, Corpus, Exact, exact_arguments, exact_search, search_terms
from autopar.vector_search.kernels.tiling import Blocks, Tiling

#: Bytes of a chunk on all devices; maximum fraction of the memory budget.
_CHUNK_BYTES, _BUDGET_FRACTION = 2**28, 0.125
#: Vectors of the smallest chunk.
_MIN_CHUNK = 1024


class SubsetSearch:
    """Exact searches of subsets of the vectors.

    Args:
        vectors: `[n, d]`, checked, on the host.
    """

    def __init__(self, vectors: NDArray[Any], metric: Metric, place: Place) -> None:
        self._vectors, self._place = vectors, place
        self._metric: Metric = metric
        self._num_devices = place.num_devices
        most_bytes = min(_CHUNK_BYTES, _BUDGET_FRACTION * place.budget_bytes)
        self._max_chunk = max(_MIN_CHUNK, _power_of_two(int(most_bytes / vectors[:1].nbytes)) // 2)
        self._retry = ExactRetry()
        self._programs: dict[tuple[Blocks, Tiling, int, int | None], Planned] = {}

    def search(self, queries: NDArray[Any], k: int, which: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Distances and positions of the k best, best first, `[num_queries, k]`; `NO_ID` for no result.

        Args:
            queries: `[num_queries, d]`, checked.
            which: positions of the subset, `[m]`.
        """
        sign = 1 if self._metric == "l2" else -1
        best: tuple[NDArray[Any], NDArray[Any]] | None = None
        for start in range(0, max(1, len(which)), self._max_chunk):
            found = self._chunk(queries, k, which[start : start + self._max_chunk])
            if best is not None:
                found = tuple(np.concatenate(two, axis=1) for two in zip(best, found, strict=True))
            order = np.argsort(sign * found[0].astype(np.float64), axis=1, kind="stable")[:, :k]
            best = (np.take_along_axis(found[0], order, 1), np.take_along_axis(found[1], order, 1))
        assert best is not None
        return best

    def _chunk(self, queries: NDArray[Any], k: int, which: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        tiling = Tiling.of(min(self._max_chunk, max(_MIN_CHUNK, _power_of_two(len(which)))), self._num_devices)
        chunk_k, dim = min(k, tiling.capacity), self._vectors.shape[1]
        padded = np.zeros((tiling.capacity, dim), self._vectors.dtype)
        centred, centre = centre_corpus(self._vectors[which], self._metric)
        padded[: len(which)] = centred
        is_vector = (np.arange(tiling.capacity) < len(which)).reshape(tiling.shape)
        chunk = Corpus(padded.reshape(*tiling.shape, dim), centre, None, is_vector)
        distances, places = self._retry.search(queries, partial(self._run, chunk=chunk, tiling=tiling, k=chunk_k))
        positions = np.where(places == NO_ID, NO_ID, which[np.maximum(places, 0)] if len(which) else NO_ID)
        missing = ((0, 0), (0, k - chunk_k))
        worst = metrics.worst_distance(distances.dtype, self._metric)
        return np.pad(distances, missing, constant_values=worst), np.pad(positions, missing, constant_values=NO_ID)

    def _run(self, queries: NDArray[Any], extra: int | None, *, chunk: Corpus, tiling: Tiling, k: int) -> Answers:
        blocks, dim = Blocks.of(max(1, len(queries)), self._num_devices), self._vectors.shape[1]
        padded = np.zeros((blocks.capacity, dim), self._vectors.dtype)
        padded[: len(queries)] = queries
        result = self._program(blocks, tiling, k, extra).run(padded.reshape(blocks.blocks, blocks.block, dim), chunk)
        distances, places = (np.asarray(a).reshape(blocks.capacity, k)[: len(queries)] for a in result[:2])
        if result.is_certain is None:
            return distances, places, None
        return distances, places, np.asarray(result.is_certain).reshape(-1)[: len(queries)]

    def _program(self, blocks: Blocks, tiling: Tiling, k: int, extra: int | None) -> Planned:
        key = (blocks, tiling, k, extra)
        if key not in self._programs:
            dim, dtype = self._vectors.shape[1], self._vectors.dtype
            queries, corpus = exact_arguments(tiling, blocks, dim, dtype, self._metric)
            search = chunk_search(self._metric, k, at_once=blocks.at_once, extra=extra)
            self._programs[key] = Planned.of(search, (queries, corpus._replace(term=None)), self._place.options)
        return self._programs[key]


def chunk_search(metric: Metric, k: int, *, at_once: bool, extra: int | None = EXTRA) -> Callable[..., Exact]:
    """An `exact_search` that computes the vectors' terms itself; `extra` as in `exact_retry`."""
    search = exact_search(metric, k, at_once=at_once, extra=extra or 0, direct=extra is None)

    def of_chunk(queries: jax.Array, chunk: Corpus) -> Exact:
        return search(queries, chunk._replace(term=search_terms(chunk.vectors, metric)))

    of_chunk.__qualname__ = "exact_search_of_a_piece"
    return of_chunk


def _power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
