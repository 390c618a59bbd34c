"""Exact search: the index that is the vectors themselves, laid over the mesh by the planner.

In: checked vectors and ids, and the devices. Out: an `Index` whose searches are programs, one for each number of queries
(rounded up) and k, planned when first asked for. The corpus lies as the plan for the expected batch says; where
another batch is faster in another layout, it is held in that one too if the memory budget allows, and else
planned for the layout there is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.partition_spec import partition_spec
from autopar.vector_search import inputs, metrics
from autopar.vector_search.exact import exact_arguments, exact_search
from autopar.vector_search.held import Arrays, Held
from autopar.vector_search.index import Found, IndexStats
from autopar.vector_search.index_file import write
from autopar.vector_search.metrics import Metric
from autopar.vector_search.place import Place
from autopar.vector_search.planned import Planned
from autopar.vector_search.tiling import Blocks, Tiling

KIND = "exact"

#: The names of the corpus's arrays, as a search's arguments.
_CORPUS = ("vectors", "term", "may_return")
#: Neighbours that the layout is first planned for.
_USUAL_K = 10


class ExactIndex:
    """Vectors, searched one by one.

    Args:
        vectors: `[n, d]`, checked. ids: of each, checked.
    """

    def __init__(self, vectors: NDArray[Any], ids: NDArray[np.int64], metric: Metric, place: Place) -> None:
        self.ids = ids
        self.metric: Metric = metric
        self._place, self._num_devices = place, place.num_devices
        self._dim, self._dtype = vectors.shape[1], vectors.dtype
        self._tiling = Tiling.of(len(ids), self._num_devices)
        self._programs: dict[tuple[Blocks, int], tuple[Planned, Arrays]] = {}
        self._home = self._planned(Blocks.of(place.batch, self._num_devices), self._kept(_USUAL_K))
        tiled = _tiled(vectors, self._tiling)
        real = _tiled(np.ones(len(ids), np.bool_), self._tiling)
        term = jax.jit(partial(metrics.terms, metric=metric))(jax.device_put(tiled, self._home.shardings[1]))
        corpus = [array for array in (tiled, term, real) if array is not None]
        self._held = Held(corpus, self._home.shardings[1:], place.budget_bytes)

    def search(self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None) -> Found:
        """As `Index.search` says."""
        asked = inputs.checked_queries(queries, self._dim, self._dtype)
        k, allowed = inputs.checked_k(k), inputs.checked_filter(filter, len(self.ids))
        blocks = Blocks.of(max(1, len(asked)), self._num_devices)
        program, corpus = self._program(blocks, self._kept(k))
        if allowed is not None:
            corpus = (*corpus[:-1], jax.device_put(_tiled(allowed, self._tiling), corpus[-1].sharding))
        padded = np.zeros((blocks.places, self._dim), self._dtype)
        padded[: len(asked)] = asked
        vectors, *term, may_return = corpus
        found = program.run(padded.reshape(blocks.blocks, blocks.block, -1), vectors, *(term or [None]), may_return)
        distances, positions = (np.asarray(a).reshape(blocks.places, -1)[: len(asked)] for a in found)
        result = self._as_found(distances, positions, k)
        return Found(*(a[0] for a in result)) if np.ndim(queries) == 1 else result

    def planned(self, num_queries: int, k: int) -> Planned:
        """The planned program of such a search: its `plan` explains it, and `autopar.verify` takes its function and
        arguments."""
        return self._program(Blocks.of(num_queries, self._num_devices), self._kept(inputs.checked_k(k)))[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """As `Index.save` says."""
        vectors = np.asarray(self._held.layouts[0][0]).reshape(-1, self._dim)[: len(self.ids)]
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
            device_bytes=self._held.device_bytes,
            layouts=tuple(map(str, self._held.specs)),
            searches={(b.places, k): p.plan.prediction.step_time_s for (b, k), (p, _) in self._programs.items()},
        )

    # -- inside ------------------------------------------------------------------------------

    def _kept(self, k: int) -> int:
        return min(k, self._tiling.places)

    def _program(self, blocks: Blocks, k: int) -> tuple[Planned, Arrays]:
        """The program of a search, and the corpus as it wants it."""
        if (blocks, k) not in self._programs:
            program = self._planned(blocks, k)
            corpus = self._held.at(program.shardings[1:], program.plan.prediction.peak_bytes)
            if corpus is None:  # no room for one layout more: the plan is to keep to the first
                pins = {t.path: partition_spec(t.sharding) for t in self._home.plan.inputs if t.path in _CORPUS}
                program = self._planned(blocks, k, {"pin": pins, "mesh": self._home.mesh})
                corpus = self._held.layouts[0]
            self._programs[blocks, k] = program, corpus
        return self._programs[blocks, k]

    def _planned(self, blocks: Blocks, k: int, more: Mapping[str, Any] = MappingProxyType({})) -> Planned:
        search = exact_search(self.metric, k, at_once=blocks.at_once)
        arguments = exact_arguments(self._tiling, blocks, self._dim, self._dtype, self.metric)
        return Planned.of(search, arguments, {**self._place.options, **more})

    def _as_found(self, distances: NDArray[Any], positions: NDArray[Any], k: int) -> Found:
        """The user's ids, padded to k."""
        there = positions != metrics.NO_ID
        ids = np.full(positions.shape, metrics.NO_ID, np.int64)
        ids[there] = self.ids[positions[there]]
        if k == ids.shape[1]:
            return Found(ids, distances)
        missing = ((0, 0), (0, k - ids.shape[1]))
        worst = metrics.worst_distance(distances.dtype, self.metric)
        return Found(
            np.pad(ids, missing, constant_values=metrics.NO_ID), np.pad(distances, missing, constant_values=worst)
        )


def _tiled(array: NDArray[Any], tiling: Tiling) -> NDArray[Any]:
    """`[n, ...]` in the corpus's places; empty ones are zeros."""
    padded = array
    if len(array) != tiling.places:
        padded = np.zeros((tiling.places, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
    return padded.reshape(*tiling.shape, *array.shape[1:])
