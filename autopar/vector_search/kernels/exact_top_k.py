"""Exact search as one program: every vector is scored, in steps, and the k best so far are carried on.

In: queries `[blocks, block, d]`; the corpus as `[steps, parts, rows, group, d]`, with what its scores need and which of
its places may be returned. Out: the k best distances of each query, their positions in the corpus read in order,
`[blocks, block, k]`, and of each query whether rounding can have hidden a nearer one, `[blocks, block]`.

A step takes a part of each part of the corpus, and for each block of queries:

    scores = one product of matrices                     [block, parts, rows, group]
    maxima = the best of each column over the rows       [block, parts, group]
    the k columns with the best maxima hold the k best: each that is left out is behind k others
    k best of those columns and of the best so far

so that of `rows x group` scores some `group + k rows` are sorted, and nothing is approximate. A part keeps its own k best
to the end: then they are merged, once. How any of this lies on devices is for the planner to say: `parts` and `block`
are dims that it may split, and where it splits `parts`, no device needs another's scores before the merge.

The scores of l2, 2 q.x - |x|^2, lose digits in floats: as many as |q|^2 + |x|^2 has more than |q - x|^2. So each part keeps
some candidates more than k, by the least that each distance can be for all rounding (`rounding`), and computes theirs
again from differences, whose rounding is relative to the distance itself. A vector that was not kept is no nearer than
the last candidate's least distance: where the k-th best is not below that, the query is not certain, and is to be
searched with more candidates, or by the differences of all vectors (`directly`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.vector_search.data.centering import centre_struct, queries_from, vectors_of
from autopar.vector_search.data.metrics import NO_ID, Metric, distances_of, score_dtype, scores, terms, worst_score
from autopar.vector_search.data.placement import CACHED_BYTES
from autopar.vector_search.kernels.tiling import Blocks, Tiling

#: Integers up to this are floats, exactly.
_EXACT_IN_F32 = 2**24

#: A float's rounding, relative.
_UNIT = 2.0**-24

#: Candidates beyond k that are scored again: what they are to make up for is a few scores within rounding of the k-th.
EXTRA = 4

#: Scores and positions, best first: `[..., k]`.
Best = tuple[jax.Array, jax.Array]
#: Vectors, their terms, whether they may be returned, and the position of the first of each row.
_Step = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]


class Corpus(NamedTuple):
    """What an exact search needs of a corpus.

    vectors: `[steps, parts, rows, group, d]`, less the centre. centre: `[d]`, where scores can lose digits without.
    term: `[steps, parts, rows, group]`, as `search_terms`, where the metric has any. may_return: bool, of each place
    whether it holds a vector that may be returned.
    """

    vectors: Any
    centre: Any
    term: Any
    may_return: Any

    @classmethod
    def of(cls, vectors: Any, centre: Any, may_return: Any, metric: Metric) -> Corpus:
        """With its terms."""
        return cls(vectors, centre, search_terms(vectors, metric), may_return)


class Exact(NamedTuple):
    """What a search found, best first.

    distances, positions: `[blocks, block, k]`. is_certain: bool `[blocks, block]`: False where rounding can have hidden a
    vector that is nearer than the last of these; None where scores are as good as distances.
    """

    distances: jax.Array
    positions: jax.Array
    is_certain: jax.Array | None


def exact_search(
    metric: Metric, k: int, *, at_once: bool = False, extra: int = EXTRA, directly: bool = False
) -> Callable[..., Exact]:
    """A search as a step to plan: as `exact_top_k`."""

    def search(queries: jax.Array, corpus: Corpus) -> Exact:
        return exact_top_k(queries, corpus, metric=metric, k=k, at_once=at_once, extra=extra, directly=directly)

    search.__qualname__ = "exact_search"
    return search


def exact_arguments(
    tiling: Tiling, blocks: Blocks, dim: int, dtype: np.dtype[Any], metric: Metric
) -> tuple[jax.ShapeDtypeStruct, Corpus]:
    """The shapes of such a step's arguments: queries, and the corpus."""
    struct = jax.ShapeDtypeStruct
    vectors, may_return = struct((*tiling.shape, dim), dtype), struct(tiling.shape, np.bool_)
    term = jax.eval_shape(partial(search_terms, metric=metric), vectors)
    corpus = Corpus(vectors, centre_struct(dim, dtype, metric), term, may_return)
    return struct((blocks.blocks, blocks.block, dim), dtype), corpus


def is_scored_again(dtype: Any, metric: Metric) -> bool:
    """Whether scores of vectors of a dtype lose digits that distances have: of l2, but not of integers."""
    return metric == "l2" and dtype != jnp.int8


def rounding(dim: int, dtype: Any) -> float:
    """How much, of |q|^2 + 2 |x|^2, a score of l2 can be off at most, added up in any order, and its term with it."""
    steps = (dim + 8) * _UNIT * (1 if dtype == jnp.float32 else 4)  # units that multiply bf16 may drop bits of the sum
    return steps / (1 - min(0.5, steps))


def search_terms(vectors: jax.Array, metric: Metric) -> jax.Array | None:
    """`metrics.terms`; of l2 less than |x|^2 by what rounding may add, so that scores say the least a distance can be."""
    term = terms(vectors, metric)
    if term is None or not is_scored_again(vectors.dtype, metric):
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
    directly: bool = False,
) -> Exact:
    """The k best of a corpus for each query.

    Args:
        queries: `[blocks, block, d]`.
        k: at most as many as there are places.
        at_once: one block's few queries are scored in one step, which copies nothing out of the corpus.
        extra: candidates beyond k that are scored again, where scores lose digits.
        directly: score all by differences: certain, and many times as slow.

    Returns:
        A place that nothing fills has the worst distance and position -1. Of equal distances any may come first.
    """
    blocks, block, dim = queries.shape
    steps, parts, rows, group, _ = corpus.vectors.shape
    again = is_scored_again(corpus.vectors.dtype, metric)
    assert again or not directly, (metric, corpus.vectors.dtype)
    again, at_once = again and not directly, at_once and not directly
    of_part = steps * rows * group
    kept = min(k + extra if again else k, of_part)
    dtype = score_dtype(corpus.vectors.dtype, metric)
    sorted_as = jnp.dtype(jnp.float32) if 3 * 128 * 128 * dim < _EXACT_IN_F32 else dtype
    worst = worst_score(sorted_as)
    places = jnp.arange(steps * parts * rows, dtype=jnp.int32).reshape(steps, parts, rows) * group
    near = queries if directly else queries_from(queries, corpus.centre, metric)

    def scored(queries: jax.Array, some: _Step) -> jax.Array:
        vectors, term, may_return, _ = some
        if directly:
            found = -_squared_distances(queries, vectors, corpus.centre)
        else:
            found = scores(queries, vectors, metric, term).astype(sorted_as)
        return jnp.where(may_return, found, worst)

    def of_block(queries: jax.Array, best: Best, some: _Step) -> Best:
        """The best so far of one block, and of a step."""
        new = _candidates(scored(queries, some), some[-1], kept)
        values, positions = (jnp.concatenate(two, axis=-1) for two in zip(best, new, strict=True))
        return _best(values, positions, kept)

    def of_step(best: Best, some: _Step) -> tuple[Best, None]:
        if blocks > 1:
            return lax.scan(lambda _, one: (None, of_block(*one, some)), None, (near, best))[1], None
        values, positions = of_block(near[0], (best[0][0], best[1][0]), some)
        return (values[None], positions[None]), None

    every: _Step = (corpus.vectors, corpus.term, corpus.may_return, places)
    if at_once:
        found = jnp.moveaxis(scored(near.reshape(-1, dim), every), 1, 2)
        firsts = jnp.moveaxis(places, 0, 1).reshape(parts, -1)
        found = found.reshape(blocks * block, parts, steps * rows, group)
        values, positions = _best(*_candidates(found, firsts, kept), kept)
    else:
        shape = (blocks, block, parts, kept)
        none = (jnp.full(shape, worst, sorted_as), jnp.full(shape, NO_ID, jnp.int32))
        (values, positions), _ = lax.scan(of_step, none, every)
    values, positions = (a.reshape(blocks, block, parts, kept) for a in (values, positions))
    least = None
    if again:
        if kept < of_part:  # no vector of a part that was not kept has a better score than the last that was
            least = jnp.min(_least(values[..., -1], near, worst), axis=-1)
        values, positions = _again(values, positions, queries, corpus, min(k, kept), worst)
    values, positions = (a.reshape(blocks, block, -1) for a in (values, positions))
    if parts > 1:
        values, positions = _best(values, positions, min(k, values.shape[-1]))
    positions = jnp.where(values == worst, NO_ID, positions)
    if sorted_as != dtype:
        values = jnp.where(values == worst, worst_score(dtype), values.astype(dtype))
    if not is_scored_again(corpus.vectors.dtype, metric):
        return Exact(_distances(values, queries, corpus.centre, metric), positions, None)
    is_certain = jnp.ones((blocks, block), bool)
    if least is not None:
        is_certain = _is_certain(-values[..., -1], least, queries, near, corpus.centre)
    return Exact(-values, positions, is_certain)


def _distances(found: jax.Array, queries: jax.Array, centre: jax.Array | None, metric: Metric) -> jax.Array:
    """Of scores that are as good."""
    if metric == "inner_product" and centre is not None:  # q.(x - m) + q.m
        queries = queries.astype(jnp.float32)
        found = found + jnp.sum(queries * centre.astype(jnp.float32), axis=-1, keepdims=True)
    return distances_of(found, queries, metric)


def _squared_distances(queries: jax.Array, vectors: jax.Array, centre: jax.Array) -> jax.Array:
    """f32 `[block, parts, rows, group]`, by differences, from queries that are not centred, `[block, d]`."""
    # the dim that is added along is not the last: of that XLA's CPU backend makes no vector instructions
    there = jnp.swapaxes(vectors_of(vectors, centre), -1, -2)
    return lax.map(lambda q: jnp.sum((q.astype(jnp.float32)[:, None] - there) ** 2, axis=-2), queries)


def _again(
    values: jax.Array, positions: jax.Array, queries: jax.Array, corpus: Corpus, k: int, worst: float | int
) -> Best:
    """The best k of each part's candidates, `[blocks, block, parts, kept]`, by differences: -|q - x|^2, which is larger
    where it is better, and positions."""
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
        found = vectors_of(found.reshape(parts, -1, kept, dim), corpus.centre)
        far = jnp.sum((queries.astype(jnp.float32)[:, None] - found) ** 2, axis=-1)  # [parts, some, kept]
        again = jnp.where(values == worst, worst, -jnp.moveaxis(far, 0, 1))
        return _best(again, positions, k)

    # so many queries at once that what is fetched for them stays in a CPU's caches, without splitting what a device has
    fits = max(1, CACHED_BYTES // (kept * dim * 4))
    turns = next(num for num in range(1, block + 1) if block % num == 0 and block // num <= fits * parts)

    def taken(array: jax.Array) -> jax.Array:
        """`[blocks, block, ...]` as `[blocks * turns, block / turns, ...]`."""
        rest = array.shape[2:]
        return jnp.moveaxis(array.reshape(blocks, block // turns, turns, *rest), 2, 1).reshape(
            -1, block // turns, *rest
        )

    each = (taken(queries), taken(values), taken(positions))
    if blocks * turns == 1:
        best = of_some((each[0][0], each[1][0], each[2][0]))
        return best[0][None], best[1][None]
    made = (a.reshape(blocks, turns, block // turns, parts, k) for a in lax.map(of_some, each))
    values, positions = (jnp.moveaxis(a, 1, 2).reshape(blocks, block, parts, k) for a in made)
    return values, positions


def _least(score: jax.Array, near: jax.Array, worst: float | int) -> jax.Array:
    """The least squared distance, from centred queries, of what is not better than a score, `[blocks, block, parts]`;
    infinite where there is nothing else."""
    near = near.astype(jnp.float32)
    squares = jnp.sum(near * near, axis=-1) * (1 - 3 * rounding(near.shape[-1], near.dtype))
    return jnp.where(score == worst, jnp.inf, squares[..., None] - score)


def _is_certain(far: jax.Array, least: jax.Array, queries: jax.Array, near: jax.Array, centre: jax.Array) -> jax.Array:
    """bool `[blocks, block]`: nothing can be nearer than the k-th best.

    Args:
        far: its squared distance, `[blocks, block]`. least: that of anything else, from the centred queries, `near`.
    """
    wide = queries.astype(jnp.float32) - centre.astype(jnp.float32)
    off = jnp.sqrt(jnp.sum((wide - near.astype(jnp.float32)) ** 2, axis=-1)) + 2 * _UNIT * _length(wide)
    away = jnp.maximum(jnp.sqrt(jnp.maximum(least, 0)) - off, 0)
    dim = near.shape[-1]
    return far * (1 + 2 * rounding(dim, jnp.float32)) <= away * away


def _length(vectors: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(vectors * vectors, axis=-1))


def _best(values: jax.Array, positions: jax.Array, k: int) -> Best:
    """Along the last dim."""
    shape = values.shape[:-1]
    rows = [
        size for size in shape if size > 1
    ]  # of a matrix XLA's CPU backend finds the k best; of more dims it sorts all
    values, places = lax.top_k(values.reshape(*rows, values.shape[-1]), k)
    values, places = (a.reshape(*shape, k) for a in (values, places))
    return values, jnp.take_along_axis(positions, places, axis=-1, mode="promise_in_bounds")


def _candidates(found: jax.Array, firsts: jax.Array, k: int) -> Best:
    """Scores and positions among which are the best k of each part, in no order: `[block, parts, ...]`.

    Args:
        found: all scores, `[block, parts, rows, group]`. firsts: position of the first of each row, `[parts, rows]`.
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
    """`[block, parts, rows, group]` to `[block, parts, group]`, by halves, which may share a row: XLA's CPU backend
    makes vector instructions of that, and not of a reduction that it has fused with what makes its operand."""
    while found.shape[2] > 1:
        half = -(-found.shape[2] // 2)
        found = jnp.maximum(found[:, :, :half], found[:, :, -half:])
    return found[:, :, 0]
