"""A graph walked by many queries at once, in one program: each keeps a beam of the best nodes that it has seen.

In: a `NeighbourGraph` and queries. Out: the best k nodes, and how many scores were computed. In every round each query
takes the best nodes of its beam that it has not looked at (`width` of them), and scores their neighbours that it has
not seen; what it has seen is a bit for each node, so that nothing is sorted to find what is there twice. A query ends
when it has looked at all of its beam; the program ends with the last query, or after a number of rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.data.metrics import NO_ID, score_dtype, scores, worst_score
from autopar.vector_search.graph.neighbor_graph import NeighbourGraph
from autopar.vector_search.kernels.top_k_merge import LeftOut, is_first

_BITS = 32


class Walked(NamedTuple):
    """`scores` `[num_queries, k]`, best first, int32 `positions`, `NO_ID` where there is none; int32 `num_scored`,
    `[num_queries]`: how many vectors each query was compared with."""

    scores: jax.Array
    positions: jax.Array
    num_scored: jax.Array


class _Beam(NamedTuple):
    scores: jax.Array  # [num_queries, beam]
    positions: jax.Array
    is_looked_at: jax.Array
    seen: jax.Array  # uint32 [num_queries, words]: a bit for each node
    num_scored: jax.Array


def search(
    graph: NeighbourGraph,
    queries: jax.Array,
    k: int,
    beam: int = 64,
    width: int = 1,
    rounds: int | None = None,
    allowed: jax.Array | None = None,
    left_out: LeftOut | None = None,
) -> Walked:
    """The best k nodes of the beam where the walk ends.

    Args:
        queries: `[num_queries, d]`, of the vectors' dtype.
        beam: nodes kept, at least k: more finds more, and takes longer.
        width: nodes looked at in one round: more makes fewer rounds, and some more scores.
        rounds: end after so many, whether or not the beam has been looked at; without it when it has. A program of a
            known number of rounds is planned for what it costs, and takes as long for any queries.
        allowed: bool `[n]`: which of the beam may be found; the walk goes through all, so that they are the nearest
            of those, though fewer than k where the beam ends before.
        left_out: nodes that a query's walk takes for not there, such as itself.
    """
    beam = max(beam, k)
    num_queries, num_nodes = queries.shape[0], graph.vectors.shape[0]
    made = score_dtype(queries.dtype, graph.metric)
    worst = worst_score(made)
    start = _Beam(
        jnp.full((num_queries, beam), worst, made),
        jnp.full((num_queries, beam), NO_ID, jnp.int32),
        jnp.ones((num_queries, beam), bool),
        jnp.zeros((num_queries, -(-num_nodes // _BITS)), jnp.uint32),
        jnp.zeros(num_queries, jnp.int32),
    )
    entries = jnp.broadcast_to(graph.entries, (num_queries, graph.entries.shape[0]))

    def visit(walk: _Beam, nodes: jax.Array) -> _Beam:
        if left_out is not None:
            nodes = jnp.where(left_out.has(nodes, left_out.own[:, None]), NO_ID, nodes)
        walk, nodes, score = _seen(graph, queries, walk, nodes)
        best, positions, is_looked_at = _merged(
            (walk.scores, walk.positions, walk.is_looked_at), (score, nodes, nodes == NO_ID), beam
        )
        return walk._replace(scores=best, positions=positions, is_looked_at=is_looked_at)

    def one_round(walk: _Beam) -> _Beam:
        best, place = lax.top_k(jnp.where(walk.is_looked_at, worst, walk.scores), min(width, beam))
        nodes = jnp.where(best == worst, NO_ID, jnp.take_along_axis(walk.positions, place, axis=1))
        walk = walk._replace(is_looked_at=jax.vmap(lambda one, at: one.at[at].set(True))(walk.is_looked_at, place))
        near = jnp.where((nodes == NO_ID)[:, :, None], NO_ID, graph.edges[jnp.maximum(nodes, 0)])
        return visit(walk, near.reshape(num_queries, -1))

    walk = visit(start, entries)
    if rounds is None:
        walk = lax.while_loop(lambda walk: ~jnp.all(walk.is_looked_at), one_round, walk)
    else:
        walk = lax.fori_loop(0, rounds, lambda _, walk: one_round(walk), walk)
    if allowed is None:
        return Walked(walk.scores[:, :k], walk.positions[:, :k], walk.num_scored)
    may = (walk.positions != NO_ID) & allowed[jnp.maximum(walk.positions, 0)]
    found, place = lax.top_k(jnp.where(may, walk.scores, worst), k)
    positions = jnp.take_along_axis(jnp.where(may, walk.positions, NO_ID), place, axis=1)
    return Walked(found, positions, walk.num_scored)


def _seen(
    graph: NeighbourGraph, queries: jax.Array, walk: _Beam, nodes: jax.Array
) -> tuple[_Beam, jax.Array, jax.Array]:
    """`nodes`, `[num_queries, w]`, less those seen before or twice among them; their scores; all marked as seen."""
    word = jnp.maximum(nodes, 0) // _BITS
    bit = jnp.uint32(1) << (jnp.maximum(nodes, 0) % _BITS).astype(jnp.uint32)
    is_new = (nodes != NO_ID) & ((jnp.take_along_axis(walk.seen, word, axis=1) & bit) == 0)
    if nodes.shape[1] > graph.degree:  # of more than one node: one neighbour may be there twice
        is_new &= is_first(nodes)
    nodes = jnp.where(is_new, nodes, NO_ID)
    # each bit is added once, so that adding sets it
    seen = jax.vmap(lambda one, at, bits: one.at[at].add(bits))(walk.seen, word, jnp.where(is_new, bit, jnp.uint32(0)))
    at = jnp.maximum(nodes, 0)
    term_axis = None if graph.terms is None else 0
    term = None if graph.terms is None else graph.terms[at]
    score = jax.vmap(lambda q, x, t: scores(q[None], x, graph.metric, t)[0], in_axes=(0, 0, term_axis))(
        queries, graph.vectors[at], term
    )
    score = jnp.where(is_new, score, worst_score(score.dtype))
    num_scored = walk.num_scored + jnp.sum(is_new, axis=1, dtype=jnp.int32)
    return walk._replace(seen=seen, num_scored=num_scored), nodes, score


def _merged(some: tuple[jax.Array, ...], others: tuple[jax.Array, ...], num: int) -> tuple[jax.Array, ...]:
    """The best `num` of both by their scores, which come first; what belongs to them goes along."""
    both = [jnp.concatenate(each, axis=1) for each in zip(some, others, strict=True)]
    best, place = lax.top_k(both[0], num)
    return best, *(jnp.take_along_axis(each, place, axis=1) for each in both[1:])
