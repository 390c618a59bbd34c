"""A graph of near vectors, all nodes of one degree, which a beam walks (`beam`).

In: vectors, and for each a table of vectors near to it, exact or not. Out: `NeighbourGraph`. As in Vamana and CAGRA:

    forward  = the near ones, less those that a nearer kept one leads to (`diverse`)
    reverse  = who has an edge to this node, nearest first
    edges    = forward and reverse together, pruned again to the degree; then one to each node that has none (`led_to`)

An edge u -> v goes when some kept w that is nearer to u is nearer to v than u is, by the factor `alpha`: from u the
walk gets to v by way of w. All nodes are pruned side by side, in chunks; nothing runs node by node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from autopar.vector_search.data.metrics import NO_ID, Metric, terms
from autopar.vector_search.kernels.robust_prune import diverse, squared_distances, unit
from autopar.vector_search.kernels.top_k_merge import is_first

#: How often nodes without an edge to them ask for one, and how many a node takes in each time.
_ASKED, _TAKEN_IN = 4, 4


@partial(register_dataclass, data_fields=["vectors", "terms", "edges", "entries"], meta_fields=["metric"])
@dataclass(frozen=True, slots=True)
class NeighbourGraph:
    """vectors: `[n, d]`. terms: `[n]`, as `metrics.terms`. edges: int32 `[n, degree]`, `NO_ID` where a node has
    fewer. entries: int32 `[num_entries]`: nodes that every walk begins at."""

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
    near: jax.Array,
    entries: jax.Array,
    metric: Metric,
    degree: int = 32,
    alpha: float = 1.2,
    chunk: int = 512,
) -> NeighbourGraph:
    """The graph over a table of near vectors.

    Args:
        vectors: `[n, d]`. near: int32 `[n, m]`, in any order; a node itself and `NO_ID` among them count for nothing.
        entries: int32 `[num_entries]`, such that each part of the corpus is near to one.
        alpha: of squared distances, at least 1; more keeps more edges, and walks take fewer rounds.
        chunk: nodes pruned at once: chunk * m * d numbers are held.
    """
    forward = pruned(vectors, near, metric, degree, alpha, chunk)
    both = jnp.concatenate([forward, reverse(forward, degree)], axis=1)
    edges = led_to(pruned(vectors, both, metric, degree, alpha, chunk))
    return NeighbourGraph(vectors, terms(vectors, metric), edges, entries.astype(jnp.int32), metric)


@partial(jax.jit, static_argnames=("metric", "degree", "alpha", "chunk"))
def pruned(vectors: jax.Array, near: jax.Array, metric: Metric, degree: int, alpha: float, chunk: int) -> jax.Array:
    """int32 `[n, degree]`: of `near`, `[n, m]`, what is kept, nearest first."""
    num_nodes = near.shape[0]
    chunk = min(chunk, num_nodes)
    num_chunks = -(-num_nodes // chunk)
    padding = num_chunks * chunk - num_nodes
    nodes = jnp.arange(num_chunks * chunk, dtype=jnp.int32) % num_nodes
    table = jnp.pad(near, ((0, padding), (0, 0)), constant_values=NO_ID).reshape(num_chunks, chunk, -1)
    kept = lax.map(
        lambda part: _pruned_chunk(vectors, part[0], part[1], metric, degree, alpha),
        (nodes.reshape(num_chunks, chunk), table),
    )
    return kept.reshape(num_chunks * chunk, -1)[:num_nodes]


def _pruned_chunk(
    vectors: jax.Array, nodes: jax.Array, near: jax.Array, metric: Metric, degree: int, alpha: float
) -> jax.Array:
    near = jnp.where(is_first(near) & (near != nodes[:, None]), near, NO_ID)
    held, middle = vectors[jnp.maximum(near, 0)], vectors[nodes][:, None]
    if metric == "cosine":  # inner products do not say how near vectors are to each other: l2 does, of them too
        held, middle = unit(held), unit(middle)
    far = jnp.where(near == NO_ID, jnp.inf, squared_distances(middle, held)[:, 0])
    far, near, order = lax.sort((far, near, jnp.broadcast_to(jnp.arange(near.shape[1]), near.shape)), num_keys=1)
    held = jnp.take_along_axis(held, order[:, :, None], axis=1)
    is_kept = diverse(far, squared_distances(held, held), near != NO_ID, alpha)
    width = min(degree, near.shape[1])
    best, place = lax.top_k(jnp.where(is_kept, -jnp.arange(near.shape[1]), -near.shape[1]), width)
    found = jnp.where(best == -near.shape[1], NO_ID, jnp.take_along_axis(near, place, axis=1))
    return jnp.pad(found, ((0, 0), (0, degree - width)), constant_values=NO_ID)


@partial(jax.jit, static_argnames="most")
def reverse(edges: jax.Array, most: int) -> jax.Array:
    """int32 `[n, most]`: which nodes have an edge to this one, those first to whom it is nearest; beyond `most` none."""
    num_nodes, degree = edges.shape
    to = jnp.where(edges == NO_ID, num_nodes, edges).reshape(-1)
    place = jnp.broadcast_to(jnp.arange(degree, dtype=jnp.int32), edges.shape).reshape(-1)
    source = jnp.repeat(jnp.arange(num_nodes, dtype=jnp.int32), degree)
    to, _, source = lax.sort((to, place, source), num_keys=2)
    first = jnp.searchsorted(to, jnp.arange(num_nodes + 1, dtype=jnp.int32)).astype(jnp.int32)
    column = jnp.arange(to.size, dtype=jnp.int32) - first[to]
    table = jnp.full((num_nodes, most), NO_ID, jnp.int32)
    return table.at[to, column].set(source, mode="drop", unique_indices=True)


@jax.jit
def led_to(edges: jax.Array) -> jax.Array:
    """`edges`, int32 `[n, degree]`, nearest first, with one to almost every node that had none: no walk would find it,
    however large its beam.

    The nearest of the nodes that it leads to itself takes it in, in place of the farthest that another leads to as
    well. Two may give up their edges to one node in the same round; it asks in the next one, its next nearest.
    """
    num_nodes, degree = edges.shape
    taken_in = min(_TAKEN_IN, degree)
    for place in range(min(_ASKED, degree)):
        num_in = jnp.zeros(num_nodes, jnp.int32).at[jnp.where(edges == NO_ID, num_nodes, edges)].add(1, mode="drop")
        asked = jnp.where(num_in == 0, edges[:, place], NO_ID)
        asking = reverse(asked[:, None], taken_in)
        is_spared = (edges == NO_ID) | (num_in[jnp.maximum(edges, 0)] > 1)
        farthest, spared = lax.top_k(jnp.where(is_spared, jnp.arange(degree, dtype=jnp.int32), -1), taken_in)
        kept = jnp.take_along_axis(edges, spared, axis=1)
        taken = jnp.where((asking != NO_ID) & (farthest >= 0), asking, kept)
        edges = jnp.put_along_axis(edges, spared, taken, axis=1, inplace=False)
    return edges
