"""Provide the index kind `graph`: a neighbour graph whose search effort is the beam width.

In: a build request, or a file. Out: an `ApproximateIndex`. Equal vectors are one node (`duplicate_expansion`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.build_request import BuildRequest
from autopar.vector_search.data.centering import centre_for_l2, subtract_centre
from autopar.vector_search.data.duplicates import Duplicates
from autopar.vector_search.data.index_file import Saved
from autopar.vector_search.data.inputs import checked_metric
from autopar.vector_search.data.metrics import Metric, terms
from autopar.vector_search.data.placement import Place
from autopar.vector_search.frame.approximate_index import ApproximateIndex
from autopar.vector_search.frame.recall_tuning import Measured, in_steps
from autopar.vector_search.graph import beam_search as beam
from autopar.vector_search.graph.build import build_graph
from autopar.vector_search.graph.duplicate_expansion import Copies
from autopar.vector_search.graph.neighbor_graph import NeighbourGraph
from autopar.vector_search.kernels.top_k_merge import Best, LeftOut

GRAPH = "graph"

#: Edges per node; nodes expanded per iteration; initial entry points.
DEGREE, WIDTH, NUM_ENTRIES = 32, 4, 32
#: Beam widths to try for a recall target.
_EFFORTS = in_steps(16, 512)
#: Beam widths of programs that measure recall.
_MEASURED_WITH = (128, 512)
#: Typical fraction of an expanded node's neighbours that are unvisited.
_UNVISITED_FRACTION = 0.5


class Nodes(NamedTuple):
    """graph: graph of the distinct vectors. copies: their groups of equal vectors; None if all vectors are distinct."""

    graph: NeighbourGraph
    copies: Copies | None = None


@dataclass(frozen=True)
class Graph:
    """The search `Method` of a graph.

    Args:
        num_nodes: number of distinct vectors.
        degree: edges per node.
        width: nodes expanded per iteration.
    """

    metric: Metric
    num_nodes: int
    degree: int
    width: int
    kind: str = GRAPH
    refined: int = 0

    @property
    def most(self) -> int:
        """A beam of all nodes."""
        return self.num_nodes

    @property
    def usual(self) -> int:
        """A beam width that gives a recall of 0.95 on easy data."""
        return min(64, self.num_nodes)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for the index file."""
        return {"degree": self.degree, "width": self.width}

    @property
    def details(self) -> dict[str, Any]:
        """Entries for `stats`."""
        return self.settings

    def search(
        self,
        queries: jax.Array,
        arrays: Nodes,
        allowed: jax.Array | None,
        left_out: LeftOut | None,
        *,
        k: int,
        effort: int,
        limit: jax.Array | None = None,
    ) -> Best:
        """The best k nodes of a beam of width `effort`, or of the narrower `limit`."""
        graph, copies = arrays
        counts = None
        if copies is not None:
            counts = copies.count_allowed(allowed)
            allowed = counts.is_allowed
            left_out = left_out and copies.left_out(left_out)
        found = beam.search(
            graph, queries, min(k, self.num_nodes), effort, self.width, allowed=allowed, left_out=left_out, limit=limit
        )
        best = Best(found.scores, found.positions)
        return best if copies is None or counts is None else copies.expand(best, k, counts)

    def efforts(self, arrays: Nodes, sample: NDArray[Any], truth: NDArray[Any], recall_target: float) -> Sequence[int]:
        """All beam widths, for any target."""
        del arrays, sample, truth, recall_target
        return tuple(dict.fromkeys(min(each, self.num_nodes) for each in _EFFORTS))

    def measured_with(self, effort: int) -> int | None:
        """The next of few beam widths, so that few programs are compiled."""
        return min(self.num_nodes, next((width for width in _MEASURED_WITH if effort <= width), effort))

    def enough(self, k: int) -> int:
        """1.5 k: the end of a beam is not accurate."""
        return -(-3 * k // 2)

    def num_compared(self, effort: int) -> float:
        """A beam search expands about as many nodes as its beam holds."""
        return effort * self.degree * _UNVISITED_FRACTION

    def saved(self, arrays: Nodes) -> dict[str, NDArray[Any]]:
        """Edges, entry points, and groups of equal vectors."""
        graph, copies = arrays
        found = {"edges": np.asarray(graph.edges), "entries": np.asarray(graph.entries)}
        if copies is not None:
            found |= {"copies": np.asarray(copies.order), "first_copy": np.asarray(copies.starts)}
        return found


def build(request: BuildRequest) -> ApproximateIndex:
    """Build a graph index.

    Raises:
        SearchError: an unknown or invalid setting.
    """
    settings = request.whole_numbers(GRAPH, {"degree": DEGREE, "width": WIDTH})
    request.report(f"connect {len(request.vectors):,} vectors", 0.1)
    centred, centre = centre_for_l2(request.vectors, request.metric)
    copies = _copies_among(request.vectors, request.metric)
    distinct = centred if copies is None else centred[copies.firsts]
    graph = build_graph(distinct, request.metric, settings["degree"], NUM_ENTRIES, devices=request.place.devices)
    method = Graph(request.metric, len(distinct), settings["degree"], settings["width"])
    request.report("lay out the graph", 0.7)
    nodes = Nodes(graph, copies)
    index = ApproximateIndex(method, nodes, request.vectors, request.ids, request.place, why=request.why, centre=centre)
    index.measure(request.recall_target, request.report, request.queries)
    return index


def _copies_among(vectors: NDArray[Any], metric: Metric) -> Copies | None:
    """The groups of equal vectors; None if all are distinct."""
    same = Duplicates.of(vectors, metric)
    if same.num_groups == len(vectors):
        return None
    return Copies(same.order.astype(np.int32), same.starts.astype(np.int32))


def load(saved: Saved, place: Place) -> ApproximateIndex:
    """Restore a saved graph index."""
    arrays, settings = saved.arrays, saved.settings
    metric = checked_metric(settings["metric"])
    centre = arrays.get("centre")
    copies = Copies(arrays["copies"], arrays["first_copy"]) if "copies" in arrays else None
    distinct = arrays["vectors"] if copies is None else arrays["vectors"][copies.firsts]
    placed = jnp.asarray(subtract_centre(distinct, centre))
    graph = NeighbourGraph(
        placed, terms(placed, metric), jnp.asarray(arrays["edges"]), jnp.asarray(arrays["entries"]), metric
    )
    method = Graph(metric, len(distinct), settings["degree"], settings["width"])
    measured = Measured.loaded(settings["measured"])
    vectors, ids = arrays["vectors"], arrays["ids"]
    nodes = Nodes(graph, copies)
    return ApproximateIndex(method, nodes, vectors, ids, place, measured, settings["why"], centre)
