"""Choose entry points of a graph, so that beam searches reach all of its nodes.

In: a `NeighbourGraph` with some entry points. Out: the graph with further entry points where searches need them.
Clusters that are far apart have no edges between them, because all neighbours of a vector are in its own cluster, and
from afar all clusters look equally far. A search that starts outside the right cluster never enters it, whatever its
beam width. Entry points near the centroids of the largest clusters cover only some clusters, and every entry point
costs each search one distance.

So a random sample of the corpus is searched for. Some of the lost nodes, whose search fails, become entry points:
greedily the one that is nearer to most other lost nodes than their search results are, as long as it helps
`_MIN_HELPED` of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.vector_search.data.metrics import NO_ID, Metric
from autopar.vector_search.graph import beam_search as beam
from autopar.vector_search.graph.neighbor_graph import NeighbourGraph
from autopar.vector_search.kernels.robust_prune import squared_distances, unit

#: Sampled nodes, searches per batch, and maximum number of lost nodes that are compared.
_SAMPLE, _AT_ONCE, _LOST = 8192, 512, 2048

#: Minimum number of lost nodes that an entry point has to help. Two of 8192 are 0.02 % of recall, for one more distance
#: per search. At high recall, a wider beam pays several distances for that gain.
_MIN_HELPED = 2

#: Rounds of trials: the new entry points may still miss some lost nodes nearby.
_ROUNDS = 4


def add_entry_points(graph: NeighbourGraph, most: int = 256, size: int = 16, seed: int = 0) -> NeighbourGraph:
    """Add the entry points that searches need.

    Args:
        graph: graph with the metric of its searches.
        most: maximum number of entry points, unless the graph has more already.
        size: beam width of the trial searches; small, as in a fast search.
    """
    num_nodes = graph.vectors.shape[0]
    tried = jax.random.permutation(jax.random.key(seed), num_nodes)[: min(_SAMPLE, num_nodes)].astype(jnp.int32)
    entries = np.asarray(graph.entries)
    capacity = max(most, len(entries))
    for _ in range(_ROUNDS):
        # fixed shapes: one program for any number of entry points and of lost nodes
        padded = replace(graph, entries=jnp.asarray(_padded(entries, capacity)))
        found, is_lost = (np.asarray(each) for each in _find_lost(padded, tried, size))
        lost = np.asarray(tried)[is_lost][:_LOST]
        num = min(_LOST, len(tried))
        helps = _would_help(graph, jnp.asarray(_padded(lost, num)), jnp.asarray(_padded(found[is_lost][:_LOST], num)))
        helpful = _greedy_cover(np.asarray(helps), capacity - len(entries))
        if not helpful:
            break
        entries = np.unique(np.concatenate([entries, lost[helpful]]))
    return replace(graph, entries=jnp.asarray(entries))


def _padded(nodes: np.ndarray, num: int) -> np.ndarray:
    return np.pad(nodes, (0, num - len(nodes)), constant_values=NO_ID)


@jax.jit
def _would_help(graph: NeighbourGraph, lost: jax.Array, found: jax.Array) -> jax.Array:
    """bool `[num, num]`: whether lost node j, as an entry point, is nearer to lost node i than the node that its search
    found."""
    lost_vectors, found_vectors = graph.vectors[jnp.maximum(lost, 0)], graph.vectors[jnp.maximum(found, 0)]
    is_nearer = (
        _pairwise_distances(lost_vectors[None], lost_vectors[None], graph.metric)[0]
        < _pairwise_distances(lost_vectors[:, None], found_vectors[:, None], graph.metric)[:, 0]
    )
    is_node = lost != NO_ID
    return is_nearer & is_node[:, None] & is_node


def _pairwise_distances(some: jax.Array, others: jax.Array, metric: Metric) -> jax.Array:
    """f32 `[n, a, b]`, distances between `[n, a, d]` and `[n, b, d]`; smaller is better."""
    if metric == "inner_product":
        some, others = some.astype(jnp.float32), others.astype(jnp.float32)
        return -jnp.einsum("nad,nbd->nab", some, others, precision=lax.Precision.HIGHEST)
    if metric == "cosine":
        some, others = unit(some), unit(others)
    return squared_distances(some, others)


@partial(jax.jit, static_argnames="size")
def _find_lost(graph: NeighbourGraph, tried: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The nearest node that the search for each of `tried`, int32 `[num]`, finds, int32 `[num]`, and whether the node
    is lost: the final beam has neither the node nor one of its neighbours, nor a better node, which inner products
    allow. Near misses do not depend on the entry points."""

    def search_for(some: jax.Array) -> tuple[jax.Array, jax.Array]:
        targets = graph.vectors[some]
        found = beam.search(graph, targets, size, size).positions
        own = jnp.concatenate([some[:, None], graph.edges[some]], axis=1)
        is_found = (found[:, :, None] == own[:, None]) & (found != NO_ID)[:, :, None]
        best = graph.vectors[jnp.maximum(found[:, :1], 0)]
        both = jnp.concatenate([targets[:, None], best], axis=1)
        to_itself, to_best = jnp.moveaxis(_pairwise_distances(targets[:, None], both, graph.metric)[:, 0], 1, 0)
        return found[:, 0], ~jnp.any(is_found, axis=(1, 2)) & (to_itself < to_best)

    at_once = min(_AT_ONCE, tried.size)
    num_parts = -(-tried.size // at_once)
    padded = jnp.pad(tried, (0, num_parts * at_once - tried.size))
    found, is_lost = lax.map(search_for, padded.reshape(num_parts, at_once))
    return found.reshape(-1)[: tried.size], is_lost.reshape(-1)[: tried.size]


def _greedy_cover(helps: np.ndarray, most: int) -> list[int]:
    """Columns of `helps`, bool `[num, num]`, chosen greedily: each time the one that covers most of the remaining rows,
    up to `most`."""
    chosen: list[int] = []
    helps = helps[np.any(helps, axis=1)]
    while len(chosen) < most and len(helps):
        best = int(np.argmax(np.sum(helps, axis=0)))
        is_helped = helps[:, best]
        if np.sum(is_helped) < _MIN_HELPED:
            break
        chosen.append(best)
        helps = helps[~is_helped]
    return chosen
