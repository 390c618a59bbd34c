"""Inverted lists as indexes: `ivf`, lists of vectors, and `ivfpq`, lists of codes, scored again by the vectors.

In: what is asked for, or a file. Out: an `ApproximateIndex` whose effort is the number of lists that a query probes: with
all of them `ivf` is exact. Codes lie on the devices in place of vectors, which stay in the host's memory.
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
from autopar.vector_search.data.build_request import Asked
from autopar.vector_search.data.centering import less_centre, moved
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

#: Candidates of codes that are scored again, for each neighbour.
_REFINED = 8
#: Vectors of the lists probed, for each neighbour, at least.
_PER_NEIGHBOUR = 4


@dataclass(frozen=True)
class Lists:
    """How inverted lists are searched: a `Method`.

    Args:
        copies: in how many lists a vector may be.
        step_bytes: as of `list_search.shape_of`.
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
        """A sixteenth of them."""
        return -(-self.num_lists // 16)

    @property
    def settings(self) -> dict[str, Any]:
        """For a file."""
        return {"num_lists": self.num_lists, "copies": self.copies, "refined": self.refined}

    @property
    def details(self) -> dict[str, Any]:
        """For `stats`."""
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
    ) -> Best:
        """The best k of the `effort` nearest lists."""
        how = list_search.shape_of(arrays, queries.shape[0], min(effort, self.num_lists), self.step_bytes)
        return list_search.search(arrays, queries, k, effort, allowed, how, left_out)

    def efforts(
        self, arrays: InvertedLists, sample: NDArray[Any], truth: NDArray[Any], recall_target: float
    ) -> Sequence[int]:
        """From the number of lists on that hold enough of the true neighbours: of vectors that is enough."""
        near = np.argsort(-np.asarray(scores(jnp.asarray(sample, jnp.float32), arrays.centroids, self.metric)), axis=1)
        rank = np.argsort(near, axis=1, kind="stable")
        lists = lists_of(arrays, self.num_vectors)[truth]  # [num_queries, k, copies]
        ranks = np.take_along_axis(rank[:, None], np.maximum(lists, 0), axis=2)
        needed = 1 + np.where(lists == NO_ID, self.num_lists, ranks).min(axis=2)
        wanted = (truth != NO_ID).sum(axis=1)

        def hold_enough(effort: int) -> bool:
            held = ((needed <= effort) & (truth != NO_ID)).sum(axis=1)
            return Recall.of(held[wanted > 0] / wanted[wanted > 0]).at_least >= recall_target

        first = 1 + bisect_left(range(1, self.num_lists), True, key=hold_enough)
        return in_steps(first, self.num_lists)

    def enough(self, k: int) -> int:
        """Lists that hold some times k on average."""
        return -(-_PER_NEIGHBOUR * k * self.num_lists // self.num_vectors)

    def num_compared(self, effort: int) -> float:
        """Those in so many lists on average."""
        return self.num_vectors * min(1.0, effort / self.num_lists)

    def saved(self, arrays: InvertedLists) -> dict[str, NDArray[Any]]:
        """Centroids; where lists begin; what is in them, by position; codes and what they stand for."""
        found = {
            "centroids": np.asarray(arrays.centroids),
            "first_block": np.asarray(arrays.first_block),
            "positions": np.asarray(arrays.positions),
        }
        if arrays.codebooks is not None:
            found["codes"] = np.asarray(arrays.vectors)
            found["codebooks"] = np.asarray(arrays.codebooks.centroids)
        return found


def build(asked: Asked, kind: str) -> ApproximateIndex:
    """Lists of the vectors, of one kind.

    Raises:
        SearchError: a setting that is not known or cannot be.
    """
    num, dim = asked.vectors.shape
    known = {"num_lists": usual_num_lists(num), "copies": 1}
    if kind == IVF_PQ:
        known |= {"code_bytes": _usual_code_bytes(dim), "refined": _REFINED}
    settings = asked.whole_numbers(kind, known)
    code_bytes = settings.get("code_bytes")
    if code_bytes is not None and dim % code_bytes:
        raise SearchError(
            f"`code_bytes` is {code_bytes}, and vectors have {dim} elements: give a number that divides it"
        )
    if settings["num_lists"] > num:
        raise SearchError(
            f"`num_lists` is {settings['num_lists']:,}, and there are {num:,} vectors: give at most as many"
        )
    asked.report(f"put {num:,} vectors into {settings['num_lists']:,} lists", 0.1)
    less, centre = moved(asked.vectors, asked.metric)
    lists = build_lists(less, asked.metric, settings["num_lists"], settings["copies"], code_bytes)
    method = Lists(
        kind,
        asked.metric,
        num,
        settings["num_lists"],
        settings["copies"],
        asked.place.step_bytes,
        settings.get("refined", 0),
    )
    asked.report("lay out the lists", 0.7)
    index = ApproximateIndex(method, lists, asked.vectors, asked.ids, asked.place, why=asked.why, centre=centre)
    index.measure(asked.recall_target, asked.report, asked.queries)
    return index


def load(saved: Saved, place: Place) -> ApproximateIndex:
    """What `save` has written."""
    arrays, settings = saved.arrays, saved.settings
    metric = checked_metric(settings["metric"])
    positions, first, centre = arrays["positions"], arrays["first_block"], arrays.get("centre")
    if "codebooks" in arrays:
        books, held, term = Codebooks(jnp.asarray(arrays["codebooks"])), jnp.asarray(arrays["codes"]), None
    else:
        held = jnp.asarray(less_centre(arrays["vectors"], centre)[np.maximum(positions, 0)])
        held = jnp.where(jnp.asarray(positions != NO_ID)[:, :, None], held, jnp.zeros((), held.dtype))
        books, term = None, terms(held, metric)
    lists = InvertedLists(
        jnp.asarray(arrays["centroids"]),
        jnp.asarray(first),
        held,
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
    """The most that divide d and are no more than a quarter of it."""
    return max(each for each in range(1, max(2, dim // 4 + 1)) if dim % each == 0)
