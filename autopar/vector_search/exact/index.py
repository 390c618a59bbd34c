"""Search a corpus exactly: the index `exact` holds the vectors, sharded over the mesh by the planner.

In: checked vectors and ids, and the devices. Out: an `Index`. It has one program for each number of queries (rounded
up) and k, planned on first use. The layout of the corpus is that of the plan for the expected batch
(`frame.planned_programs`). Queries whose result rounding makes uncertain are searched again (`frame.exact_retry`).
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.api.planned_function import Planned
from autopar.errors import SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.centering import centre_corpus, restore_vectors
from autopar.vector_search.data.index import Found, IndexStats, found_at
from autopar.vector_search.data.index_file import write
from autopar.vector_search.data.metrics import Metric
from autopar.vector_search.data.placement import Place
from autopar.vector_search.frame.device_corpus import Arrays
from autopar.vector_search.frame.exact_retry import Answers, ExactRetry
from autopar.vector_search.frame.planned_programs import Programs, Step
from autopar.vector_search.kernels.exact_top_k import EXTRA, Corpus, exact_arguments, exact_search, search_terms
from autopar.vector_search.kernels.tiling import Blocks, Tiling

KIND = "exact"

#: k of the program whose plan determines the first layout.
_USUAL_K = 10


class _Search(NamedTuple):
    """The key of a program: number of queries, k, and re-ranked candidates beyond k; `extra` None: direct distances to
    all vectors."""

    blocks: Blocks
    k: int
    extra: int | None = EXTRA


class ExactIndex:
    """An exact index.

    Args:
        vectors: `[n, d]`, checked.
        ids: id of each vector, checked.
        why: reason for the choice of exact search; empty if the user named it.
    """

    def __init__(
        self, vectors: NDArray[Any], ids: NDArray[np.int64], metric: Metric, place: Place, why: str = ""
    ) -> None:
        self.ids = ids
        self.metric: Metric = metric
        self._num_devices, self._why = place.num_devices, why
        self._dim, self._dtype = vectors.shape[1], vectors.dtype
        self._tiling = Tiling.of(len(ids), self._num_devices)
        home = _Search(Blocks.of(place.batch, self._num_devices), self._kept(_USUAL_K))
        struct = self._step(home)[1][1]
        leaves, self._tree = jax.tree.flatten(struct)
        self._programs = Programs(self._step, home, len(leaves), place)
        self._retry = ExactRetry()
        centred, centre = centre_corpus(vectors, metric)
        real = _tiled(np.ones(len(ids), np.bool_), self._tiling)
        on_devices = jax.device_put(_tiled(centred, self._tiling), self._programs.shardings[0])
        term = jax.jit(partial(search_terms, metric=metric))(on_devices)
        self._programs.place(jax.tree.leaves(Corpus(on_devices, centre, term, real)))

    def search(
        self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None, effort: int | None = None
    ) -> Found:
        """See `Index.search`."""
        if effort is not None:
            raise SearchError(f"`effort` is {effort!r}, but an exact index has no `effort` option: omit it")
        checked = inputs.checked_queries(queries, self._dim, self._dtype)
        k, allowed = inputs.checked_count("k", k), inputs.checked_filter(filter, len(self.ids))
        tiled = None if allowed is None else _tiled(allowed, self._tiling)
        distances, positions = self._retry.search(checked, partial(self._run, k=k, allowed=tiled))
        found = found_at(positions, distances, self.ids, k, self.metric)
        return found.of_one() if np.ndim(queries) == 1 else found

    def planned(self, num_queries: int, k: int) -> Planned:
        """The planned program of such a search: its `plan` explains it; `autopar.verify` takes its function and
        arguments."""
        return self._programs.get(
            _Search(Blocks.of(num_queries, self._num_devices), self._kept(inputs.checked_count("k", k)))
        )[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """See `Index.save`."""
        corpus = self._corpus(self._programs.corpus.layouts[0])
        centred = np.asarray(corpus.vectors).reshape(-1, self._dim)[: len(self.ids)]
        vectors = restore_vectors(centred, None if corpus.centre is None else np.asarray(corpus.centre))
        write(path, KIND, {"metric": self.metric}, {"vectors": vectors, "ids": self.ids})

    def stats(self) -> IndexStats:
        """See `Index.stats`."""
        return IndexStats(
            kind=KIND,
            metric=self.metric,
            dtype=self._dtype.name,
            num_vectors=len(self.ids),
            dim=self._dim,
            num_devices=self._num_devices,
            device_bytes=self._programs.corpus.device_bytes,
            layouts=tuple(map(str, self._programs.corpus.specs)),
            searches={
                (s.blocks.capacity, s.k): p.plan.prediction.step_time_s
                for s, (p, _) in self._programs.planned.items()
                if s.extra == EXTRA
            },
            details={"why": self._why} if self._why else {},
            reached=True,
        )

    # -- private ------------------------------------------------------------------------------

    def _kept(self, k: int) -> int:
        return min(k, self._tiling.capacity)

    def _run(self, queries: NDArray[Any], extra: int | None, *, k: int, allowed: NDArray[np.bool_] | None) -> Answers:
        blocks = Blocks.of(max(1, len(queries)), self._num_devices)
        program, arrays = self._programs.get(_Search(blocks, self._kept(k), extra), keep_layout=extra != EXTRA)
        corpus = self._corpus(arrays)
        if allowed is not None:
            corpus = corpus._replace(may_return=jax.device_put(allowed, corpus.may_return.sharding))
        padded = np.zeros((blocks.capacity, self._dim), self._dtype)
        padded[: len(queries)] = queries
        made = program.run(padded.reshape(blocks.blocks, blocks.block, -1), corpus)
        distances, positions = (np.asarray(a).reshape(blocks.capacity, -1)[: len(queries)] for a in made[:2])
        if made.is_certain is None:
            return distances, positions, None
        return distances, positions, np.asarray(made.is_certain).reshape(-1)[: len(queries)]

    def _corpus(self, arrays: Arrays) -> Corpus:
        return jax.tree.unflatten(self._tree, arrays)

    def _step(self, key: _Search) -> Step:
        search = exact_search(
            self.metric, key.k, at_once=key.blocks.at_once, extra=key.extra or 0, direct=key.extra is None
        )
        return search, exact_arguments(self._tiling, key.blocks, self._dim, self._dtype, self.metric)


def _tiled(array: NDArray[Any], tiling: Tiling) -> NDArray[Any]:
    """Pad `[n, ...]` with zeros and reshape it to the tiling."""
    padded = array
    if len(array) != tiling.capacity:
        padded = np.zeros((tiling.capacity, *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
    return padded.reshape(*tiling.shape, *array.shape[1:])
