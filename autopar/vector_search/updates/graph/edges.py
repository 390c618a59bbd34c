"""Choose the edges of nodes from candidates: the nearest where they fit, else by robust pruning.

In: pairs of a node and a candidate. Out: edges, nearest first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.graph_on_disk.block_search import distinct
from autopar.vector_search.kernels.robust_prune import robust_prune, squared_distances

#: Factor on squared distances, as when a graph is built.
_ALPHA = 1.2
#: Candidates that are pruned, per edge.
_CANDIDATES = 1.5
#: Nodes pruned at a time.
_AT_ONCE = 128

#: Vectors f32 `[m, d]` and squared errors f32 `[m]` of some nodes.
Vectors = Callable[[NDArray[Any]], tuple[NDArray[np.float32], NDArray[np.float32]]]


class Chosen(NamedTuple):
    """The edges of some nodes.

    Args:
        edges: int32 `[m, degree]`; `NO_ID` for none.
        num_pruned: nodes that had more candidates.
    """

    edges: NDArray[np.int32]
    num_pruned: int


def chosen(
    own: NDArray[np.float32],
    rows: NDArray[Any],
    candidates: NDArray[Any],
    vectors_of: Vectors,
    num_nodes: int,
    degree: int,
    prunes_all: bool = False,
) -> Chosen:
    """The edges of nodes.

    Args:
        own: f32 `[m, d]`, their vectors.
        rows, candidates: `[num_pairs]`, in any order; a pair may repeat.
        vectors_of: the vectors of candidates.
        num_nodes: candidates are below.
        prunes_all: whether nodes are pruned whose candidates would fit, as when they are inserted.
    """
    keys = distinct(rows.astype(np.int64) * num_nodes + candidates)
    rows, candidates = keys // num_nodes, (keys % num_nodes).astype(np.int32)
    most = max(degree, int(_CANDIDATES * degree))
    near, far = np.full((len(own), most), NO_ID, np.int32), np.full((len(own), most), np.inf, np.float32)
    if len(keys):
        vectors, errors = vectors_of(candidates)
        distances = ((vectors - own[rows]) ** 2).sum(axis=1) + errors
        order = np.lexsort((distances, rows))
        rows, candidates, distances = rows[order], candidates[order], distances[order]
        rank = np.arange(len(rows)) - np.searchsorted(rows, np.arange(len(own)))[rows]
        is_kept = rank < most
        near[rows[is_kept], rank[is_kept]] = candidates[is_kept]
        far[rows[is_kept], rank[is_kept]] = distances[is_kept]
    edges = near[:, :degree].copy()
    num_near = (near != NO_ID).sum(axis=1)
    crowded = np.flatnonzero(num_near > (1 if prunes_all else degree))
    for start in range(0, len(crowded), _AT_ONCE):
        some = crowded[start : start + _AT_ONCE]
        edges[some] = _pruned(near[some], far[some], vectors_of, degree)
    return Chosen(edges, len(crowded))


def _pruned(
    near: NDArray[np.int32], distances: NDArray[np.float32], vectors_of: Vectors, degree: int
) -> NDArray[np.int32]:
    """int32 `[m, degree]`, from candidates `[m, most]`, nearest first."""
    num, most = near.shape
    is_node = near != NO_ID
    vectors, errors = vectors_of(near[is_node])
    padded, noise = np.zeros((_AT_ONCE, most, vectors.shape[1]), np.float32), np.zeros((_AT_ONCE, most), np.float32)
    there = np.nonzero(is_node)
    padded[there], noise[there] = vectors, errors
    far = np.full((_AT_ONCE, most), np.inf, np.float32)
    far[:num] = distances
    is_kept = np.asarray(_kept(far, padded, noise, alpha=_ALPHA))[:num] & is_node
    order = np.argsort(~is_kept, axis=1, kind="stable")[:, :degree]
    return np.where(np.take_along_axis(is_kept, order, axis=1), np.take_along_axis(near, order, axis=1), NO_ID)


@partial(jax.jit, static_argnames="alpha")
def _kept(distances: jax.Array, vectors: jax.Array, errors: jax.Array, *, alpha: float) -> jax.Array:
    pairwise = squared_distances(vectors, vectors) + errors[:, :, None] + errors[:, None, :]
    return robust_prune(distances, pairwise, distances < float("inf"), alpha)
