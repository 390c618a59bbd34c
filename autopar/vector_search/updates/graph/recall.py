"""Measure the least beam of a graph that reaches the recall target.

In: a graph in a file. Out: `Measured`. Queries are the user's, or nodes, each of which ignores itself: one sample of all,
and one of those that were inserted last. Each has to reach the target. Neighbours are nodes: vectors that equal a node
would make recall higher.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.recall_tuning import (
    MEASURED_AT,
    Measured,
    Recall,
    can_reach,
    least_effort,
    lowest_recall,
    sample_size,
)
from autopar.vector_search.graph_on_disk.build import EFFORTS
from autopar.vector_search.graph_on_disk.compared import Compared
from autopar.vector_search.on_disk.probing import prepared
from autopar.vector_search.updates.graph.graph_map import GraphMap
from autopar.vector_search.updates.graph.nodes import GraphNodes
from autopar.vector_search.updates.page_store import PageStore

#: Queries that are searched together.
_AT_ONCE = 256
#: Relative error of distances that count as equal.
_TIE = 1e-5


class _Queries(NamedTuple):
    """Queries.

    Args:
        vectors: `[m, d]`.
        own: int32 `[m]`, the node of each, which it ignores; `NO_ID` for none.
        samples: the queries of each sample.
    """

    vectors: NDArray[Any]
    own: NDArray[np.int32]
    samples: tuple[slice, ...]


def measured(
    store: PageStore,
    stored: GraphMap,
    is_node: NDArray[np.bool_],
    recent: NDArray[np.int32],
    target: float,
    queries: NDArray[Any] | None,
    effort: int,
    seed: int,
) -> Measured:
    """Read all nodes, and search.

    Args:
        is_node: bool `[num_places]`.
        recent: numbers of the nodes that were inserted last.
        queries: the user's, `[m, d]`; None: nodes.
        effort: the beam so far; half of it is tried first.

    Raises:
        IndexFileError: a page is damaged or cannot be read.
    """
    nodes, graph = GraphNodes(store, stored), stored.graph
    sample = _drawn(nodes, is_node, recent, target, queries, seed)
    near = prepared(sample.vectors, graph.metric, graph.centre)
    truth, last = _truth(nodes, stored, near, sample.own)
    most = min(max(1, int(is_node.sum())), EFFORTS[-1])
    if not (truth != NO_ID).any():
        return Measured(most, None, {})
    wanted = (truth != NO_ID).sum(axis=1)

    def recall_at(beam: int) -> Recall:
        if beam >= len(graph.codes):  # a search is exact then
            return Recall(1.0, 1.0)
        hits = []
        for start in range(0, len(near), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            compared = Compared(sample.vectors[part], near[part], graph)
            size = max(beam, MEASURED_AT)
            first = stored.entry_points.nearest(near[part], min(size, len(graph.entries)))[0]
            found = nodes.search.search(compared, first, MEASURED_AT, size, stored.width, None, sample.own[part])
            is_hit = (found.nodes[:, :, None] == truth[part][:, None]).any(axis=-1) | (found.costs <= last[part, None])
            hits.append((is_hit & (found.nodes != NO_ID)).sum(axis=1))
        return lowest_recall(np.minimum(np.concatenate(hits), wanted), wanted, sample.samples, target)

    efforts = tuple(dict.fromkeys(min(each, most) for each in EFFORTS if 2 * each >= effort)) or (most,)
    return least_effort(efforts, target, recall_at)


def _drawn(
    nodes: GraphNodes,
    is_node: NDArray[np.bool_],
    recent: NDArray[np.int32],
    target: float,
    queries: NDArray[Any] | None,
    seed: int,
) -> _Queries:
    if queries is not None:
        return _Queries(queries, np.full(len(queries), NO_ID, np.int32), (slice(None),))
    draw, most = np.random.default_rng(seed), sample_size(target)
    own = draw.permutation(np.flatnonzero(is_node))[:most].astype(np.int32)
    samples: tuple[slice, ...] = (slice(0, len(own)),)
    if can_reach(min(most, len(recent)), target):
        samples = (*samples, slice(len(own), None))
        own = np.concatenate([own, draw.permutation(recent)[:most].astype(np.int32)])
    return _Queries(nodes.at(own)[0], own, samples)


def _truth(
    nodes: GraphNodes, stored: GraphMap, queries: NDArray[np.float32], own: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The nearest nodes of each query, `[num_queries, k]`, and the cost of the last."""
    graph = stored.graph
    num, per_block = len(queries), graph.blocks.per_block
    best, which = np.full((num, MEASURED_AT), -np.inf, np.float32), np.full((num, MEASURED_AT), NO_ID, np.int64)
    for start, some in nodes.scan():
        flat = prepared(some.vectors.reshape(-1, graph.blocks.dim), graph.metric, graph.centre)
        scores = queries @ flat.T
        if graph.metric == "l2":
            scores = 2 * scores - (flat**2).sum(axis=1)[None]
        scores[:, some.positions.reshape(-1) == NO_ID] = -np.inf
        at = own - start * per_block
        here = np.flatnonzero((own != NO_ID) & (at >= 0) & (at < len(flat)))
        scores[here, at[here]] = -np.inf
        numbers = np.broadcast_to(start * per_block + np.arange(len(flat)), scores.shape)
        every, names = np.concatenate([best, scores], axis=1), np.concatenate([which, numbers], axis=1)
        kept = np.argpartition(-every, MEASURED_AT - 1, axis=1)[:, :MEASURED_AT]
        best, which = np.take_along_axis(every, kept, axis=1), np.take_along_axis(names, kept, axis=1)
    which = np.where(np.isfinite(best), which, NO_ID)
    least = np.where(np.isfinite(best), best, np.inf).min(axis=1).astype(np.float64)
    costs = -least
    if graph.metric == "l2":
        costs = costs + (queries.astype(np.float64) ** 2).sum(axis=1)
    return which, costs + _TIE * np.abs(costs)
