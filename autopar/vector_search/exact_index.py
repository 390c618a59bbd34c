"""Exact search: the index that is the vectors themselves, laid over the mesh by the planner.

In: checked vectors and ids, and the devices. Out: an `Index` whose searches are programs, one for each number of queries
(rounded up) and k, planned when first asked for. The corpus lies as the plan for the expected batch says (`programs`).
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.planned import Planned
from autopar.vector_search import inputs, metrics
from autopar.vector_search.exact import exact_arguments, exact_search
from autopar.vector_search.index import Found, IndexStats, found_at
from autopar.vector_search.index_file import write
from autopar.vector_search.metrics import Metric
from autopar.vector_search.place import Place
from autopar.vector_search.programs import Programs, Step
from autopar.vector_search.tiling import Blocks, Tiling

KIND = "exact"

#: Neighbours that the layout is first planned for.
_USUAL_K = 10


class ExactIndex:
    """Vectors, searched one by one.

    Args:
        vectors: `[n, d]`, checked. ids: of each, checked.
        why: exact search was chosen, if it was not asked for.
    """

    def __init__(
        self, vectors: NDArray[Any], ids: NDArray[np.int64], metric: Metric, place: Place, why: str = ""
    ) -> None:
        self.ids = ids
        self.metric: Metric = metric
        self._num_devices, self._why = place.num_devices, why
        self._dim, self._dtype = vectors.shape[1], vectors.dtype
        self._tiling = Tiling.of(len(ids), self._num_devices)
        home = (Blocks.of(place.batch, self._num_devices), self._kept(_USUAL_K))
        self._programs = Programs(self._step, home, 2 if metric == "inner_product" else 3, place)
        tiled = _tiled(vectors, self._tiling)
        real = _tiled(np.ones(len(ids), np.bool_), self._tiling)
        on_devices = jax.device_put(tiled, self._programs.shardings[0])
        term = jax.jit(partial(metrics.terms, metric=metric))(on_devices)
        self._programs.hold([array for array in (on_devices, term, real) if array is not None])

    def search(
        self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None, effort: int | None = None
    ) -> Found:
        """As `Index.search` says."""
        if effort is not None:
            raise SearchError(f"`effort` is {effort!r}, and this index is exact: it finds all. Leave it out")
        asked = inputs.checked_queries(queries, self._dim, self._dtype)
        k, allowed = inputs.checked_k(k), inputs.checked_filter(filter, len(self.ids))
        blocks = Blocks.of(max(1, len(asked)), self._num_devices)
        program, corpus = self._programs.of((blocks, self._kept(k)))
        if allowed is not None:
            corpus = (*corpus[:-1], jax.device_put(_tiled(allowed, self._tiling), corpus[-1].sharding))
        padded = np.zeros((blocks.places, self._dim), self._dtype)
        padded[: len(asked)] = asked
        vectors, *term, may_return = corpus
        made = program.run(padded.reshape(blocks.blocks, blocks.block, -1), vectors, *(term or [None]), may_return)
        distances, positions = (np.asarray(a).reshape(blocks.places, -1)[: len(asked)] for a in made)
        found = found_at(positions, distances, self.ids, k, self.metric)
        return found.of_one() if np.ndim(queries) == 1 else found

    def planned(self, num_queries: int, k: int) -> Planned:
        """The planned program of such a search: its `plan` explains it, and `autopar.verify` takes its function and
        arguments."""
        return self._programs.of((Blocks.of(num_queries, self._num_devices), self._kept(inputs.checked_k(k))))[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """As `Index.save` says."""
        vectors = np.asarray(self._programs.held.layouts[0][0]).reshape(-1, self._dim)[: len(self.ids)]
        write(path, KIND, {"metric": self.metric}, {"vectors": vectors, "ids": self.ids})

    def stats(self) -> IndexStats:
        """As `Index.stats` says."""
        return IndexStats(
            kind=KIND,
            metric=self.metric,
            dtype=self._dtype.name,
            num_vectors=len(self.ids),
            dim=self._dim,
            num_devices=self._num_devices,
            device_bytes=self._programs.held.device_bytes,
            layouts=tuple(map(str, self._programs.held.specs)),
            searches={(b.places, k): p.plan.prediction.step_time_s for (b, k), (p, _) in self._programs.made.items()},
            details={"why": self._why} if self._why else {},
        )

    # -- inside ------------------------------------------------------------------------------

    def _kept(self, k: int) -> int:
        return min(k, self._tiling.places)

    def _step(self, key: tuple[Blocks, int]) -> Step:
        blocks, k = key
        search = exact_search(self.metric, k, at_once=blocks.at_once)
        return search, exact_arguments(self._tiling, blocks, self._dim, self._dtype, self.metric)


def _tiled(array: NDArray[Any], tiling: Tiling) -> NDArray[Any]:
    """`[n, ...]` in the corpus's places; empty ones are zeros."""
    padded = array
    if len(array) != tiling.places:
        padded = np.zeros((tiling.places, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
    return padded.reshape(*tiling.shape, *array.shape[1:])
