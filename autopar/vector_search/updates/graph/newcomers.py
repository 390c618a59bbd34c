"""Find the neighbours of vectors that are to be inserted into a graph: old nodes by beam search, and each other.

In: the vectors, the old graph. Out: `Newcomers`: distinct new vectors with their edges, and vectors that equal a node.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.duplicates import Duplicates, row_hashes
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.graph.build import connected
from autopar.vector_search.graph.nearest_points import NearestPoints
from autopar.vector_search.updates.contents import Members
from autopar.vector_search.updates.graph.edges import chosen
from autopar.vector_search.updates.graph.graph_map import GraphMap
from autopar.vector_search.updates.graph.nodes import GraphNodes
from autopar.vector_search.updates.graph.points import Nearness, Points, Space
from autopar.vector_search.updates.graph.survivors import Survivors

#: Nodes of a beam, per edge; blocks that a vector reads per round; vectors that are searched together.
_BEAM, _WIDTH, _AT_ONCE = 1.0, 8, 256
#: Vectors up to which each is compared with all others. More are connected as when a graph is built.
_ALL_PAIRS = 8192
#: Vectors whose edges are chosen at a time.
_CHOSEN = 512


class Newcomers(NamedTuple):
    """Vectors that become nodes, and the others.

    Args:
        slots: int32 `[m]`, of the new nodes.
        vectors: `[m, d]`.
        points: f32 `[m, d + num_more]`, the vectors in the space.
        old_edges, new_edges: int32 `[m, degree]`, old nodes and rows of new ones that a new node has edges to, at their
            rank; `NO_ID` elsewhere.
        same_slots, same_as: int32 `[r]`, vectors that equal a new node, and its row.
        equal_slots, equal_to: int32 `[s]`, vectors that equal an old node, and the node.
    """

    slots: NDArray[np.int32]
    vectors: NDArray[Any]
    points: NDArray[np.float32]
    old_edges: NDArray[np.int32]
    new_edges: NDArray[np.int32]
    same_slots: NDArray[np.int32]
    same_as: NDArray[np.int32]
    equal_slots: NDArray[np.int32]
    equal_to: NDArray[np.int32]


def newcomers(
    added: Members,
    stored: GraphMap,
    nodes: GraphNodes,
    left: Survivors,
    space: Space,
    is_live: NDArray[np.bool_],
) -> Newcomers:
    """Choose the edges of new vectors.

    Args:
        added: the vectors, and their slots.
        is_live: bool `[num_slots]`.

    Raises:
        IndexFileError: a page is damaged or cannot be read.
    """
    graph = stored.graph
    degree = graph.blocks.degree
    same = Duplicates.of(added.vectors, "l2")
    firsts = np.sort(same.firsts)
    points = space.of(added.vectors[firsts])
    near = np.full((len(firsts), 0), NO_ID, np.int32)
    equal = np.full(len(firsts), NO_ID, np.int32)
    if left.is_live.any():
        near, costs = _near_old(points, stored, nodes, space, is_live, left.error)
        near = np.where((near != NO_ID) & left.is_live[near], near, NO_ID)
        equal = _equal(added.vectors[firsts], near[:, 0], costs[:, 0], nodes)
    is_new = equal == NO_ID
    num_old, kept = len(graph.codes), np.flatnonzero(is_new)
    points, near = points[kept], near[kept]
    others = _near_new(points, degree)
    candidates = np.concatenate([near, np.where(others == NO_ID, NO_ID, others + num_old)], axis=1)
    known = Points(graph, space, points, left.error)

    def vectors_of(which: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        rows = np.where(which >= num_old, which - num_old, -1)
        return known.of_rows(which, rows)

    edges = np.full((len(kept), degree), NO_ID, np.int32)
    for start in range(0, len(kept), _CHOSEN):
        part = candidates[start : start + _CHOSEN]
        rows, columns = np.nonzero(part != NO_ID)
        own = points[start : start + _CHOSEN]
        found = chosen(own, rows, part[rows, columns], vectors_of, num_old + len(kept), degree, prunes_all=True)
        edges[start : start + _CHOSEN] = found.edges
    # vectors that equal another: of a group, the first is the node
    row_of = np.full(len(firsts), NO_ID, np.int32)
    row_of[kept] = np.arange(len(kept), dtype=np.int32)
    group_first = np.empty(same.num_groups, np.int64)
    group_first[same.groups[firsts]] = np.arange(len(firsts))
    first_of = group_first[same.groups]  # of each vector, the place of its group in `firsts`
    is_first = np.zeros(len(added.slots), np.bool_)
    is_first[firsts] = True
    copies = ~is_first & is_new[first_of]
    equals = ~is_new[first_of]
    return Newcomers(
        added.slots[firsts[kept]],
        added.vectors[firsts[kept]],
        points,
        np.where(edges < num_old, edges, NO_ID),
        np.where(edges >= num_old, edges - num_old, NO_ID),
        added.slots[copies],
        row_of[first_of[copies]],
        added.slots[equals],
        equal[first_of[equals]],
    )


def _near_old(
    points: NDArray[np.float32],
    stored: GraphMap,
    nodes: GraphNodes,
    space: Space,
    is_live: NDArray[np.bool_],
    error: float,
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Old nodes near each new vector, `[m, k]`, nearest first, and their squared distances."""
    graph = stored.graph
    beam = max(16, int(_BEAM * graph.blocks.degree))
    entries = stored.entry_points
    if space.num_more:
        entries = NearestPoints(space.of_prepared(graph.entry_vectors), "l2", None)
    found, costs = [np.zeros((0, beam), np.int32)], [np.zeros((0, beam))]
    for start in range(0, len(points), _AT_ONCE):
        some = points[start : start + _AT_ONCE]
        first = entries.nearest(some, min(beam, len(graph.entries)))[0]
        compared = Nearness(some, space, graph.codebooks, error)
        best = nodes.search.search(compared, first, beam, beam, _WIDTH, is_live)
        found.append(best.nodes)
        costs.append(best.costs)
    return np.concatenate(found), np.concatenate(costs)


def _equal(
    vectors: NDArray[Any], nearest: NDArray[np.int32], costs: NDArray[np.float64], nodes: GraphNodes
) -> NDArray[np.int32]:
    """int32 `[m]`, the nearest node if its vector is the same; else `NO_ID`."""
    equal = np.full(len(vectors), NO_ID, np.int32)
    suspects = np.flatnonzero((nearest != NO_ID) & (costs <= 0))
    for start in range(0, len(suspects), _AT_ONCE):
        some = suspects[start : start + _AT_ONCE]
        there, _ = nodes.at(nearest[some])
        is_same = row_hashes(there, "l2") == row_hashes(vectors[some], "l2")
        is_same &= (there.astype(np.float32) == vectors[some].astype(np.float32)).all(axis=1)
        equal[some[is_same]] = nearest[some[is_same]]
    return equal


def _near_new(points: NDArray[np.float32], degree: int) -> NDArray[np.int32]:
    """int32 `[m, k]`, rows of new vectors near each; not itself."""
    num = len(points)
    if num > _ALL_PAIRS:
        return np.asarray(connected(points, "l2", degree).edges)[:num]
    width = min(degree, max(0, num - 1))
    found = np.full((num, width), NO_ID, np.int32)
    squares = (points**2).sum(axis=1)
    for start in range(0, num if width else 0, _CHOSEN):
        some = points[start : start + _CHOSEN]
        far = squares[None] - 2 * some @ points.T
        far[np.arange(len(some)), start + np.arange(len(some))] = np.inf
        found[start : start + len(some)] = np.argpartition(far, width - 1, axis=1)[:, :width]
    return found
