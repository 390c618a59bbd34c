"""Find what deletions leave of a graph: nodes whose vectors are dead, and the live nodes that take their place in edges.

In: the old nodes, which slots live. Out: `Survivors`. A node whose vector died lives on with a vector that equals it. Of
other dead nodes, the first edges are kept in memory: a node with an edge to a dead one gets edges to the live neighbours
of that instead, and to theirs where these are dead too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.graph_on_disk.stored_graph import StoredGraph
from autopar.vector_search.on_disk.probing import prepared
from autopar.vector_search.updates.graph.nodes import GraphNodes

#: First edges of a dead node that are read; live nodes that take its place; rounds in which these are found.
_READ, _INSTEAD, _ROUNDS = 16, 8, 3
#: Vectors that are sampled to train codebooks.
_SAMPLE = 2**15


class Survivors(NamedTuple):
    """What is left.

    Args:
        slot_of: int32 `[num_places]`, the slot of each node that lives; `NO_ID` for a free place.
        is_dead: bool `[num_places]`, nodes that died.
        row_of: int32 `[num_places]`, the row of a dead node in `instead`.
        instead: int32 `[num_dead, m]`, live nodes; `NO_ID` for fewer.
        repeated, repeated_of: as in `StoredGraph`.
        error: mean squared error of the codes.
        sample: `[m, d]`, vectors that live.
    """

    slot_of: NDArray[np.int32]
    is_dead: NDArray[np.bool_]
    row_of: NDArray[np.int32]
    instead: NDArray[np.int32]
    repeated: NDArray[np.int32]
    repeated_of: NDArray[np.int32]
    error: float
    sample: NDArray[Any]

    @property
    def is_live(self) -> NDArray[np.bool_]:
        """bool `[num_places]`."""
        return self.slot_of != NO_ID


def survivors(nodes: GraphNodes, graph: StoredGraph, is_live: NDArray[np.bool_], seed: int) -> Survivors:
    """Read all nodes once.

    Args:
        is_live: bool `[num_slots]`.

    Raises:
        IndexFileError: a page is damaged or cannot be read.
    """
    per_block, dim = graph.blocks.per_block, graph.blocks.dim
    slot_of = np.full(len(graph.codes), NO_ID, np.int32)
    draw, share = np.random.default_rng(seed), _SAMPLE / max(1, len(graph.codes))
    dead: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    edges: list[NDArray[np.int32]] = [np.zeros((0, _READ), np.int32)]
    sample: list[NDArray[Any]] = []
    squares, count = 0.0, 0
    for start, some in nodes.scan():
        slots, begin = some.positions.reshape(-1), start * per_block
        slot_of[begin : begin + len(slots)] = slots
        lives = (slots != NO_ID) & is_live[np.maximum(slots, 0)]
        gone = np.flatnonzero((slots != NO_ID) & ~lives)
        dead.append(begin + gone)
        read = np.full((len(gone), _READ), NO_ID, np.int32)
        own = some.edges.reshape(len(slots), -1)[gone, :_READ]
        read[:, : own.shape[1]] = own
        edges.append(read)
        kept = np.flatnonzero(lives & (draw.random(len(slots)) < share))
        vectors = some.vectors.reshape(-1, dim)[kept]
        sample.append(vectors)
        errors = prepared(vectors, graph.metric, graph.centre) - graph.decoded(begin + kept)
        squares += float((errors**2).sum())
        count += len(kept)
    every, targets = np.concatenate(dead), np.concatenate(edges)
    # a vector that equals a dead one keeps its node
    lives = is_live[graph.repeated]
    repeated, repeated_of = graph.repeated[lives], graph.repeated_of[lives]
    heirs, first = np.unique(repeated_of, return_index=True)
    is_heir = np.isin(heirs, every)
    slot_of[heirs[is_heir]] = repeated[first[is_heir]]
    rest = np.ones(len(repeated), np.bool_)
    rest[first[is_heir]] = False
    is_dead = np.zeros(len(slot_of), np.bool_)
    is_dead[every] = True
    is_dead[heirs[is_heir]] = False
    slot_of[is_dead] = NO_ID
    row_of = np.full(len(slot_of), NO_ID, np.int32)
    is_gone = is_dead[every]
    row_of[every[is_gone]] = np.arange(int(is_gone.sum()), dtype=np.int32)
    return Survivors(
        slot_of,
        is_dead,
        row_of,
        _instead(targets[is_gone], is_dead, row_of),
        repeated[rest],
        repeated_of[rest],
        squares / max(1, count),
        np.concatenate([*sample, np.zeros((0, dim), graph.blocks.dtype)]),
    )


def _instead(edges: NDArray[np.int32], is_dead: NDArray[np.bool_], row_of: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32 `[num_dead, m]`: live nodes that take the place of each dead one."""
    if not len(edges):
        return np.zeros((0, _INSTEAD), np.int32)
    gone = (edges != NO_ID) & is_dead[edges]
    found = _first(np.where(gone, NO_ID, edges))
    rows = np.where(gone, row_of[edges], NO_ID)
    for _ in range(_ROUNDS):
        few = np.flatnonzero((found == NO_ID).any(axis=1) & gone.any(axis=1))
        if not few.size:
            break
        theirs = np.where((rows[few] == NO_ID)[..., None], NO_ID, found[rows[few]])
        found[few] = _first(np.concatenate([found[few], theirs.reshape(len(few), -1)], axis=1))
    return found


def _first(nodes: NDArray[np.int32]) -> NDArray[np.int32]:
    """The first distinct nodes of each row, that are not `NO_ID`."""
    order = np.argsort(nodes, axis=1, kind="stable")
    ordered = np.take_along_axis(nodes, order, axis=1)
    again = np.zeros(nodes.shape, np.bool_)
    np.put_along_axis(again, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
    is_kept = (nodes != NO_ID) & ~again
    order = np.argsort(~is_kept, axis=1, kind="stable")[:, :_INSTEAD]
    found = np.full((len(nodes), _INSTEAD), NO_ID, np.int32)
    kept = np.where(np.take_along_axis(is_kept, order, axis=1), np.take_along_axis(nodes, order, axis=1), NO_ID)
    found[:, : kept.shape[1]] = kept
    return found
