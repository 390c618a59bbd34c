"""Compute exact top-k in one program: a loop scores tiles of the corpus and merges their top k.

In: queries `[blocks, block, d]`; the corpus as `[steps, parts, rows, group, d]`, with its terms and a mask of
returnable vectors. Out: the k best distances of each query and their positions in the flattened corpus, `[blocks,
block, k]`; and whether each query's result is certain despite rounding, `[blocks, block]`.

A step takes one tile of each part, and for each block of queries:

    scores = one matmul                                  [block, parts, rows, group]
    maxima = maximum of each column over the rows        [block, parts, group]
    select the k columns with the largest maxima: every other column is behind k better scores
    merge their scores with the top k so far

So only about `group + k rows` of `rows x group` scores are sorted, without approximation. Each part keeps its own top
k; one merge at the end combines them. The planner shards the program: it can split `parts` or `block`. If it splits
`parts`, devices exchange nothing before the merge.

The l2 score 2 q.x - |x|^2 cancels in floating point: it loses the digits by which |q|^2 + |x|^2 exceeds |q - x|^2. Each
part therefore keeps some candidates beyond k, selected by a lower bound of the distance (`rounding`), and re-ranks them
by direct differences, whose error is relative to the distance. A dropped vector is no nearer than the bound of the last
candidate. If the k-th distance is not below that bound, the query is uncertain and needs a retry with more candidates,
or with direct differences to all vectors (`direct`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.vector_search.data.centering import centre_queries, centre_struct, restore_in_f32
from autopar.vector_search.data.metrics import (
    NO_ID,
    Metric,
    distances_of,
    is_integer,
    score_dtype,
    scores,
    sorted_dtype,
    terms,
    worst_score,
)
from autopar.vector_search.data.placement import CACHED_BYTES
from autopar.vector_search.kernels.tiling import Blocks, Tiling

#: Unit roundoff of f32.
_UNIT = 2.0**-24

#: Re-ranked candidates beyond k, for scores within rounding of the k-th.
EXTRA = 4

#: Scores and positions, best first: `[..., k]`.
Best = tuple[jax.Array, jax.Array]
#: Vectors, their terms, mask of returnable vectors, and the position of the first slot of each row.
_Step = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]


class Corpus(NamedTuple):
    """The arrays of a corpus for exact search.

    Args:
        vectors: `[steps, parts, rows, group, d]`, minus the centre.
        centre: `[d]`; None if scores do not cancel.
        term: `[steps, parts, rows, group]`, of `search_terms`; None if the metric has none.
        may_return: bool, whether a slot holds a vector that may be returned.
    """

    vectors: Any
    centre: Any
    term: Any
    may_return: Any


class Exact(NamedTuple):
    """The result of an exact search, best first.

    Args:
        distances, positions: `[blocks, block, k]`.
        is_certain: bool `[blocks, block]`; False if rounding may hide a nearer vector; None if scores do not cancel.
    """

    distances: jax.Array
    positions: jax.Array
    is_certain: jax.Array | None


def exact_search(
    metric: Metric, k: int, *, at_once: bool = False, extra: int = EXTRA, direct: bool = False
) -> Callable[..., Exact]:
    """`exact_top_k` as a step to plan."""

    def search(queries: jax.Array, corpus: Corpus) -> Exact:
        return exact_top_k(queries, corpus, metric=metric, k=k, at_once=at_once, extra=extra, direct=direct)

    search.__qualname__ = "exact_search"
    return search


def exact_arguments(
    tiling: Tiling, blocks: Blocks, dim: int, dtype: np.dtype[Any], metric: Metric
) -> tuple[jax.ShapeDtypeStruct, Corpus]:
    """The shapes of the step's arguments: queries and corpus."""
    struct = jax.ShapeDtypeStruct
    vectors, may_return = struct((*tiling.shape, dim), dtype), struct(tiling.shape, np.bool_)
    term = jax.eval_shape(partial(search_terms, metric=metric), vectors)
    corpus = Corpus(vectors, centre_struct(dim, dtype, metric), term, may_return)
    return struct((blocks.blocks, blocks.block, dim), dtype), corpus


def needs_rerank(dtype: Any, metric: Metric) -> bool:
    """Whether scores cancel, so that candidates are re-ranked by differences: l2 of floats."""
    return metric == "l2" and not is_integer(dtype)


def rounding(dim: int, dtype: Any) -> float:
    """Upper bound of the error of an l2 score and its term, relative to |q|^2 + 2 |x|^2, for any summation order."""
    steps = (dim + 8) * _UNIT * (1 if dtype == jnp.float32 else 4)  # bf16 matrix units may drop bits of the sum
    return steps / (1 - min(0.5, steps))


def search_terms(vectors: jax.Array, metric: Metric) -> jax.Array | None:
    """`metrics.terms`; for l2 minus the rounding bound, so that scores give a lower bound of the distance."""
    term = terms(vectors, metric)
    if term is None or not needs_rerank(vectors.dtype, metric):
        return term
    return term * (1 - 2 * rounding(vectors.shape[-1], vectors.dtype))


def exact_top_k(
    queries: jax.Array,
    corpus: Corpus,
    *,
    metric: Metric,
    k: int,
    at_once: bool = False,
    extra: int = EXTRA,
    direct: bool = False,
) -> Exact:
    """The k best vectors of the corpus for each query.

    Args:
        queries: `[blocks, block, d]`.
        k: at most the number of slots.
        at_once: score the few queries of a single block in one step, which copies nothing out of the corpus.
        extra: re-ranked candidates beyond k.
        direct: score all vectors by differences: always certain, and many times slower.

    Returns:
        An empty result has the worst distance and position -1. Ties are in any order.
    """
    blocks, block, dim = queries.shape
    steps, parts, rows, group, _ = corpus.vectors.shape
    reranks = needs_rerank(corpus.vectors.dtype, metric)
    assert reranks or not direct, (metric, corpus.vectors.dtype)
    reranks, at_once = reranks and not direct, at_once and not direct
    part_size = steps * rows * group
    kept = min(k + extra if reranks else k, part_size)
    dtype = score_dtype(corpus.vectors.dtype, metric)
    sorted_as = sorted_dtype(corpus.vectors.dtype, metric, dim)
    worst = worst_score(sorted_as)
    places = jnp.arange(steps * parts * rows, dtype=jnp.int32).reshape(steps, parts, rows) * group
    centred = queries if direct else centre_queries(queries, corpus.centre, metric)

    def scored(queries: jax.Array, some: _Step) -> jax.Array:
        vectors, term, may_return, _ = some
        if direct:
            found = -_squared_distances(queries, vectors, corpus.centre)
        else:
            found = scores(queries, vectors, metric, term).astype(sorted_as)
        return jnp.where(may_return, found, worst)

    def of_block(queries: jax.Array, best: Best, some: _Step) -> Best:
        """Merge the top k of one block with a step's scores."""
        new = _candidates(scored(queries, some), some[-1], kept)
        values, positions = (jnp.concatenate(two, axis=-1) for two in zip(best, new, strict=True))
        return _best(values, positions, kept)

    def of_step(best: Best, some: _Step) -> tuple[Best, None]:
        if blocks > 1:
            return lax.scan(lambda _, one: (None, of_block(*one, some)), None, (centred, best))[1], None
        values, positions = of_block(centred[0], (best[0][0], best[1][0]), some)
        return (values[None], positions[None]), None

    every: _Step = (corpus.vectors, corpus.term, corpus.may_return, places)
    if at_once:
        found = jnp.moveaxis(scored(centred.reshape(-1, dim), every), 1, 2)
        firsts = jnp.moveaxis(places, 0, 1).reshape(parts, -1)
        found = found.reshape(blocks * block, parts, steps * rows, group)
        values, positions = _best(*_candidates(found, firsts, kept), kept)
    else:
        shape = (blocks, block, parts, kept)
        none = (jnp.full(shape, worst, sorted_as), jnp.full(shape, NO_ID, jnp.int32))
        (values, positions), _ = lax.scan(of_step, none, every)
    values, positions = (a.reshape(blocks, block, parts, kept) for a in (values, positions))
    bound = None
    if reranks:
        if kept < part_size:  # no dropped vector of a part scores better than the last kept one
            bound = jnp.min(_distance_bound(values[..., -1], centred, worst), axis=-1)
        values, positions = _rerank(values, positions, queries, corpus, min(k, kept), worst)
    values, positions = (a.reshape(blocks, block, -1) for a in (values, positions))
    if parts > 1:
        values, positions = _best(values, positions, min(k, values.shape[-1]))
    positions = jnp.where(values == worst, NO_ID, positions)
    if sorted_as != dtype:
        values = jnp.where(values == worst, worst_score(dtype), values.astype(dtype))
    if not needs_rerank(corpus.vectors.dtype, metric):
        return Exact(_distances(values, queries, corpus.centre, metric), positions, None)
    is_certain = jnp.ones((blocks, block), bool)
    if bound is not None:
        is_certain = _is_certain(-values[..., -1], bound, queries, centred, corpus.centre)
    return Exact(-values, positions, is_certain)


def _distances(found: jax.Array, queries: jax.Array, centre: jax.Array | None, metric: Metric) -> jax.Array:
    """Distances from scores that do not cancel."""
    if metric == "inner_product" and centre is not None:  # q.(x - m) + q.m
        queries = queries.astype(jnp.float32)
        found = found + jnp.sum(queries * centre.astype(jnp.float32), axis=-1, keepdims=True)
    return distances_of(found, queries, metric)


def _squared_distances(queries: jax.Array, vectors: jax.Array, centre: jax.Array) -> jax.Array:
    """f32 `[block, parts, rows, group]`, by differences, from uncentred queries, `[block, d]`."""
    # the reduced dim is not the last one, which XLA's CPU backend would not vectorize
    transposed = jnp.swapaxes(restore_in_f32(vectors, centre), -1, -2)
    return lax.map(lambda q: jnp.sum((q.astype(jnp.float32)[:, None] - transposed) ** 2, axis=-2), queries)


def _rerank(
    values: jax.Array, positions: jax.Array, queries: jax.Array, corpus: Corpus, k: int, worst: float | int
) -> Best:
    """The k best of each part's candidates, `[blocks, block, parts, kept]`, by differences: scores -|q - x|^2, and
    positions."""
    steps, parts, rows, group, dim = corpus.vectors.shape
    blocks, block, _, kept = values.shape
    by_part = corpus.vectors.reshape(steps, parts, rows * group, dim)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(2,),
        collapsed_slice_dims=(0, 2),
        start_index_map=(0, 2),
        operand_batching_dims=(1,),
        start_indices_batching_dims=(0,),
    )

    def of_some(each: tuple[jax.Array, jax.Array, jax.Array]) -> Best:
        queries, values, positions = each  # [some, d], [some, parts, kept]
        at = jnp.maximum(positions, 0)
        where = jnp.stack([at // (parts * rows * group), at % (rows * group)], axis=-1)  # [some, parts, kept, 2]
        where = jnp.moveaxis(where, 1, 0).reshape(parts, -1, 2)
        found = lax.gather(by_part, where, numbers, (1, 1, 1, dim), mode="promise_in_bounds")
        found = restore_in_f32(found.reshape(parts, -1, kept, dim), corpus.centre)
        far = jnp.sum((queries.astype(jnp.float32)[:, None] - found) ** 2, axis=-1)  # [parts, some, kept]
        exact_scores = jnp.where(values == worst, worst, -jnp.moveaxis(far, 0, 1))
        return _best(exact_scores, positions, k)

    # chunks of queries whose gathered vectors fit a CPU's caches, without splitting a device's share
    fits = max(1, CACHED_BYTES // (kept * dim * 4))
    chunks = next(num for num in range(1, block + 1) if block % num == 0 and block // num <= fits * parts)

    def in_chunks(array: jax.Array) -> jax.Array:
        """`[blocks, block, ...]` as `[blocks * chunks, block / chunks, ...]`."""
        rest = array.shape[2:]
        return jnp.moveaxis(array.reshape(blocks, block // chunks, chunks, *rest), 2, 1).reshape(
            -1, block // chunks, *rest
        )

    each = (in_chunks(queries), in_chunks(values), in_chunks(positions))
    if blocks * chunks == 1:
        best = of_some((each[0][0], each[1][0], each[2][0]))
        return best[0][None], best[1][None]
    made = (a.reshape(blocks, chunks, block // chunks, parts, k) for a in lax.map(of_some, each))
    values, positions = (jnp.moveaxis(a, 1, 2).reshape(blocks, block, parts, k) for a in made)
    return values, positions


def _distance_bound(score: jax.Array, centred: jax.Array, worst: float | int) -> jax.Array:
    """Lower bound of the squared distance from a centred query to any vector with no better score, `[blocks, block,
    parts]`; infinity without one."""
    centred = centred.astype(jnp.float32)
    squares = jnp.sum(centred * centred, axis=-1) * (1 - 3 * rounding(centred.shape[-1], centred.dtype))
    return jnp.where(score == worst, jnp.inf, squares[..., None] - score)


def _is_certain(
    far: jax.Array, bound: jax.Array, queries: jax.Array, centred: jax.Array, centre: jax.Array
) -> jax.Array:
    """bool `[blocks, block]`: whether no dropped vector can be nearer than the k-th best.

    Args:
        far: squared distance of the k-th best, `[blocks, block]`.
        bound: lower bound of the squared distance of dropped vectors, from the centred queries, `centred`.
    """
    wide = queries.astype(jnp.float32) - centre.astype(jnp.float32)
    query_error = jnp.sqrt(jnp.sum((wide - centred.astype(jnp.float32)) ** 2, axis=-1)) + 2 * _UNIT * _length(wide)
    min_distance = jnp.maximum(jnp.sqrt(jnp.maximum(bound, 0)) - query_error, 0)
    dim = centred.shape[-1]
    return far * (1 + 2 * rounding(dim, jnp.float32)) <= min_distance * min_distance


def _length(vectors: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(vectors * vectors, axis=-1))


def _best(values: jax.Array, positions: jax.Array, k: int) -> Best:
    """Top k along the last dim."""
    shape = values.shape[:-1]
    rows = [
        size for size in shape if size > 1
    ]  # XLA's CPU backend has a top-k for matrices; it sorts arrays of more dims
    values, places = lax.top_k(values.reshape(*rows, values.shape[-1]), k)
    values, places = (a.reshape(*shape, k) for a in (values, places))
    return values, jnp.take_along_axis(positions, places, axis=-1, mode="promise_in_bounds")


def _candidates(found: jax.Array, firsts: jax.Array, k: int) -> Best:
    """Scores and positions that contain the k best of each part, unordered: `[block, parts, ...]`.

    Args:
        found: all scores, `[block, parts, rows, group]`.
        firsts: position of the first slot of each row, `[parts, rows]`.
    """
    block, parts, rows, group = found.shape
    columns = jnp.arange(group, dtype=jnp.int32)
    if group + k * rows < rows * group:
        every = jnp.broadcast_to(columns, (block, parts, group))
        columns = _best(_maxima(found), every, k)[1][:, :, None]
        found = jnp.take_along_axis(found, columns, axis=-1, mode="promise_in_bounds")
    positions = jnp.broadcast_to(firsts[..., None] + columns, found.shape)
    return found.reshape(block, parts, -1), positions.reshape(block, parts, -1)


def _maxima(found: jax.Array) -> jax.Array:
    """`[block, parts, rows, group]` to `[block, parts, group]`, by overlapping halves: XLA's CPU backend vectorizes
    these, but not a reduction fused with its producer."""
    while found.shape[2] > 1:
        half = -(-found.shape[2] // 2)
        found = jnp.maximum(found[:, :, :half], found[:, :, -half:])
    return found[:, :, 0]
