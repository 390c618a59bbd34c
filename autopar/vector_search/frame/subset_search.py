"""Exact search among some of vectors that lie in the host's memory.

In: vectors on the host, and which of them to look at. Out: the k best of those. They are brought to the devices piece by
piece, so that these need no room for all; each piece is searched by a planned program, of which there are few, for a piece
is padded to a power of two. It is the truth that other kinds of index are measured by, and what they fall back to where
a filter leaves few.
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
from autopar.vector_search.data.centering import centred
from autopar.vector_search.data.metrics import NO_ID, Metric
from autopar.vector_search.data.placement import Place
from autopar.vector_search.frame.exact_retry import Answers, Certain
from autopar.vector_search.kernels.exact_top_k import EXTRA, Corpus, Exact, exact_arguments, exact_search, search_terms
from autopar.vector_search.kernels.tiling import Blocks, Tiling

#: Bytes of vectors on all devices at a time; of a budget at most this share.
_PIECE_BYTES, _SHARE = 2**28, 0.125
#: Vectors of the smallest piece.
_LEAST = 1024


class Among:
    """Exact searches of some of the vectors.

    Args:
        vectors: `[n, d]`, checked, on the host.
    """

    def __init__(self, vectors: NDArray[Any], metric: Metric, place: Place) -> None:
        self._vectors, self._place = vectors, place
        self._metric: Metric = metric
        self._num_devices = place.num_devices
        most_bytes = min(_PIECE_BYTES, _SHARE * place.budget_bytes)
        self._most = max(_LEAST, _power_of_two(int(most_bytes / vectors[:1].nbytes)) // 2)
        self._certain = Certain()
        self._programs: dict[tuple[Blocks, Tiling, int, int | None], Planned] = {}

    def search(self, queries: NDArray[Any], k: int, which: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Distances and positions of the best, best first, `[num_queries, k]`; `NO_ID` where there is none.

        Args:
            queries: `[num_queries, d]`, checked. which: positions, `[m]`.
        """
        sign = 1 if self._metric == "l2" else -1
        best: tuple[NDArray[Any], NDArray[Any]] | None = None
        for start in range(0, max(1, len(which)), self._most):
            found = self._piece(queries, k, which[start : start + self._most])
            if best is not None:
                found = tuple(np.concatenate(two, axis=1) for two in zip(best, found, strict=True))
            order = np.argsort(sign * found[0].astype(np.float64), axis=1, kind="stable")[:, :k]
            best = (np.take_along_axis(found[0], order, 1), np.take_along_axis(found[1], order, 1))
        assert best is not None
        return best

    def _piece(self, queries: NDArray[Any], k: int, which: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        tiling = Tiling.of(min(self._most, max(_LEAST, _power_of_two(len(which)))), self._num_devices)
        kept, dim = min(k, tiling.places), self._vectors.shape[1]
        some = np.zeros((tiling.places, dim), self._vectors.dtype)
        less, centre = centred(self._vectors[which], self._metric)
        some[: len(which)] = less
        is_there = (np.arange(tiling.places) < len(which)).reshape(tiling.shape)
        piece = Corpus(some.reshape(*tiling.shape, dim), centre, None, is_there)
        distances, places = self._certain.search(queries, partial(self._run, piece=piece, tiling=tiling, k=kept))
        positions = np.where(places == NO_ID, NO_ID, which[np.maximum(places, 0)] if len(which) else NO_ID)
        missing = ((0, 0), (0, k - kept))
        worst = metrics.worst_distance(distances.dtype, self._metric)
        return np.pad(distances, missing, constant_values=worst), np.pad(positions, missing, constant_values=NO_ID)

    def _run(self, queries: NDArray[Any], extra: int | None, *, piece: Corpus, tiling: Tiling, k: int) -> Answers:
        blocks, dim = Blocks.of(max(1, len(queries)), self._num_devices), self._vectors.shape[1]
        padded = np.zeros((blocks.places, dim), self._vectors.dtype)
        padded[: len(queries)] = queries
        made = self._program(blocks, tiling, k, extra).run(padded.reshape(blocks.blocks, blocks.block, dim), piece)
        distances, places = (np.asarray(a).reshape(blocks.places, k)[: len(queries)] for a in made[:2])
        if made.is_certain is None:
            return distances, places, None
        return distances, places, np.asarray(made.is_certain).reshape(-1)[: len(queries)]

    def _program(self, blocks: Blocks, tiling: Tiling, k: int, extra: int | None) -> Planned:
        key = (blocks, tiling, k, extra)
        if key not in self._programs:
            dim, dtype = self._vectors.shape[1], self._vectors.dtype
            queries, corpus = exact_arguments(tiling, blocks, dim, dtype, self._metric)
            search = search_of_a_piece(self._metric, k, at_once=blocks.at_once, extra=extra)
            self._programs[key] = Planned.of(search, (queries, corpus._replace(term=None)), self._place.options)
        return self._programs[key]


def search_of_a_piece(metric: Metric, k: int, *, at_once: bool, extra: int | None = EXTRA) -> Callable[..., Exact]:
    """As `exact_search`, of vectors whose terms are not known; `extra` as of `certain`."""
    search = exact_search(metric, k, at_once=at_once, extra=extra or 0, directly=extra is None)

    def of_a_piece(queries: jax.Array, piece: Corpus) -> Exact:
        return search(queries, piece._replace(term=search_terms(piece.vectors, metric)))

    of_a_piece.__qualname__ = "exact_search_of_a_piece"
    return of_a_piece


def _power_of_two(number: int) -> int:
    """The least that is not below."""
    return 1 << max(0, number - 1).bit_length()
