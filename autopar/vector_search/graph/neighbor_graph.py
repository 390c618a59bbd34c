"""Build a graph of fixed degree from candidate neighbours, as Vamana and CAGRA do.

In: vectors, and a table of candidate neighbours, exact or not. Out: a `NeighbourGraph` for `beam_search`.

    forward  = candidates after robust pruning
    reverse  = sources of the edges to this node, nearest first
    edges    = forward and reverse, pruned to the degree; nodes without an incoming edge then get one
               (`add_missing_in_edges`)

Pruning removes edge u -> v if a kept neighbour w, nearer to u, is nearer to v than u is, by the factor `alpha`: a
search reaches v through w. All nodes are pruned in parallel, in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, Metric, terms
from autopar.vector_search.kernels.by_row import by_row
from autopar.vector_search.kernels.robust_prune import robust_prune, squared_distances, unit
from autopar.vector_search.kernels.top_k_merge import is_first

#: Attempts per node without an incoming edge, and edges that a node accepts per attempt.
_ATTEMPTS, _MAX_ACCEPTED = 4, 4

#: Nodes pruned at a time.
CHUNK = 512


@partial(register_dataclass, data_fields=["vectors", "terms", "edges", "entries"], meta_fields=["metric"])
@dataclass(frozen=True, slots=True)
class NeighbourGraph:
    """A graph of vectors.

    Args:
        vectors: `[n, d]`.
        terms: `[n]`, as `metrics.terms`.
        edges: int32 `[n, degree]`; `NO_ID` if a node has fewer.
        entries: int32 `[num_entries]`, entry points of every search.
    """

    vectors: jax.Array
    terms: jax.Array | None
    edges: jax.Array
    entries: jax.Array
    metric: Metric = field(default="l2")

    @property
    def degree(self) -> int:
        return self.edges.shape[1]


def connect(
    vectors: jax.Array,
    near: NDArray[np.int32],
    entries: NDArray[np.integer],
    metric: Metric,
    degree: int = 32,
    alpha: float = 1.2,
    chunk: int = CHUNK,
    devices: Sequence[Any] = (),
) -> NeighbourGraph:
    """Build the graph from a table of candidate neighbours. Edges are reversed on the host, which needs no compilation.

    Args:
        vectors: `[n, d]`.
        near: int32 `[n, m]`, in any order; the node itself and `NO_ID` are ignored.
        entries: int32 `[num_entries]`, entry points that cover the corpus.
        alpha: factor on squared distances, at least 1; a larger factor keeps more edges and needs fewer iterations.
        chunk: nodes pruned at a time on a device; memory is chunk * m * d numbers.
        devices: devices that prune; none: the default one.
    """
    candidates = np.full((len(near), max(near.shape[1], 2 * degree)), NO_ID, np.int32)  # both times: one program
    candidates[:, : near.shape[1]] = near
    forward = np.asarray(pruned(vectors, candidates, metric, degree, alpha, chunk, devices))
    candidates[:, :degree], candidates[:, degree:] = forward, NO_ID
    candidates[:, degree : 2 * degree] = reverse(forward, degree)
    edges = add_missing_in_edges(np.asarray(pruned(vectors, candidates, metric, degree, alpha, chunk, devices)))
    return NeighbourGraph(vectors, terms(vectors, metric), jnp.asarray(edges), jnp.asarray(entries, jnp.int32), metric)


def pruned(
    vectors: jax.Array,
    near: NDArray[np.int32],
    metric: Metric,
    degree: int,
    alpha: float,
    chunk: int,
    devices: Sequence[Any] = (),
) -> jax.Array:
    """int32 `[n, degree]`: the kept candidates of `near`, `[n, m]`, nearest first."""
    table = np.concatenate([np.arange(len(near), dtype=np.int32)[:, None], near], axis=1)
    of = {"metric": metric, "degree": degree, "alpha": alpha, "chunk": chunk}
    return by_row(_pruned_rows, vectors, table, devices or jax.devices()[:1], **of)


def _pruned_rows(
    vectors: jax.Array, table: jax.Array, *, metric: Metric, degree: int, alpha: float, chunk: int
) -> jax.Array:
    """The kept candidates of rows of nodes and their candidates, `[rows, 1 + m]`."""
    num_rows = table.shape[0]
    chunk = min(chunk, num_rows)
    padded = jnp.pad(table, ((0, -num_rows % chunk), (0, 0)), mode="wrap").reshape(-1, chunk, table.shape[1])
    kept = lax.map(lambda part: _pruned_chunk(vectors, part[:, 0], part[:, 1:], metric, degree, alpha), padded)
    return kept.reshape(-1, degree)[:num_rows]


def _pruned_chunk(
    vectors: jax.Array, nodes: jax.Array, near: jax.Array, metric: Metric, degree: int, alpha: float
) -> jax.Array:
    near = jnp.where(is_first(near) & (near != nodes[:, None]), near, NO_ID)
    neighbours, centre = vectors[jnp.maximum(near, 0)], vectors[nodes][:, None]
    if metric == "cosine":  # l2 of unit vectors; inner products use plain l2, which measures nearness
        neighbours, centre = unit(neighbours), unit(centre)
    distances = jnp.where(near == NO_ID, jnp.inf, squared_distances(centre, neighbours)[:, 0])
    distances, near, order = lax.sort(
        (distances, near, jnp.broadcast_to(jnp.arange(near.shape[1]), near.shape)), num_keys=1
    )
    neighbours = jnp.take_along_axis(neighbours, order[:, :, None], axis=1)
    is_kept = robust_prune(distances, squared_distances(neighbours, neighbours), near != NO_ID, alpha)
    width = min(degree, near.shape[1])
    best, place = lax.top_k(jnp.where(is_kept, -jnp.arange(near.shape[1]), -near.shape[1]), width)
    found = jnp.where(best == -near.shape[1], NO_ID, jnp.take_along_axis(near, place, axis=1))
    return jnp.pad(found, ((0, 0), (0, degree - width)), constant_values=NO_ID)


def reverse(edges: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    """int32 `[n, most]`: sources of the edges to each node, in order of their rank at the source, at most `most`."""
    num_nodes = len(edges)
    flat = edges.T.reshape(-1)  # by rank
    order = np.argsort(flat, kind="stable")[np.count_nonzero(flat == NO_ID) :]
    to, source = flat[order], order % max(1, num_nodes)
    column = np.arange(len(to)) - np.searchsorted(to, np.arange(num_nodes))[to]
    is_kept = column < most
    table = np.full((num_nodes, most), NO_ID, np.int32)
    table[to[is_kept], column[is_kept]] = source[is_kept]
    return table


def add_missing_in_edges(edges: NDArray[np.int32]) -> NDArray[np.int32]:
    """Give an incoming edge to almost every node that has none: no search could find it.

    The node's nearest out-neighbour adds an edge to it, in place of that neighbour's farthest edge whose target has
    other incoming edges. Two neighbours may drop their edges to the same target in one attempt; the next attempt
    repairs this with the target's next neighbour.

    Args:
        edges: int32 `[n, degree]`, nearest first.
    """
    (num_nodes, degree), edges = edges.shape, np.array(edges)
    accepted = min(_MAX_ACCEPTED, degree)
    for place in range(min(_ATTEMPTS, degree)):
        num_in = np.bincount(edges[edges != NO_ID], minlength=num_nodes)
        sources = reverse(np.where(num_in == 0, edges[:, place], NO_ID)[:, None], accepted)
        targets = np.flatnonzero(sources[:, 0] != NO_ID)
        own, wanted = edges[targets], sources[targets]
        is_replaceable = (own == NO_ID) | (num_in[np.maximum(own, 0)] > 1)
        ranks = np.where(is_replaceable, np.arange(degree), -1)
        slots = np.argsort(-ranks, axis=1, kind="stable")[:, :accepted]
        can = (wanted != NO_ID) & (np.take_along_axis(ranks, slots, axis=1) >= 0)
        np.put_along_axis(own, slots, np.where(can, wanted, np.take_along_axis(own, slots, axis=1)), axis=1)
        edges[targets] = own
    return edges
