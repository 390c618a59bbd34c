"""An index that compares a query with a part of the vectors: the frame around inverted lists and around graphs.

In: a `Method`, which says how one kind searches with a given effort, its arrays, and the vectors. Out: an `Index`. The
arrays lie on the devices as the planner says; the vectors themselves stay in the host's memory too, for what needs
more than the arrays: candidates of codes are scored again by them, and where a filter leaves so few that it is less
work to look at all of these, they are searched exactly (`among`).

The effort of a search is a number that a method makes sense of. When an index is built, the least that reaches the recall
target on a sample of the vectors is found (`effort`). A filter of which a share passes has that effort divided by the
share; whoever finds fewer than k where there are k is searched again, exactly.
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
from autopar.vector_search.data.centering import less_centre
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
    least_effort,
    queries_for,
    shares_of,
)
from autopar.vector_search.frame.search_method import AT_ONCE, Method, Search, step_of
from autopar.vector_search.frame.subset_search import Among
from autopar.vector_search.kernels.tiling import rounded
from autopar.vector_search.kernels.top_k_merge import LeftOut


class _Sample(NamedTuple):
    """What recall is measured by. queries: `[num_queries, d]`. truth: the neighbours of each, by position,
    `[num_queries, k]`. left_out: what each is not to find."""

    queries: NDArray[Any]
    truth: NDArray[Any]
    left_out: LeftOut | None = None


class ApproximateIndex:
    """Vectors, of which a search looks at some.

    Args:
        method, arrays: of its kind; arrays on the host or on any device.
        vectors: `[n, d]`, checked, at least one. ids: of each, checked.
        why: this kind was chosen, if it was not asked for.
        centre: `[d]`, what the vectors in `arrays` are less by, as queries then are too.
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
        self._among = Among(vectors, method.metric, place)
        self._rerank = HostRerank(vectors, method.metric, place)
        effort = measured.effort if measured else method.usual
        home = Search(rounded(min(place.batch, AT_ONCE)), self._kept(MEASURED_AT), effort)
        self._at_once = AT_ONCE
        self._programs: Programs[Search] = Programs(self._step, home, len(leaves), place)
        self._programs.hold(leaves)
        self.measured = measured or Measured(effort, None, {})

    def measure(self, recall_target: float, report: Report, queries: NDArray[Any] | None = None) -> None:
        """Find the least effort that reaches the target, and keep it.

        Args:
            queries: `[num_queries, d]`, checked, to measure by; without them vectors, no two alike, each as if neither it nor
                its equals were there: of a vector that is there many times the others are found without looking.
        """
        if len(self.ids) == 1 and queries is None:
            return
        most = queries_for(recall_target)
        sample = self._sample_of_vectors(most) if queries is None else self._sample_of(queries, most)
        asked, truth, metric = sample.queries, sample.truth, self.method.metric
        known = distances_between(asked, self._vectors, truth, metric)

        def recall_at(effort: int) -> Recall:
            compared, num = self.method.num_compared(effort), len(self.ids)
            if compared > num:  # which `search` does exactly
                return Recall(1.0, 1.0)
            report(f"measure recall at effort {effort}", 0.9)
            found = self._run(asked, truth.shape[1], effort, left_out=sample.left_out)[1]
            shares = shares_of((distances_between(asked, self._vectors, found, metric), found), (known, truth), metric)
            scored_again = self.method.refined * truth.shape[1]
            finds_all = compared == num and not 0 < scored_again < num and (shares == 1).all()
            return Recall(1.0, 1.0) if finds_all else Recall.of(shares)

        efforts = self.method.efforts(self._arrays, less_centre(asked, self._centre), truth, recall_target)
        self.measured = least_effort(efforts, recall_target, recall_at)

    def search(
        self, queries: ArrayLike, k: int, *, filter: ArrayLike | None = None, effort: int | None = None
    ) -> Found:
        """As `Index.search` says."""
        asked = inputs.checked_queries(queries, self._vectors.shape[1], self._vectors.dtype)
        k, allowed = inputs.checked_count("k", k), inputs.checked_filter(filter, len(self.ids))
        effort = self.measured.effort if effort is None else inputs.checked_count("effort", effort)
        num_allowed = len(self.ids) if allowed is None else int(np.count_nonzero(allowed))
        wanted = self._effort(effort, k, num_allowed)
        if self.method.num_compared(wanted) > num_allowed:
            distances, positions = self._exactly(asked, k, allowed)
        else:
            distances, positions = self._run(asked, self._kept(k), wanted, allowed)
            short = np.flatnonzero(positions[:, min(k, num_allowed) - 1] == NO_ID)
            if short.size:
                distances, positions = distances.copy(), positions.copy()
                distances[short], positions[short] = self._exactly(asked[short], k, allowed)
        found = found_at(positions, distances, self.ids, k, self.method.metric)
        return found.of_one() if np.ndim(queries) == 1 else found

    def planned(self, num_queries: int, k: int) -> Planned:
        """The planned program of such a search, as `ExactIndex.planned`: of so many queries, or of as many of them as one
        program takes."""
        k = inputs.checked_count("k", k)
        effort = self._effort(self.measured.effort, k, len(self.ids))
        return self._programs.of(Search(rounded(min(num_queries, AT_ONCE)), self._kept(k), effort))[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """As `Index.save` says."""
        about = {"metric": self.method.metric, "measured": self.measured.saved(), "why": self._why}
        arrays = {"vectors": self._vectors, "ids": self.ids, **self.method.saved(self._arrays)}
        if self._centre is not None:
            arrays["centre"] = self._centre
        write(path, self.method.kind, {**self.method.settings, **about}, arrays)

    def stats(self) -> IndexStats:
        """As `Index.stats` says."""
        held, made = self._programs.held, self._programs.made
        why = {"why": self._why} if self._why else {}
        return IndexStats(
            kind=self.method.kind,
            metric=self.method.metric,
            dtype=self._vectors.dtype.name,
            num_vectors=len(self.ids),
            dim=self._vectors.shape[1],
            num_devices=self._place.num_devices,
            device_bytes=held.device_bytes,
            layouts=tuple(map(str, held.specs)),
            searches={
                (s.num_queries, s.k // max(1, self.method.refined)): p.plan.prediction.step_time_s
                for s, (p, _) in made.items()
                if not s.leaves_out
            },
            details={**self.measured.details, **self.method.details, **why},
            reached=self.measured.reached,
        )

    # -- inside ------------------------------------------------------------------------------

    def _sample_of_vectors(self, most: int) -> _Sample:
        same = Duplicates.of(self._vectors, self.method.metric)
        own = np.random.default_rng(0).permutation(same.num_groups)[:most].astype(np.int32)
        queries, k = self._vectors[same.firsts[own]], min(MEASURED_AT, len(self.ids) - 1)
        nearest = self._among.search(queries, min(k + 1, same.num_groups), same.firsts)[1]
        return _Sample(queries, same.others(nearest, own, k), LeftOut(same.groups, own))

    def _sample_of(self, queries: NDArray[Any], most: int) -> _Sample:
        queries = queries[np.sort(np.random.default_rng(0).permutation(len(queries))[:most])]
        k, every = min(MEASURED_AT, len(self.ids)), np.arange(len(self.ids))
        return _Sample(queries, self._among.search(queries, k, every)[1])

    @property
    def _arrays(self) -> Any:
        return jax.tree.unflatten(self._tree, self._programs.held.layouts[0])

    def _exactly(
        self, queries: NDArray[Any], k: int, allowed: NDArray[np.bool_] | None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        which = np.arange(len(self.ids)) if allowed is None else np.flatnonzero(allowed)
        return self._among.search(queries, self._kept(k), which)

    def _kept(self, k: int) -> int:
        return min(k, len(self.ids))

    def _effort(self, effort: int, k: int, num_allowed: int) -> int:
        """What finds, of so many, as many as this effort finds of all: doubled until the share of them is made up for, so
        that few programs serve all filters."""
        share = max(1, num_allowed) / len(self.ids)
        wanted = max(effort, self.method.enough(min(k, num_allowed)))
        while share < 1:
            wanted, share = 2 * wanted, 2 * share
        return min(wanted, self.method.most)

    def _run(
        self,
        queries: NDArray[Any],
        k: int,
        effort: int,
        allowed: NDArray[np.bool_] | None = None,
        left_out: LeftOut | None = None,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Distances and positions, `[num_queries, k]`: so many queries at once as the devices have room for."""
        parts: list[tuple[NDArray[Any], NDArray[Any]]] = []
        start = 0
        while start < len(queries) or not parts:
            piece = slice(start, start + self._at_once)
            try:
                out = None if left_out is None else left_out._replace(own=left_out.own[piece])
                parts.append(self._at_one_go(queries[piece], k, effort, allowed, out))
            except BudgetError:
                if self._at_once == 1:
                    raise
                self._at_once //= 2
            else:
                start = piece.stop
        distances, positions = (np.concatenate(each) for each in zip(*parts, strict=True))
        return distances, positions

    def _at_one_go(
        self,
        queries: NDArray[Any],
        k: int,
        effort: int,
        allowed: NDArray[np.bool_] | None,
        left_out: LeftOut | None,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        num_candidates = min(len(self.ids), max(1, self.method.refined) * k)
        num_queries = rounded(max(1, len(queries)))
        key = Search(num_queries, num_candidates, effort, allowed is not None, left_out is not None)
        program, corpus = self._programs.of(key, as_it_lies=key.leaves_out)
        found = program.run(
            _padded(less_centre(queries, self._centre), num_queries),
            jax.tree.unflatten(self._tree, corpus),
            allowed,
            None if left_out is None else left_out._replace(own=_padded(np.asarray(left_out.own), num_queries)),
        )
        distances, positions = (np.asarray(each)[: len(queries)] for each in found)
        return self._rerank.best(queries, positions, k) if self.method.refined else (distances, positions)

    def _step(self, key: Search) -> Step:
        return step_of(self.method, key, self._shapes, self._vectors.shape, self._vectors.dtype)


def _padded(array: NDArray[Any], num: int) -> NDArray[Any]:
    """With zeros, to so many rows."""
    if len(array) == num:
        return array
    padded = np.zeros((num, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded
