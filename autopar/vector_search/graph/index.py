"""The graph of near vectors as an index, `graph`.

In: what is asked for, or a file. Out: an `ApproximateIndex` whose effort is the number of nodes that a walk keeps in hand. Of
vectors that are equal one is a node, and stands for all (`copies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.build_request import Asked
from autopar.vector_search.data.centering import less_centre, moved
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

#: Edges of a node; nodes of the beam that one round looks at; nodes that walks begin at.
DEGREE, WIDTH, NUM_ENTRIES = 32, 4, 32
#: Beams that recall is measured with.
_EFFORTS = in_steps(16, 512)
#: Of the neighbours of a node that is looked at, those that have not been seen before, about.
_NEW = 0.5


class Nodes(NamedTuple):
    """graph: of the distinct vectors. copies: what each stands for; None: for itself alone."""

    graph: NeighbourGraph
    copies: Copies | None = None


@dataclass(frozen=True)
class Graph:
    """How a graph is searched: a `Method`.

    Args:
        num_nodes: distinct vectors. degree: edges of a node. width: nodes looked at in one round.
    """

    metric: Metric
    num_nodes: int
    degree: int
    width: int
    kind: str = GRAPH
    refined: int = 0

    @property
    def most(self) -> int:
        """All nodes in hand."""
        return self.num_nodes

    @property
    def usual(self) -> int:
        """As many as reach a recall of 0.95 of vectors that are easy to tell apart."""
        return min(64, self.num_nodes)

    @property
    def settings(self) -> dict[str, Any]:
        """For a file."""
        return {"degree": self.degree, "width": self.width}

    @property
    def details(self) -> dict[str, Any]:
        """For `stats`."""
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
    ) -> Best:
        """The best k of a beam of `effort` nodes."""
        graph, copies = arrays
        counted = None
        if copies is not None:
            counted = copies.counted(allowed)
            allowed = counted.is_allowed
            left_out = left_out and copies.left_out(left_out)
        found = beam.search(
            graph, queries, min(k, self.num_nodes), effort, self.width, allowed=allowed, left_out=left_out
        )
        best = Best(found.scores, found.positions)
        return best if copies is None or counted is None else copies.of(best, k, counted)

    def efforts(self, arrays: Nodes, sample: NDArray[Any], truth: NDArray[Any], recall_target: float) -> Sequence[int]:
        """All that are tried, for any target."""
        del arrays, sample, truth, recall_target
        return tuple(dict.fromkeys(min(each, self.num_nodes) for each in _EFFORTS))

    def enough(self, k: int) -> int:
        """Half as many again: those at the end of a beam are not the nearest."""
        return -(-3 * k // 2)

    def num_compared(self, effort: int) -> float:
        """A walk looks at about as many nodes as it keeps."""
        return effort * self.degree * _NEW

    def saved(self, arrays: Nodes) -> dict[str, NDArray[Any]]:
        """Edges, where walks begin, and which vectors are equal."""
        graph, copies = arrays
        found = {"edges": np.asarray(graph.edges), "entries": np.asarray(graph.entries)}
        if copies is not None:
            found |= {"copies": np.asarray(copies.order), "first_copy": np.asarray(copies.starts)}
        return found


def build(asked: Asked) -> ApproximateIndex:
    """The graph of the vectors.

    Raises:
        SearchError: a setting that is not known or cannot be.
    """
    settings = asked.whole_numbers(GRAPH, {"degree": DEGREE, "width": WIDTH})
    asked.report(f"connect {len(asked.vectors):,} vectors", 0.1)
    less, centre = moved(asked.vectors, asked.metric)
    copies = _copies_among(asked.vectors, asked.metric)
    distinct = less if copies is None else less[copies.firsts]
    graph = build_graph(distinct, asked.metric, settings["degree"], NUM_ENTRIES)
    method = Graph(asked.metric, len(distinct), settings["degree"], settings["width"])
    asked.report("lay out the graph", 0.7)
    nodes = Nodes(graph, copies)
    index = ApproximateIndex(method, nodes, asked.vectors, asked.ids, asked.place, why=asked.why, centre=centre)
    index.measure(asked.recall_target, asked.report, asked.queries)
    return index


def _copies_among(vectors: NDArray[Any], metric: Metric) -> Copies | None:
    """None where no two are equal."""
    same = Duplicates.of(vectors, metric)
    if same.num_groups == len(vectors):
        return None
    return Copies(same.order.astype(np.int32), same.starts.astype(np.int32))


def load(saved: Saved, place: Place) -> ApproximateIndex:
    """What `save` has written."""
    arrays, settings = saved.arrays, saved.settings
    metric = checked_metric(settings["metric"])
    centre = arrays.get("centre")
    copies = Copies(arrays["copies"], arrays["first_copy"]) if "copies" in arrays else None
    distinct = arrays["vectors"] if copies is None else arrays["vectors"][copies.firsts]
    placed = jnp.asarray(less_centre(distinct, centre))
    graph = NeighbourGraph(
        placed, terms(placed, metric), jnp.asarray(arrays["edges"]), jnp.asarray(arrays["entries"]), metric
    )
    method = Graph(metric, len(distinct), settings["degree"], settings["width"])
    measured = Measured.loaded(settings["measured"])
    vectors, ids = arrays["vectors"], arrays["ids"]
    nodes = Nodes(graph, copies)
    return ApproximateIndex(method, nodes, vectors, ids, place, measured, settings["why"], centre)
