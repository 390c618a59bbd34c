"""Run a search `Method` as an index: the shared frame of inverted lists and graphs.

In: a `Method`, its arrays, and the vectors. Out: an `Index`. The planner lays out the arrays on the devices. The
vectors also stay in host memory, for re-ranking the candidates of quantized codes, and for exact search of the vectors
that a selective filter leaves (`subset_search`).

The effort of a search is an integer whose meaning the method defines, such as the number of probes. `measure` finds the
least effort that reaches the recall target on a sample (`recall_tuning`). A filter scales the effort by the inverse of
its selectivity. A query that finds fewer than k allowed vectors is searched again, exactly.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.api.planned_function import Planned
from autopar.errors import BudgetError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.centering import subtract_centre
from autopar.vector_search.data.duplicates import Duplicates, distances_between
from autopar.vector_search.data.index import Found, IndexStats, found_at
from autopar.vector_search.data.index_file import write
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.data.placement import Place
from autopar.vector_search.data.progress import Report
from autopar.vector_search.frame.host_rerank import HostRerank
from autopar.vector_search.frame.planned_programs import Programs, Step
from autopar.vector_search.frame.recall_tuning import (
    MEASURED_AT,
    Measured,
    Recall,
    for_filter,
    least_effort,
    recall_per_query,
    sample_size,
)
from autopar.vector_search.frame.search_method import AT_ONCE, Method, Search, step_of
from autopar.vector_search.frame.subset_search import SubsetSearch
from autopar.vector_search.kernels.tiling import rounded
from autopar.vector_search.kernels.top_k_merge import LeftOut


class _Sample(NamedTuple):
    """The queries that recall is measured with.

    Args:
        queries: `[num_queries, d]`.
        truth: positions of the true neighbours, `[num_queries, k]`.
        left_out: vectors that each query excludes.
    """

    queries: NDArray[Any]
    truth: NDArray[Any]
    left_out: LeftOut | None = None


class ApproximateIndex:
    """An index that compares a query with a part of the vectors.

    Args:
        method, arrays: the index kind and its arrays, on the host or on any device.
        vectors: `[n, d]`, checked, at least one.
        ids: id of each vector, checked.
        why: reason for the choice of this kind; empty if the user named it.
        centre: `[d]`, subtracted from the vectors in `arrays`, and so from queries.
    """

    def __init__(
        self,
        method: Method,
        arrays: Any,
        vectors: NDArray[Any],
        ids: NDArray[np.int64],
        place: Place,
        measured: Measured | None = None,
        why: str = "",
        centre: NDArray[Any] | None = None,
    ) -> None:
        self.ids = ids
        self.method = method
        self._vectors, self._place, self._why, self._centre = vectors, place, why, centre
        leaves, self._tree = jax.tree.flatten(arrays)
        self._shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)
        self._subset_search = SubsetSearch(vectors, method.metric, place)
        self._rerank = HostRerank(vectors, method.metric, place)
        effort = measured.effort if measured else method.usual
        home = Search(rounded(min(place.batch, AT_ONCE)), self._kept(MEASURED_AT), effort)
        self._at_once = AT_ONCE
        self._programs: Programs[Search] = Programs(self._step, home, len(leaves), place)
        self._programs.place(leaves)
        self.measured = measured or Measured(effort, None, {})

    def measure(self, recall_target: float, report: Report, queries: NDArray[Any] | None = None) -> None:
        """Find and keep the least effort that reaches the recall target.

        Args:
            queries: `[num_queries, d]`, checked, the sample; None: distinct vectors of the corpus. Each of these
                excludes itself and its duplicates, which a search would find without effort.
        """
        if len(self.ids) == 1 and queries is None:
            return
        most = sample_size(recall_target)
        sample = self._sample_of_vectors(most) if queries is None else self._sample_of(queries, most)
        sampled, truth, metric = sample.queries, sample.truth, self.method.metric
        known = distances_between(sampled, self._vectors, truth, metric)

        def recall_at(effort: int) -> Recall:
            compared, num = self.method.num_compared(effort), len(self.ids)
            if compared > num:  # `search` is exact then
                return Recall(1.0, 1.0)
            report(f"measure recall at effort {effort}", 0.9)
            found = self._run(sampled, truth.shape[1], effort, left_out=sample.left_out, measures=True)[1]
            shares = recall_per_query(
                (distances_between(sampled, self._vectors, found, metric), found), (known, truth), metric
            )
            scored_again = self.method.refined * truth.shape[1]
            finds_all = compared == num and not 0 < scored_again < num and (shares == 1).all()
            return Recall(1.0, 1.0) if finds_all else Recall.of(shares)

        efforts = self.method.efforts(self._arrays, subtract_centre(sampled, self._centre), truth, recall_target)
        self.measured = least_effort(efforts, recall_target, recall_at)

    def search(
        self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None, effort: int | None = None
    ) -> Found:
        """See `Index.search`."""
        checked = inputs.checked_queries(queries, self._vectors.shape[1], self._vectors.dtype)
        k, allowed = inputs.checked_count("k", k), inputs.checked_filter(filter, len(self.ids))
        effort = self.measured.effort if effort is None else inputs.checked_count("effort", effort)
        num_allowed = len(self.ids) if allowed is None else int(np.count_nonzero(allowed))
        wanted = self._effort(effort, k, num_allowed)
        if self.method.num_compared(wanted) > num_allowed:
            distances, positions = self._exact_search(checked, k, allowed)
        else:
            distances, positions = self._run(checked, self._kept(k), wanted, allowed)
            short = np.flatnonzero(positions[:, min(k, num_allowed) - 1] == NO_ID)
            if short.size:
                distances, positions = distances.copy(), positions.copy()
                distances[short], positions[short] = self._exact_search(checked[short], k, allowed)
        found = found_at(positions, distances, self.ids, k, self.method.metric)
        return found.of_one() if np.ndim(queries) == 1 else found

    def planned(self, num_queries: int, k: int) -> Planned:
        """The planned program of such a search, as `ExactIndex.planned`; at most the queries of one program."""
        k = inputs.checked_count("k", k)
        effort = self._effort(self.measured.effort, k, len(self.ids))
        return self._programs.get(Search(rounded(min(num_queries, AT_ONCE)), self._kept(k), effort))[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """See `Index.save`."""
        about = {"metric": self.method.metric, "measured": self.measured.saved(), "why": self._why}
        arrays = {"vectors": self._vectors, "ids": self.ids, **self.method.saved(self._arrays)}
        if self._centre is not None:
            arrays["centre"] = self._centre
        write(path, self.method.kind, {**self.method.settings, **about}, arrays)

    def stats(self) -> IndexStats:
        """See `Index.stats`."""
        corpus, programs = self._programs.corpus, self._programs.planned
        why = {"why": self._why} if self._why else {}
        return IndexStats(
            kind=self.method.kind,
            metric=self.method.metric,
            dtype=self._vectors.dtype.name,
            num_vectors=len(self.ids),
            dim=self._vectors.shape[1],
            num_devices=self._place.num_devices,
            device_bytes=corpus.device_bytes,
            layouts=tuple(map(str, corpus.specs)),
            searches={
                (s.num_queries, s.k // max(1, self.method.refined)): p.plan.prediction.step_time_s
                for s, (p, _) in programs.items()
                if not s.measures
            },
            details={**self.measured.details, **self.method.details, **why},
            reached=self.measured.reached,
        )

    # -- private ------------------------------------------------------------------------------

    def _sample_of_vectors(self, most: int) -> _Sample:
        same = Duplicates.of(self._vectors, self.method.metric)
        own = np.random.default_rng(0).permutation(same.num_groups)[:most].astype(np.int32)
        queries, k = self._vectors[same.firsts[own]], min(MEASURED_AT, len(self.ids) - 1)
        nearest = self._subset_search.search(queries, min(k + 1, same.num_groups), same.firsts)[1]
        return _Sample(queries, same.others(nearest, own, k), LeftOut(same.groups, own))

    def _sample_of(self, queries: NDArray[Any], most: int) -> _Sample:
        queries = queries[np.sort(np.random.default_rng(0).permutation(len(queries))[:most])]
        k, every = min(MEASURED_AT, len(self.ids)), np.arange(len(self.ids))
        return _Sample(queries, self._subset_search.search(queries, k, every)[1])

    @property
    def _arrays(self) -> Any:
        return jax.tree.unflatten(self._tree, self._programs.corpus.layouts[0])

    def _exact_search(
        self, queries: NDArray[Any], k: int, allowed: NDArray[np.bool_] | None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        which = np.arange(len(self.ids)) if allowed is None else np.flatnonzero(allowed)
        return self._subset_search.search(queries, self._kept(k), which)

    def _kept(self, k: int) -> int:
        return min(k, len(self.ids))

    def _effort(self, effort: int, k: int, num_allowed: int) -> int:
        wanted = max(effort, self.method.enough(min(k, num_allowed)))
        return min(for_filter(wanted, max(1, num_allowed) / len(self.ids)), self.method.most)

    def _run(
        self,
        queries: NDArray[Any],
        k: int,
        effort: int,
        allowed: NDArray[np.bool_] | None = None,
        left_out: LeftOut | None = None,
        measures: bool = False,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Distances and positions, `[num_queries, k]`, in chunks of queries that fit the memory budget."""
        parts: list[tuple[NDArray[Any], NDArray[Any]]] = []
        start = 0
        while start < len(queries) or not parts:
            piece = slice(start, start + self._at_once)
            try:
                out = None if left_out is None else left_out._replace(own=left_out.own[piece])
                parts.append(self._run_chunk(queries[piece], k, effort, allowed, out, measures))
            except BudgetError:
                if self._at_once == 1:
                    raise
                self._at_once //= 2
            else:
                start = piece.stop
        distances, positions = (np.concatenate(each) for each in zip(*parts, strict=True))
        return distances, positions

    def _run_chunk(
        self,
        queries: NDArray[Any],
        k: int,
        effort: int,
        allowed: NDArray[np.bool_] | None,
        left_out: LeftOut | None,
        measures: bool,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        num_candidates = min(len(self.ids), max(1, self.method.refined) * k)
        num_queries = rounded(max(1, len(queries)))
        wide = self.method.measured_with(effort) if measures else None
        key = Search(num_queries, num_candidates, wide or effort, allowed is not None, left_out is not None, bool(wide))
        program, corpus = self._programs.get(key, keep_layout=key.measures)
        found = program.run(
            _padded(subtract_centre(queries, self._centre), num_queries),
            jax.tree.unflatten(self._tree, corpus),
            allowed,
            None if left_out is None else left_out._replace(own=_padded(np.asarray(left_out.own), num_queries)),
            *([np.int32(effort)] if wide else []),
        )
        distances, positions = (np.asarray(each)[: len(queries)] for each in found)
        return self._rerank.best(queries, positions, k) if self.method.refined else (distances, positions)

    def _step(self, key: Search) -> Step:
        return step_of(self.method, key, self._shapes, self._vectors.shape, self._vectors.dtype)


def _padded(array: NDArray[Any], num: int) -> NDArray[Any]:
    """Pad with zeros to `num` rows."""
    if len(array) == num:
        return array
    padded = np.zeros((num, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded
