"""Search a neighbour graph by beam search, for a batch of queries in one program.

In: a `NeighbourGraph` and queries. Out: the best k nodes, and the number of scores computed. In each iteration, a query
expands the best `width` unexpanded nodes of its beam: it scores their unvisited neighbours and merges them into the
beam. A bitset marks visited nodes, so no sort is needed to find duplicates. A query is finished when its whole beam is
expanded; the loop ends with the last query, or after a fixed number of iterations.
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


class BeamSearchResult(NamedTuple):
    """The result of a beam search.

    Args:
        scores: `[num_queries, k]`, best first.
        positions: int32 `[num_queries, k]`, `NO_ID` for no result.
        num_scored: int32 `[num_queries]`, number of vectors that each query was compared with.
    """

    scores: jax.Array
    positions: jax.Array
    num_scored: jax.Array


class _Beam(NamedTuple):
    scores: jax.Array  # [num_queries, beam]
    positions: jax.Array
    is_expanded: jax.Array
    visited: jax.Array  # uint32 [num_queries, words]: one bit per node
    num_scored: jax.Array


def search(
    graph: NeighbourGraph,
    queries: jax.Array,
    k: int,
    beam: int = 64,
    width: int = 1,
    iterations: int | None = None,
    allowed: jax.Array | None = None,
    left_out: LeftOut | None = None,
    limit: jax.Array | None = None,
) -> BeamSearchResult:
    """The best k nodes of the final beam.

    Args:
        queries: `[num_queries, d]`, of the vectors' dtype.
        beam: beam width, at least k; a wider beam raises recall and time.
        width: nodes expanded per iteration; more nodes need fewer iterations and slightly more scores.
        iterations: fixed number of iterations; None: until all beams are expanded. A fixed number has a known trip
            count for the cost model, and the same time for any queries.
        allowed: bool `[n]`, nodes that may be returned. The search also expands the others, so results are the nearest
            allowed nodes of the final beam, possibly fewer than k.
        left_out: nodes that a query ignores, such as itself.
        limit: int32, a narrower beam: results are those of a beam of so many nodes, at least k, from one program for
            all limits.
    """
    beam = max(beam, k)
    is_in_beam = None if limit is None else jnp.arange(beam) < jnp.maximum(limit, k)
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

    def visit(state: _Beam, nodes: jax.Array) -> _Beam:
        if left_out is not None:
            nodes = jnp.where(left_out.has(nodes, left_out.own[:, None]), NO_ID, nodes)
        state, nodes, score = _score_unvisited(graph, queries, state, nodes)
        best, positions, is_expanded = _merge_top(
            (state.scores, state.positions, state.is_expanded), (score, nodes, nodes == NO_ID), beam
        )
        if is_in_beam is not None:
            best, positions = jnp.where(is_in_beam, best, worst), jnp.where(is_in_beam, positions, NO_ID)
            is_expanded |= ~is_in_beam
        return state._replace(scores=best, positions=positions, is_expanded=is_expanded)

    def expand(state: _Beam) -> _Beam:
        best, place = lax.top_k(jnp.where(state.is_expanded, worst, state.scores), min(width, beam))
        nodes = jnp.where(best == worst, NO_ID, jnp.take_along_axis(state.positions, place, axis=1))
        state = state._replace(is_expanded=jax.vmap(lambda one, at: one.at[at].set(True))(state.is_expanded, place))
        near = jnp.where((nodes == NO_ID)[:, :, None], NO_ID, graph.edges[jnp.maximum(nodes, 0)])
        return visit(state, near.reshape(num_queries, -1))

    state = visit(start, entries)
    if iterations is None:
        state = lax.while_loop(lambda state: ~jnp.all(state.is_expanded), expand, state)
    else:
        state = lax.fori_loop(0, iterations, lambda _, state: expand(state), state)
    if allowed is None:
        return BeamSearchResult(state.scores[:, :k], state.positions[:, :k], state.num_scored)
    may = (state.positions != NO_ID) & allowed[jnp.maximum(state.positions, 0)]
    found, place = lax.top_k(jnp.where(may, state.scores, worst), k)
    positions = jnp.take_along_axis(jnp.where(may, state.positions, NO_ID), place, axis=1)
    return BeamSearchResult(found, positions, state.num_scored)


def _score_unvisited(
    graph: NeighbourGraph, queries: jax.Array, state: _Beam, nodes: jax.Array
) -> tuple[_Beam, jax.Array, jax.Array]:
    """Score the nodes of `nodes`, `[num_queries, w]`, that are unvisited and no duplicates, and mark them visited."""
    word = jnp.maximum(nodes, 0) // _BITS
    bit = jnp.uint32(1) << (jnp.maximum(nodes, 0) % _BITS).astype(jnp.uint32)
    is_new = (nodes != NO_ID) & ((jnp.take_along_axis(state.visited, word, axis=1) & bit) == 0)
    if nodes.shape[1] > graph.degree:  # neighbours of several nodes may repeat
        is_new &= is_first(nodes)
    nodes = jnp.where(is_new, nodes, NO_ID)
    # each bit is added once, so addition sets it
    visited = jax.vmap(lambda one, at, bits: one.at[at].add(bits))(
        state.visited, word, jnp.where(is_new, bit, jnp.uint32(0))
    )
    at = jnp.maximum(nodes, 0)
    term_axis = None if graph.terms is None else 0
    term = None if graph.terms is None else graph.terms[at]
    score = jax.vmap(lambda q, x, t: scores(q[None], x, graph.metric, t)[0], in_axes=(0, 0, term_axis))(
        queries, graph.vectors[at], term
    )
    score = jnp.where(is_new, score, worst_score(score.dtype))
    num_scored = state.num_scored + jnp.sum(is_new, axis=1, dtype=jnp.int32)
    return state._replace(visited=visited, num_scored=num_scored), nodes, score


def _merge_top(first: tuple[jax.Array, ...], second: tuple[jax.Array, ...], num: int) -> tuple[jax.Array, ...]:
    """The best `num` rows of both tuples by their first array, the scores."""
    both = [jnp.concatenate(each, axis=1) for each in zip(first, second, strict=True)]
    best, place = lax.top_k(both[0], num)
    return best, *(jnp.take_along_axis(each, place, axis=1) for each in both[1:])
