"""Provide the index kinds `ivf`, inverted lists of vectors, and `ivfpq`, inverted lists of codes with re-ranking.

In: a build request, or a file. Out: an `ApproximateIndex` whose search effort is num_probes; `ivf` with all lists
probed is exact. `ivfpq` keeps the codes on the devices and the vectors in host memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.errors import SearchError
from autopar.vector_search.data.build_request import BuildRequest
from autopar.vector_search.data.centering import centre_for_l2, subtract_centre
from autopar.vector_search.data.index_file import Saved
from autopar.vector_search.data.inputs import checked_metric
from autopar.vector_search.data.metrics import NO_ID, Metric, scores, terms
from autopar.vector_search.data.placement import Place
from autopar.vector_search.frame.approximate_index import ApproximateIndex
from autopar.vector_search.frame.recall_tuning import Measured, Recall, in_steps
from autopar.vector_search.ivf import search as list_search
from autopar.vector_search.ivf.build import build_lists, usual_num_lists
from autopar.vector_search.ivf.lists import InvertedLists, lists_of, longest_of
from autopar.vector_search.ivf.product_quantization import Codebooks
from autopar.vector_search.kernels.top_k_merge import Best, LeftOut

IVF, IVF_PQ = "ivf", "ivfpq"

#: Re-ranked candidates per neighbour.
_REFINED = 8
#: Minimum vectors in the probed lists, per neighbour.
_PER_NEIGHBOUR = 4


@dataclass(frozen=True)
class Lists:
    """The search `Method` of inverted lists.

    Args:
        copies: maximum number of lists per vector.
        step_bytes: as in `list_search.shape_of`.
    """

    kind: str
    metric: Metric
    num_vectors: int
    num_lists: int
    copies: int
    step_bytes: int
    refined: int = 0

    @property
    def most(self) -> int:
        """All lists."""
        return self.num_lists

    @property
    def usual(self) -> int:
        """A sixteenth of the lists."""
        return -(-self.num_lists // 16)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for the index file."""
        return {"num_lists": self.num_lists, "copies": self.copies, "refined": self.refined}

    @property
    def details(self) -> dict[str, Any]:
        """Entries for `stats`."""
        return {name: value for name, value in self.settings.items() if value}

    def search(
        self,
        queries: jax.Array,
        arrays: InvertedLists,
        allowed: jax.Array | None,
        left_out: LeftOut | None,
        *,
        k: int,
        effort: int,
        limit: Any = None,
    ) -> Best:
        """The best k of the `effort` nearest lists."""
        assert limit is None, limit
        shape = list_search.shape_of(arrays, queries.shape[0], min(effort, self.num_lists), self.step_bytes)
        return list_search.search(arrays, queries, k, effort, allowed, shape, left_out)

    def efforts(
        self, arrays: InvertedLists, sample: NDArray[Any], truth: NDArray[Any], recall_target: float
    ) -> Sequence[int]:
        """Efforts from the least one whose lists contain enough true neighbours; lists of vectors find all that they
        contain."""
        near = np.argsort(-np.asarray(scores(jnp.asarray(sample, jnp.float32), arrays.centroids, self.metric)), axis=1)
        rank = np.argsort(near, axis=1, kind="stable")
        lists = lists_of(arrays, self.num_vectors)[truth]  # [num_queries, k, copies]
        ranks = np.take_along_axis(rank[:, None], np.maximum(lists, 0), axis=2)
        needed = 1 + np.where(lists == NO_ID, self.num_lists, ranks).min(axis=2)
        wanted = (truth != NO_ID).sum(axis=1)

        def contain_enough(effort: int) -> bool:
            num_found = ((needed <= effort) & (truth != NO_ID)).sum(axis=1)
            return Recall.of(num_found[wanted > 0] / wanted[wanted > 0]).at_least >= recall_target

        first = 1 + bisect_left(range(1, self.num_lists), True, key=contain_enough)
        return in_steps(first, self.num_lists)

    def measured_with(self, effort: int) -> int | None:
        """None: `efforts` starts near the effort that is found."""
        return None

    def enough(self, k: int) -> int:
        """Lists that hold several times k vectors on average."""
        return -(-_PER_NEIGHBOUR * k * self.num_lists // self.num_vectors)

    def num_compared(self, effort: int) -> float:
        """Vectors in `effort` lists on average."""
        return self.num_vectors * min(1.0, effort / self.num_lists)

    def saved(self, arrays: InvertedLists) -> dict[str, NDArray[Any]]:
        """Centroids, offsets of the lists, positions, codes and codebooks."""
        found = {
            "centroids": np.asarray(arrays.centroids),
            "first_block": np.asarray(arrays.first_block),
            "positions": np.asarray(arrays.positions),
        }
        if arrays.codebooks is not None:
            found["codes"] = np.asarray(arrays.vectors)
            found["codebooks"] = np.asarray(arrays.codebooks.centroids)
        return found


def build(request: BuildRequest, kind: str) -> ApproximateIndex:
    """Build an index of inverted lists.

    Raises:
        SearchError: an unknown or invalid setting.
    """
    num, dim = request.vectors.shape
    known = {"num_lists": usual_num_lists(num), "copies": 1}
    if kind == IVF_PQ:
        known |= {"code_bytes": _usual_code_bytes(dim), "refined": _REFINED}
    settings = request.whole_numbers(kind, known)
    code_bytes = settings.get("code_bytes")
    if code_bytes is not None and dim % code_bytes:
        raise SearchError(
            f"`code_bytes` is {code_bytes}: it has to divide the {dim} elements of a vector. Give a divisor"
        )
    if settings["num_lists"] > num:
        raise SearchError(f"`num_lists` is {settings['num_lists']:,}: give at most the number of vectors, {num:,}")
    request.report(f"assign {num:,} vectors to {settings['num_lists']:,} lists", 0.1)
    centred, centre = centre_for_l2(request.vectors, request.metric)
    lists = build_lists(centred, request.metric, settings["num_lists"], settings["copies"], code_bytes)
    method = Lists(
        kind,
        request.metric,
        num,
        settings["num_lists"],
        settings["copies"],
        request.place.step_bytes,
        settings.get("refined", 0),
    )
    request.report("lay out the lists", 0.7)
    index = ApproximateIndex(method, lists, request.vectors, request.ids, request.place, why=request.why, centre=centre)
    index.measure(request.recall_target, request.report, request.queries)
    return index


def load(saved: Saved, place: Place) -> ApproximateIndex:
    """Restore a saved index of inverted lists."""
    arrays, settings = saved.arrays, saved.settings
    metric = checked_metric(settings["metric"])
    positions, first, centre = arrays["positions"], arrays["first_block"], arrays.get("centre")
    if "codebooks" in arrays:
        books, contents, term = Codebooks(jnp.asarray(arrays["codebooks"])), jnp.asarray(arrays["codes"]), None
    else:
        contents = jnp.asarray(subtract_centre(arrays["vectors"], centre)[np.maximum(positions, 0)])
        contents = jnp.where(jnp.asarray(positions != NO_ID)[:, :, None], contents, jnp.zeros((), contents.dtype))
        books, term = None, terms(contents, metric)
    lists = InvertedLists(
        jnp.asarray(arrays["centroids"]),
        jnp.asarray(first),
        contents,
        term,
        jnp.asarray(positions),
        longest_of(np.diff(first)),
        metric,
        settings["copies"],
        books,
    )
    num, step_bytes = len(arrays["ids"]), place.step_bytes
    method = Lists(saved.kind, metric, num, settings["num_lists"], settings["copies"], step_bytes, settings["refined"])
    measured = Measured.loaded(settings["measured"])
    vectors, ids = arrays["vectors"], arrays["ids"]
    return ApproximateIndex(method, lists, vectors, ids, place, measured, settings["why"], centre)


def _usual_code_bytes(dim: int) -> int:
    """The largest divisor of d up to d / 4."""
    return max(each for each in range(1, max(2, dim // 4 + 1)) if dim % each == 0)
