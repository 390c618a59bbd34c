"""The graph of near vectors as an index, `graph`.

In: what is asked for, or a file. Out: an `ApproximateIndex` whose effort is the number of nodes that a walk keeps in hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search import beam
from autopar.vector_search.approximate_index import ApproximateIndex
from autopar.vector_search.asked import Asked
from autopar.vector_search.best import Best, LeftOut
from autopar.vector_search.build_graph import build_graph
from autopar.vector_search.centre import less_centre, moved
from autopar.vector_search.effort import Measured, in_steps
from autopar.vector_search.index_file import Saved
from autopar.vector_search.inputs import checked_metric
from autopar.vector_search.metrics import Metric, terms
from autopar.vector_search.neighbour_graph import NeighbourGraph
from autopar.vector_search.place import Place

GRAPH = "graph"

#: Edges of a node; nodes of the beam that one round looks at; nodes that walks begin at.
DEGREE, WIDTH, NUM_ENTRIES = 32, 4, 32
#: Beams that recall is measured with.
_EFFORTS = in_steps(16, 512)
#: Of the neighbours of a node that is looked at, those that have not been seen before, about.
_NEW = 0.5


@dataclass(frozen=True)
class Graph:
    """How a graph is searched: a `Method`.

    Args:
        degree: edges of a node. width: nodes looked at in one round.
    """

    metric: Metric
    num_vectors: int
    degree: int
    width: int
    kind: str = GRAPH
    refined: int = 0

    @property
    def most(self) -> int:
        """All nodes in hand."""
        return self.num_vectors

    @property
    def usual(self) -> int:
        """As many as reach a recall of 0.95 of vectors that are easy to tell apart."""
        return min(64, self.num_vectors)

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
        arrays: NeighbourGraph,
        allowed: jax.Array | None,
        left_out: LeftOut | None,
        *,
        k: int,
        effort: int,
    ) -> Best:
        """The best k of a beam of `effort` nodes."""
        found = beam.search(arrays, queries, k, effort, self.width, allowed=allowed, left_out=left_out)
        return Best(found.scores, found.positions)

    def efforts(
        self, arrays: NeighbourGraph, sample: NDArray[Any], truth: NDArray[Any], recall_target: float
    ) -> Sequence[int]:
        """All that are tried, for any target."""
        del arrays, sample, truth, recall_target
        return tuple(dict.fromkeys(min(each, self.num_vectors) for each in _EFFORTS))

    def enough(self, k: int) -> int:
        """Half as many again: those at the end of a beam are not the nearest."""
        return -(-3 * k // 2)

    def num_compared(self, effort: int) -> float:
        """A walk looks at about as many nodes as it keeps."""
        return effort * self.degree * _NEW

    def saved(self, arrays: NeighbourGraph) -> dict[str, NDArray[Any]]:
        """Edges, and where walks begin."""
        return {"edges": np.asarray(arrays.edges), "entries": np.asarray(arrays.entries)}


def build(asked: Asked) -> ApproximateIndex:
    """The graph of the vectors.

    Raises:
        SearchError: a setting that is not known or cannot be.
    """
    num = len(asked.vectors)
    settings = asked.whole_numbers(GRAPH, {"degree": DEGREE, "width": WIDTH})
    asked.report(f"connect {num:,} vectors", 0.1)
    less, centre = moved(asked.vectors, asked.metric)
    graph = build_graph(less, asked.metric, settings["degree"], NUM_ENTRIES)
    method = Graph(asked.metric, num, settings["degree"], settings["width"])
    asked.report("lay out the graph", 0.7)
    index = ApproximateIndex(method, graph, asked.vectors, asked.ids, asked.place, why=asked.why, centre=centre)
    index.measure(asked.recall_target, asked.report, asked.queries)
    return index


def load(saved: Saved, place: Place) -> ApproximateIndex:
    """What `save` has written."""
    arrays, settings = saved.arrays, saved.settings
    metric = checked_metric(settings["metric"])
    centre = arrays.get("centre")
    placed = jnp.asarray(less_centre(arrays["vectors"], centre))
    graph = NeighbourGraph(
        placed, terms(placed, metric), jnp.asarray(arrays["edges"]), jnp.asarray(arrays["entries"]), metric
    )
    method = Graph(metric, len(arrays["ids"]), settings["degree"], settings["width"])
    measured = Measured.loaded(settings["measured"])
    vectors, ids = arrays["vectors"], arrays["ids"]
    return ApproximateIndex(method, graph, vectors, ids, place, measured, settings["why"], centre)
