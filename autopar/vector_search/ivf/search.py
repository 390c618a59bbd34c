"""Search of inverted lists from the lists' side: each block of a list is read once for many queries that probe it.

In: `InvertedLists` and queries. Out: the best k of the lists that each query probes. One program:

    probes = the lists nearest to each query
    units  = a block of a list, and some of the queries that probe it           (seats)
    scores = queries of the unit x vectors of the block: batched products of padded matrices, so many units at a time
    best   = the best groups of slots by the maximum of each, then the best slots of these groups

Nothing is approximate: k groups by their maxima hold the best k slots. How many units there are depends on the queries:
a loop goes on until all are done. There is room for as many as any queries can need, so that nothing is left for a
second search, and candidates are sorted once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.data.metrics import NO_ID, score_dtype, scores, worst_score
from autopar.vector_search.data.placement import CACHED_BYTES
from autopar.vector_search.ivf.lists import InvertedLists
from autopar.vector_search.ivf.probe_batching import Units, num_units, seats, units
from autopar.vector_search.ivf.product_quantization import decode
from autopar.vector_search.kernels.top_k_merge import Best, LeftOut, distinct

#: Queries of a unit, at least and at most: powers of two.
_LEAST_ROWS, _MOST_ROWS = 8, 32

#: The loop over units goes round so many times where the last unit of each list is half full: the number it is priced for
#: (`graph.ir.UNKNOWN_TRIPS`).
_USUAL_TURNS = 8

#: Groups of a block, at least: so many devices may share it, with whole groups each.
_LEAST_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the work. rows: queries of a unit. at_once: units."""

    rows: int
    at_once: int


def shape_of(index: InvertedLists, num_queries: int, num_probes: int, step_bytes: int = CACHED_BYTES) -> Shape:
    """By how many probes a list has on average: with many rows a product is faster, with few less is in vain.

    Args:
        step_bytes: that the vectors, the queries and the scores of the units at once may have.
    """
    mean = max(1.0, num_queries * num_probes / index.num_lists)
    rows = min(num_queries, _MOST_ROWS, max(_LEAST_ROWS, 2 ** round(math.log2(mean))))
    unit_bytes = 4 * (index.slots * index.dim + rows * index.dim + rows * index.slots)
    return Shape(rows, max(1, step_bytes // unit_bytes))


def search(
    index: InvertedLists,
    queries: jax.Array,
    k: int,
    num_probes: int,
    allowed: jax.Array | None = None,
    how: Shape | None = None,
    left_out: LeftOut | None = None,
) -> Best:
    """The best k of the vectors in the `num_probes` lists nearest to each query.

    Args:
        queries: `[num_queries, d]`, of the vectors' dtype.
        allowed: bool `[n]`: by position, which vectors may be found; all, where it is not given. Lists that hold none of
            these are not probed, as long as there are others.
        how: `shape_of` this batch, where it is not given. It changes no result.
        left_out: what each query is not to find.
    """
    nearest = scores(queries.astype(jnp.float32), index.centroids, index.metric)
    if allowed is not None:
        some = jnp.cumsum(jnp.any(_is_allowed(index.positions, allowed), axis=1))
        some = jnp.concatenate([jnp.zeros(1, some.dtype), some])[index.first_block]
        nearest = jnp.where(some[1:] > some[:-1], nearest, -jnp.inf)
    probes = lax.top_k(nearest, min(num_probes, index.num_lists))[1].astype(jnp.int32)
    return search_lists(index, queries, k, probes, allowed, how, left_out)


def search_lists(
    index: InvertedLists,
    queries: jax.Array,
    k: int,
    probes: jax.Array,
    allowed: jax.Array | None = None,
    how: Shape | None = None,
    left_out: LeftOut | None = None,
) -> Best:
    """The same in lists that are known: `probes`, int32 `[num_queries, num_probes]`, none twice for a query."""
    num_queries, num_probes = probes.shape
    how = how or shape_of(index, num_queries, num_probes)
    wanted = k * index.copies
    most_blocks = index.most_blocks(num_probes)
    group = _group(index.slots, most_blocks * index.slots, wanted)
    most, usual = num_units(num_queries, how.rows, index.num_blocks, most_blocks)
    how = replace(how, at_once=min(how.at_once, most))
    room, per_turn = _room(most, usual, how.at_once)

    positions = index.positions
    if allowed is not None:
        positions = jnp.where(_is_allowed(positions, allowed), positions, NO_ID)
    seating = seats(probes, index.num_lists)
    all_units = units(seating, index.first_block, how.rows, room)
    pool = _multiplied(index, positions, queries, seating.asks, all_units, how, group, per_turn, left_out)

    blocks = _blocks_of(index.first_block, probes, most_blocks)
    probed = jnp.take_along_axis(probes, blocks.probe, axis=1)
    seat = jnp.take_along_axis(seating.seat, blocks.probe, axis=1)
    num_blocks = index.first_block[probed + 1] - index.first_block[probed]
    unit = all_units.before[probed] + seat // how.rows * num_blocks + blocks.place
    row = jnp.where(blocks.is_there, unit * how.rows + seat % how.rows, 0)
    found = _best(pool, row, blocks.is_there, wanted)

    block = jnp.take_along_axis(index.first_block[probed] + blocks.place, found.block, axis=1)
    at = jnp.where(found.scores == worst_score(found.scores.dtype), NO_ID, positions[block, found.slot])
    best = _padded(Best(found.scores, at), wanted)
    return best if index.copies == 1 else distinct(best, k)


def _is_allowed(positions: jax.Array, allowed: jax.Array) -> jax.Array:
    """bool, as positions."""
    return (positions != NO_ID) & allowed[jnp.maximum(positions, 0)]


def _group(slots: int, num_slots: int, k: int) -> int:
    """How many slots have one maximum: the maxima of all, and the slots of k groups, are then fewest together."""
    best = 2 ** round(math.log2(max(1.0, math.sqrt(num_slots / k))))
    return math.gcd(slots, max(1, min(slots // _LEAST_GROUPS, best)))


def _room(most: int, usual: int, at_once: int) -> tuple[int, int]:
    """Room for units, and how many steps of `at_once` units a turn of the loop takes.

    Args:
        most: no more than these can be. usual: as many as one expects.
    """
    per_turn = -(-usual // (at_once * _USUAL_TURNS))
    return at_once * per_turn * -(-most // (at_once * per_turn)), per_turn


# -- products --------------------------------------------------------------------------------


class _Pool(NamedTuple):
    """What all units found. scores: `[most * rows, groups, group]`. maxima: `[most * rows, groups]`."""

    scores: jax.Array
    maxima: jax.Array


def _multiplied(
    index: InvertedLists,
    positions: jax.Array,
    queries: jax.Array,
    asks: jax.Array,
    all_units: Units,
    how: Shape,
    group: int,
    per_turn: int,
    left_out: LeftOut | None,
) -> _Pool:
    """The scores of all units.

    Args:
        positions: of the index, with `NO_ID` where a slot may not be found. asks: as of `Seats`.
    """
    most, groups = all_units.block.shape[0], index.slots // group
    row = jnp.arange(how.rows, dtype=jnp.int32)

    def step(state: tuple[jax.Array, _Pool], _: None) -> tuple[tuple[jax.Array, _Pool], None]:
        at, pool = state
        which, block, first = (
            lax.dynamic_slice_in_dim(each, at, how.at_once)
            for each in (all_units.which, all_units.block, all_units.asks)
        )
        who = asks[jnp.minimum(first[:, None] + row, asks.shape[0] - 1)]
        found = _scored(index, queries[who], which, block)
        slot = positions[block][:, None, :]
        is_out = slot == NO_ID
        if left_out is not None:
            is_out |= left_out.has(slot, left_out.own[who][:, :, None])
        found = jnp.where(is_out, worst_score(found.dtype), found)
        found = found.reshape(how.at_once * how.rows, groups, group)
        start = at * how.rows
        scored = lax.dynamic_update_slice_in_dim(pool.scores, found, start, axis=0)
        maxima = lax.dynamic_update_slice_in_dim(pool.maxima, found.max(axis=-1), start, axis=0)
        return (at + how.at_once, _Pool(scored, maxima)), None

    dtype = score_dtype(jnp.dtype(jnp.float32) if index.codebooks is not None else queries.dtype, index.metric)
    rows = most * how.rows
    pool = _Pool(jnp.zeros((rows, groups, group), dtype), jnp.zeros((rows, groups), dtype))
    state = (jnp.zeros((), jnp.int32), pool)
    if most == how.at_once:
        return step(state, None)[0][1]
    return lax.while_loop(
        lambda state: state[0] < all_units.num_units,
        lambda state: lax.scan(step, state, None, length=per_turn)[0],
        state,
    )[1]


def _scored(index: InvertedLists, queries: jax.Array, which: jax.Array, block: jax.Array) -> jax.Array:
    """`[num_units, rows, slots]`: of queries, `[num_units, rows, d]`, in blocks of lists."""
    vectors = index.vectors[block]
    if index.codebooks is not None:
        queries = queries.astype(jnp.float32)
        vectors = decode(index.codebooks, vectors) + index.centroids[which][:, None, :]
    term = None if index.terms is None else index.terms[block]
    return jax.vmap(lambda q, x, t: scores(q, x, index.metric, t), in_axes=(0, 0, None if term is None else 0))(
        queries, vectors, term
    )


# -- the best of them ------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """The blocks that each query probes, one after the other: `[num_queries, most_blocks]`.

    probe: of which probe each is. place: within its list. is_there: False beyond the last.
    """

    probe: jax.Array
    place: jax.Array
    is_there: jax.Array


def _blocks_of(first_block: jax.Array, probes: jax.Array, most_blocks: int) -> _Blocks:
    num_queries = probes.shape[0]
    num_blocks = first_block[probes + 1] - first_block[probes]
    end = jnp.cumsum(num_blocks, axis=1)
    start = end - num_blocks
    query = jnp.arange(num_queries, dtype=jnp.int32)[:, None]
    is_first = (
        jnp.zeros((num_queries, most_blocks), jnp.int32).at[query, start].set(1, mode="drop", unique_indices=True)
    )
    probe = jnp.cumsum(is_first, axis=1) - 1
    place = jnp.arange(most_blocks, dtype=jnp.int32)
    return _Blocks(probe, place - jnp.take_along_axis(start, probe, axis=1), place < end[:, -1:])


class _Found(NamedTuple):
    """Of each query the best slots, `[num_queries, at most k]`: in which of its blocks, and where in it."""

    scores: jax.Array
    block: jax.Array
    slot: jax.Array


def _best(pool: _Pool, row: jax.Array, is_there: jax.Array, k: int) -> _Found:
    """The best k of each query.

    Args:
        row: `[num_queries, most_blocks]`: of the pool, of each block that a query probes. is_there: bool: of those.
    """
    num_queries, most_blocks = row.shape
    groups, group = pool.scores.shape[1:]
    worst = worst_score(pool.scores.dtype)
    maxima = jnp.where(is_there[:, :, None], pool.maxima[row], worst).reshape(num_queries, most_blocks * groups)
    best, place = lax.top_k(maxima, min(k, most_blocks * groups))
    block, which = place // groups, place % groups
    fetched = pool.scores[jnp.take_along_axis(row, block, axis=1), which]
    fetched = jnp.where((best == worst)[:, :, None], worst, fetched).reshape(num_queries, -1)
    best, place = lax.top_k(fetched, min(k, fetched.shape[1]))
    block, which = (jnp.take_along_axis(each, place // group, axis=1) for each in (block, which))
    return _Found(best, block, which * group + place % group)


def _padded(found: Best, k: int) -> Best:
    """To k, with what marks that there are no more."""
    missing = ((0, 0), (0, k - found.scores.shape[1]))
    worst = worst_score(found.scores.dtype)
    return Best(
        jnp.pad(found.scores, missing, constant_values=worst),
        jnp.pad(found.positions, missing, constant_values=NO_ID),
    )
