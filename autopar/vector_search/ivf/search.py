"""Search inverted lists in one program: each block of a list is read once for many queries that probe it.

In: `InvertedLists` and queries. Out: the best k of the probed lists of each query.

    probes = nearest lists of each query
    items  = pairs of a block and up to `rows` queries that probe its list      (probe_batching)
    scores = batched matmuls, queries of an item x vectors of its block, several items per iteration
    best   = the groups of slots with the largest maxima, then the best slots of these groups

The result is exact within the probed lists: the k groups with the largest maxima contain the k best slots. The number
of items depends on the queries, so a loop runs until all items are done. Buffers are sized for the worst case, so one
pass suffices and candidates are sorted once.
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
from autopar.vector_search.ivf.probe_batching import WorkItems, group_by_list, num_work_items, work_items
from autopar.vector_search.ivf.product_quantization import decode
from autopar.vector_search.kernels.top_k_merge import Best, LeftOut, distinct

#: Minimum and maximum queries per item, powers of two.
_MIN_ROWS, _MAX_ROWS = 8, 32

#: Iterations of the loop if the last item of each list is half full: the trip count that the cost model assumes for a
#: loop whose trip count is unknown.
_TYPICAL_ITERATIONS = 8

#: Minimum groups per block, so that up to this many devices can share a block in whole groups.
_MIN_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the work. rows: queries per item. at_once: items per loop step."""

    rows: int
    at_once: int


def shape_of(index: InvertedLists, num_queries: int, num_probes: int, step_bytes: int = CACHED_BYTES) -> Shape:
    """Choose rows by the mean probes per list: more rows make faster matmuls, fewer rows waste less padding.

    Args:
        step_bytes: working set of one loop step: vectors, queries and scores of its items.
    """
    mean = max(1.0, num_queries * num_probes / index.num_lists)
    rows = min(num_queries, _MAX_ROWS, max(_MIN_ROWS, 2 ** round(math.log2(mean))))
    return Shape(rows, max(1, step_bytes // _item_bytes(index, rows)))


def _item_bytes(index: InvertedLists, rows: int) -> int:
    """The working set of one item."""
    return 4 * (index.slots * index.dim + rows * index.dim + rows * index.slots)


def search(
    index: InvertedLists,
    queries: jax.Array,
    k: int,
    num_probes: int,
    allowed: jax.Array | None = None,
    shape: Shape | None = None,
    left_out: LeftOut | None = None,
) -> Best:
    """The best k of the vectors in the `num_probes` nearest lists of each query.

    Args:
        queries: `[num_queries, d]`, of the vectors' dtype.
        allowed: bool `[n]`, vectors that may be returned; None: all. Lists without such vectors are probed last.
        shape: shape of the work, by default `shape_of`; it changes no result.
        left_out: vectors that each query excludes.
    """
    nearest = scores(queries.astype(jnp.float32), index.centroids, index.metric)
    if allowed is not None:
        some = jnp.cumsum(jnp.any(_is_allowed(index.positions, allowed), axis=1))
        some = jnp.concatenate([jnp.zeros(1, some.dtype), some])[index.first_block]
        nearest = jnp.where(some[1:] > some[:-1], nearest, -jnp.inf)
    probes = lax.top_k(nearest, min(num_probes, index.num_lists))[1].astype(jnp.int32)
    return search_lists(index, queries, k, probes, allowed, shape, left_out)


def search_lists(
    index: InvertedLists,
    queries: jax.Array,
    k: int,
    probes: jax.Array,
    allowed: jax.Array | None = None,
    shape: Shape | None = None,
    left_out: LeftOut | None = None,
) -> Best:
    """Search given lists: `probes`, int32 `[num_queries, num_probes]`, distinct per query."""
    num_queries, num_probes = probes.shape
    shape = shape or shape_of(index, num_queries, num_probes)
    wanted = k * index.copies
    most_blocks = index.most_blocks(num_probes)
    group = _group_size(index.slots, most_blocks * index.slots, wanted)
    most, usual = num_work_items(num_queries, shape.rows, index.num_blocks, most_blocks)
    shape = replace(shape, at_once=_items_per_step(most, usual, shape, index))
    max_items, steps_per_iteration = _loop_sizes(most, usual, shape.at_once)

    positions = index.positions
    if allowed is not None:
        positions = jnp.where(_is_allowed(positions, allowed), positions, NO_ID)
    by_list = group_by_list(probes, index.num_lists)
    items = work_items(by_list, index.first_block, shape.rows, max_items)
    pool = _score_items(index, positions, queries, by_list.queries, items, shape, group, steps_per_iteration, left_out)

    blocks = _blocks_of(index.first_block, probes, most_blocks)
    probed = jnp.take_along_axis(probes, blocks.probe, axis=1)
    rank = jnp.take_along_axis(by_list.rank, blocks.probe, axis=1)
    num_blocks = index.first_block[probed + 1] - index.first_block[probed]
    item = items.first_item[probed] + rank // shape.rows * num_blocks + blocks.place
    row = jnp.where(blocks.is_valid, item * shape.rows + rank % shape.rows, 0)
    found = _best(pool, row, blocks.is_valid, wanted)

    block = jnp.take_along_axis(index.first_block[probed] + blocks.place, found.block, axis=1)
    at = jnp.where(found.scores == worst_score(found.scores.dtype), NO_ID, positions[block, found.slot])
    best = _padded(Best(found.scores, at), wanted)
    return best if index.copies == 1 else distinct(best, k)


def _is_allowed(positions: jax.Array, allowed: jax.Array) -> jax.Array:
    """bool, shape of `positions`."""
    return (positions != NO_ID) & allowed[jnp.maximum(positions, 0)]


def _group_size(slots: int, num_slots: int, k: int) -> int:
    """The number of slots per group that makes a top-k cheapest: it reads one maximum per group, then all slots of k
    groups."""
    best = 2 ** round(math.log2(max(1.0, math.sqrt(num_slots / k))))
    return math.gcd(slots, max(1, min(slots // _MIN_GROUPS, best)))


def _items_per_step(most: int, usual: int, shape: Shape, index: InvertedLists) -> int:
    """Items per loop step: all of them if they fit, else few enough that the usual number takes the typical number of
    iterations, down to the items that fit a cache.

    Args:
        most, usual: as in `_loop_sizes`.
    """
    if most <= shape.at_once:
        return most
    least = max(1, CACHED_BYTES // _item_bytes(index, shape.rows))
    return min(shape.at_once, max(least, -(-usual // _TYPICAL_ITERATIONS)))


def _loop_sizes(most: int, usual: int, at_once: int) -> tuple[int, int]:
    """Buffer size in items, and loop steps of `at_once` items per iteration.

    Args:
        most: upper bound of the items.
        usual: expected items.
    """
    steps_per_iteration = -(-usual // (at_once * _TYPICAL_ITERATIONS))
    return at_once * steps_per_iteration * -(-most // (at_once * steps_per_iteration)), steps_per_iteration


# -- scores ---------------------------------------------------------------------------------


class _Pool(NamedTuple):
    """Scores of all items. scores: `[most * rows, groups, group]`. maxima: `[most * rows, groups]`."""

    scores: jax.Array
    maxima: jax.Array


def _score_items(
    index: InvertedLists,
    positions: jax.Array,
    queries: jax.Array,
    item_queries: jax.Array,
    items: WorkItems,
    shape: Shape,
    group: int,
    steps_per_iteration: int,
    left_out: LeftOut | None,
) -> _Pool:
    """Score all items.

    Args:
        positions: positions of the index, `NO_ID` where a slot may not be returned.
        item_queries: `ProbesByList.queries`.
    """
    most, groups = items.blocks.shape[0], index.slots // group
    row = jnp.arange(shape.rows, dtype=jnp.int32)

    def step(state: tuple[jax.Array, _Pool], _: None) -> tuple[tuple[jax.Array, _Pool], None]:
        at, pool = state
        which, block, first = (
            lax.dynamic_slice_in_dim(each, at, shape.at_once) for each in (items.lists, items.blocks, items.first_probe)
        )
        item_query = item_queries[jnp.minimum(first[:, None] + row, item_queries.shape[0] - 1)]
        found = _scored(index, queries[item_query], which, block)
        slot = positions[block][:, None, :]
        is_out = slot == NO_ID
        if left_out is not None:
            is_out |= left_out.has(slot, left_out.own[item_query][:, :, None])
        found = jnp.where(is_out, worst_score(found.dtype), found)
        found = found.reshape(shape.at_once * shape.rows, groups, group)
        start = at * shape.rows
        scored = lax.dynamic_update_slice_in_dim(pool.scores, found, start, axis=0)
        maxima = lax.dynamic_update_slice_in_dim(pool.maxima, found.max(axis=-1), start, axis=0)
        return (at + shape.at_once, _Pool(scored, maxima)), None

    dtype = score_dtype(jnp.dtype(jnp.float32) if index.codebooks is not None else queries.dtype, index.metric)
    rows = most * shape.rows
    pool = _Pool(jnp.zeros((rows, groups, group), dtype), jnp.zeros((rows, groups), dtype))
    state = (jnp.zeros((), jnp.int32), pool)
    if most == shape.at_once:
        return step(state, None)[0][1]
    return lax.while_loop(
        lambda state: state[0] < items.num_items,
        lambda state: lax.scan(step, state, None, length=steps_per_iteration)[0],
        state,
    )[1]


def _scored(index: InvertedLists, queries: jax.Array, which: jax.Array, block: jax.Array) -> jax.Array:
    """Scores of each item's queries, `[num_items, rows, d]`, in its block: `[num_items, rows, slots]`."""
    vectors = index.vectors[block]
    if index.codebooks is not None:
        queries = queries.astype(jnp.float32)
        vectors = decode(index.codebooks, vectors) + index.centroids[which][:, None, :]
    term = None if index.terms is None else index.terms[block]
    return jax.vmap(lambda q, x, t: scores(q, x, index.metric, t), in_axes=(0, 0, None if term is None else 0))(
        queries, vectors, term
    )


# -- top k ----------------------------------------------------------------------------------


class _Blocks(NamedTuple):
    """The probed blocks of each query, `[num_queries, most_blocks]`.

    Args:
        probe: index of the probe.
        place: index of the block in its list.
        is_valid: False beyond the last block.
    """

    probe: jax.Array
    place: jax.Array
    is_valid: jax.Array


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
    """The best slots of each query, `[num_queries, at most k]`: the index of the block, and the slot in it."""

    scores: jax.Array
    block: jax.Array
    slot: jax.Array


def _best(pool: _Pool, row: jax.Array, is_valid: jax.Array, k: int) -> _Found:
    """The best k slots of each query.

    Args:
        row: `[num_queries, most_blocks]`, row of the pool for each probed block.
        is_valid: bool `[num_queries, most_blocks]`, valid blocks.
    """
    num_queries, most_blocks = row.shape
    groups, group = pool.scores.shape[1:]
    worst = worst_score(pool.scores.dtype)
    maxima = jnp.where(is_valid[:, :, None], pool.maxima[row], worst).reshape(num_queries, most_blocks * groups)
    best, place = lax.top_k(maxima, min(k, most_blocks * groups))
    block, which = place // groups, place % groups
    fetched = pool.scores[jnp.take_along_axis(row, block, axis=1), which]
    fetched = jnp.where((best == worst)[:, :, None], worst, fetched).reshape(num_queries, -1)
    best, place = lax.top_k(fetched, min(k, fetched.shape[1]))
    block, which = (jnp.take_along_axis(each, place // group, axis=1) for each in (block, which))
    return _Found(best, block, which * group + place % group)


def _padded(found: Best, k: int) -> Best:
    """Pad a result to k."""
    missing = ((0, 0), (0, k - found.scores.shape[1]))
    worst = worst_score(found.scores.dtype)
    return Best(
        jnp.pad(found.scores, missing, constant_values=worst),
        jnp.pad(found.positions, missing, constant_values=NO_ID),
    )
