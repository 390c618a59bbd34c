"""Exact search as one program: every vector is scored, in steps, and the k best so far are carried on.

In: queries `[blocks, block, d]`; the corpus as `[steps, parts, rows, group, d]`, with what its scores need and which of
its places may be returned. Out: the k best distances of each query and their positions in the corpus read in order,
`[blocks, block, k]`.

A step takes a part of each part of the corpus, and for each block of queries:

    scores = one product of matrices                     [block, parts, rows, group]
    maxima = the best of each column over the rows       [block, parts, group]
    the k columns with the best maxima hold the k best: each that is left out is behind k others
    k best of those columns and of the best so far

so that of `rows x group` scores some `group + k rows` are sorted, and nothing is approximate. A part keeps its own k best
to the end: then they are merged, once. How any of this lies on devices is for the planner to say: `parts` and `block`
are dims that it may split, and where it splits `parts`, no device needs another's scores before the merge.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.vector_search.metrics import NO_ID, Metric, distances_of, score_dtype, scores, terms, worst_score
from autopar.vector_search.tiling import Blocks, Tiling

#: Integers up to this are floats, exactly.
_EXACT_IN_F32 = 2**24

#: Scores and positions, best first: `[..., k]`.
Best = tuple[jax.Array, jax.Array]
#: Vectors, their terms, whether they may be returned, and the position of the first of each row.
Corpus = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]


def exact_search(metric: Metric, k: int, *, at_once: bool = False) -> Callable[..., Best]:
    """A search as a step to plan: as `exact_top_k`, with distances in place of scores."""

    def search(queries: jax.Array, vectors: jax.Array, term: jax.Array | None, may_return: jax.Array) -> Best:
        found, positions = exact_top_k(queries, vectors, term, may_return, metric=metric, k=k, at_once=at_once)
        return distances_of(found, queries, metric), positions

    search.__qualname__ = "exact_search"
    return search


def exact_arguments(
    tiling: Tiling, blocks: Blocks, dim: int, dtype: np.dtype[Any], metric: Metric
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes of such a step's arguments: queries, vectors, their terms, which may be returned."""
    struct = jax.ShapeDtypeStruct
    vectors = struct((*tiling.shape, dim), dtype)
    return (
        struct((blocks.blocks, blocks.block, dim), dtype),
        vectors,
        jax.eval_shape(partial(terms, metric=metric), vectors),
        struct(tiling.shape, np.bool_),
    )


def exact_top_k(
    queries: jax.Array,
    vectors: jax.Array,
    term: jax.Array | None,
    may_return: jax.Array,
    *,
    metric: Metric,
    k: int,
    at_once: bool = False,
) -> Best:
    """The k best of a corpus for each query.

    Args:
        queries: `[blocks, block, d]`. vectors: `[steps, parts, rows, group, d]`.
        term: `metrics.terms` of them, `[steps, parts, rows, group]`, where the metric has any.
        may_return: of each place whether it holds a vector that may be returned, `[steps, parts, rows, group]`.
        k: at most as many as there are places.
        at_once: one block's few queries are scored in one step, which copies nothing out of the corpus.

    Returns:
        scores, best first, and positions, int32: `[blocks, block, k]`. A place that nothing fills has the worst score
        and position -1. Of equal scores any may come first.
    """
    blocks, block, dim = queries.shape
    steps, parts, rows, group, _ = vectors.shape
    kept = min(k, steps * rows * group)  # of a part
    dtype = score_dtype(vectors.dtype, metric)
    sorted_as = jnp.dtype(jnp.float32) if 3 * 128 * 128 * dim < _EXACT_IN_F32 else dtype
    worst = worst_score(sorted_as)
    places = jnp.arange(steps * parts * rows, dtype=jnp.int32).reshape(steps, parts, rows) * group
    corpus = (vectors, term, may_return, places)

    def scored(queries: jax.Array, some: Corpus) -> jax.Array:
        vectors, term, may_return, _ = some
        found = scores(queries, vectors, metric, term).astype(sorted_as)
        return jnp.where(may_return, found, worst)

    def of_block(queries: jax.Array, best: Best, some: Corpus) -> Best:
        """The best so far of one block, and of a step."""
        new = _candidates(scored(queries, some), some[-1], kept)
        values, positions = (jnp.concatenate(two, axis=-1) for two in zip(best, new, strict=True))
        return _best(values, positions, kept)

    def of_step(best: Best, some: Corpus) -> tuple[Best, None]:
        if blocks > 1:
            return lax.scan(lambda _, one: (None, of_block(*one, some)), None, (queries, best))[1], None
        values, positions = of_block(queries[0], (best[0][0], best[1][0]), some)
        return (values[None], positions[None]), None

    if at_once:
        found = jnp.moveaxis(scored(queries.reshape(-1, dim), corpus), 1, 2)
        firsts = jnp.moveaxis(places, 0, 1).reshape(parts, -1)
        found = found.reshape(blocks * block, parts, steps * rows, group)
        values, positions = _best(*_candidates(found, firsts, kept), kept)
    else:
        shape = (blocks, block, parts, kept)
        none = (jnp.full(shape, worst, sorted_as), jnp.full(shape, NO_ID, jnp.int32))
        (values, positions), _ = lax.scan(of_step, none, corpus)
    values, positions = (a.reshape(blocks, block, parts * kept) for a in (values, positions))
    if parts > 1:
        values, positions = _best(values, positions, min(k, parts * kept))
    positions = jnp.where(values == worst, NO_ID, positions)
    if sorted_as != dtype:
        values = jnp.where(values == worst, worst_score(dtype), values.astype(dtype))
    return values, positions


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
