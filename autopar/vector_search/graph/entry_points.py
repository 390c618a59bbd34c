"""Where walks of a graph begin, so that they get to all of it.

In: a `NeighbourGraph` with some entries. Out: the same with more of them, where it needs more. Of clusters that lie far
apart all that is near to a vector is in its own cluster: no edge leads from one to another, and from afar all look
equally far, so that nothing tells a walk which to go to. Entries at the middles of the largest clusters meet a part of
them. A walk that has met no node of the right one finds nothing at all, however large its beam; and of a corpus that is
of one piece, more entries are only more to be compared with.

So walks are tried: vectors of the corpus, drawn at random, are looked for. Of those that are lost some become entries:
each time the one that most of the others are nearer to than to what they found; none that helps so few that it costs
more than it finds.
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

#: Vectors that are looked for, how many at once, and how many of the lost are compared with each other, at most.
_TRIED, _AT_ONCE, _LOST = 8192, 512, 2048

#: Of the lost, how many a new entry helps at least: two in 8192 are 0.02 % of recall, for which every walk pays one
#: distance. Nodes in the beam that find as much more cost several, where recall is high.
_WORTH = 2

#: Walks are tried again with the new entries: from some the lost are not got to, for all that they are near.
_ROUNDS = 4


def with_entries_for_all(graph: NeighbourGraph, most: int = 256, size: int = 16, seed: int = 0) -> NeighbourGraph:
    """The graph with the entries that it needs beside its own.

    Args:
        graph: its metric is that of searches.
        most: entries in all, if it has not more already.
        size: nodes in the beam of a walk that is tried: few, as of a search that is quick.
    """
    num_nodes = graph.vectors.shape[0]
    tried = jax.random.permutation(jax.random.key(seed), num_nodes)[: min(_TRIED, num_nodes)].astype(jnp.int32)
    entries = np.asarray(graph.entries)
    room = max(most, len(entries))
    for _ in range(_ROUNDS):
        # one program for any number of entries, and one for any number of the lost
        walked = replace(graph, entries=jnp.asarray(_padded(entries, room)))
        found, is_lost = (np.asarray(each) for each in _looked_for(walked, tried, size))
        lost = np.asarray(tried)[is_lost][:_LOST]
        num = min(_LOST, len(tried))
        helps = _helps(graph, jnp.asarray(_padded(lost, num)), jnp.asarray(_padded(found[is_lost][:_LOST], num)))
        helpful = _helpful(np.asarray(helps), room - len(entries))
        if not helpful:
            break
        entries = np.unique(np.concatenate([entries, lost[helpful]]))
    return replace(graph, entries=jnp.asarray(entries))


def _padded(nodes: np.ndarray, num: int) -> np.ndarray:
    return np.pad(nodes, (0, num - len(nodes)), constant_values=NO_ID)


@jax.jit
def _helps(graph: NeighbourGraph, lost: jax.Array, found: jax.Array) -> jax.Array:
    """bool `[num, num]`, of nodes that are lost, int32 `[num]`, and the nearest that the walk of each finds, int32
    `[num]`: row i says which of them would help the i-th, as they are nearer to it than what is found."""
    held, there = graph.vectors[jnp.maximum(lost, 0)], graph.vectors[jnp.maximum(found, 0)]
    is_nearer = (
        _apart(held[None], held[None], graph.metric)[0] < _apart(held[:, None], there[:, None], graph.metric)[:, 0]
    )
    is_node = lost != NO_ID
    return is_nearer & is_node[:, None] & is_node


def _apart(some: jax.Array, others: jax.Array, metric: Metric) -> jax.Array:
    """f32 `[n, a, b]`, between `[n, a, d]` and `[n, b, d]`: less is better."""
    if metric == "inner_product":
        some, others = some.astype(jnp.float32), others.astype(jnp.float32)
        return -jnp.einsum("nad,nbd->nab", some, others, precision=lax.Precision.HIGHEST)
    if metric == "cosine":
        some, others = unit(some), unit(others)
    return squared_distances(some, others)


@partial(jax.jit, static_argnames="size")
def _looked_for(graph: NeighbourGraph, tried: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Of each of `tried`, int32 `[num]`: the nearest that a walk finds, int32 `[num]`; and whether it is lost, as the
    walk ends with neither itself nor a neighbour of it, nor with what is nearer, as others may be by inner products. A near
    miss is no matter of where walks begin."""

    def look_for(some: jax.Array) -> tuple[jax.Array, jax.Array]:
        wanted = graph.vectors[some]
        found = beam.search(graph, wanted, size, size).positions
        own = jnp.concatenate([some[:, None], graph.edges[some]], axis=1)
        is_there = (found[:, :, None] == own[:, None]) & (found != NO_ID)[:, :, None]
        best = graph.vectors[jnp.maximum(found[:, :1], 0)]
        both = jnp.concatenate([wanted[:, None], best], axis=1)
        to_itself, to_best = jnp.moveaxis(_apart(wanted[:, None], both, graph.metric)[:, 0], 1, 0)
        return found[:, 0], ~jnp.any(is_there, axis=(1, 2)) & (to_itself < to_best)

    at_once = min(_AT_ONCE, tried.size)
    num_parts = -(-tried.size // at_once)
    padded = jnp.pad(tried, (0, num_parts * at_once - tried.size))
    found, is_lost = lax.map(look_for, padded.reshape(num_parts, at_once))
    return found.reshape(-1)[: tried.size], is_lost.reshape(-1)[: tried.size]


def _helpful(helps: np.ndarray, most: int) -> list[int]:
    """Which columns of `helps`, bool `[num, num]`: each time the one that most of the rows left have, up to `most`."""
    chosen: list[int] = []
    helps = helps[np.any(helps, axis=1)]
    while len(chosen) < most and len(helps):
        best = int(np.argmax(np.sum(helps, axis=0)))
        is_helped = helps[:, best]
        if np.sum(is_helped) < _WORTH:
            break
        chosen.append(best)
        helps = helps[~is_helped]
    return chosen
