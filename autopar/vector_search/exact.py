"""Exact search as one program: every vector is scored, in steps, and the k best so far are carried on.

In: queries `[blocks, block, d]`; the corpus as `[rows, parts, group, d]`, with what its scores need and which of its
places may be returned. Out: the k best scores of each query and their positions in the corpus read in order,
`[blocks, block, k]`.

A step takes some rows of the corpus, and for each block of queries:

    scores = one product of matrices                     [block, step_rows, parts, group]
    maxima = the best of each column over the rows       [block, parts, group]
    the k columns with the best maxima hold the k best, for each that is left out is behind k others
    k best of those columns, then of these and the best so far

so that what is sorted is some `group + k step_rows` scores instead of `group x step_rows`; nothing is approximate. A part keeps its own k best to the end: then they
are merged, once. How any of this lies on devices is for the planner to say: `parts` and `block` are dims that it may
split, and a part split off, no device needs another's scores before the merge.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.metrics import NO_ID, Metric, distances_of, score_dtype, scores, worst_score

#: Integers up to this are floats, exactly.
_EXACT_IN_F32 = 2**24

#: Scores and positions, best first: `[..., k]`.
Best = tuple[jax.Array, jax.Array]
#: Vectors, their terms, whether they may be returned, and the position of the first.
Rows = tuple[jax.Array, jax.Array | None, jax.Array, jax.Array]


def exact_search(metric: Metric, k: int, step_rows: int) -> Callable[..., Best]:
    """A search as a step to plan: as `exact_top_k`, with distances in place of scores."""

    def search(queries: jax.Array, vectors: jax.Array, term: jax.Array | None, may_return: jax.Array) -> Best:
        found, positions = exact_top_k(queries, vectors, term, may_return, metric=metric, k=k, step_rows=step_rows)
        return distances_of(found, queries, metric), positions

    search.__qualname__ = "exact_search"
    return search


def exact_top_k(
    queries: jax.Array,
    vectors: jax.Array,
    term: jax.Array | None,
    may_return: jax.Array,
    *,
    metric: Metric,
    k: int,
    step_rows: int,
) -> tuple[jax.Array, jax.Array]:
    """The k best of a corpus for each query.

    Args:
        queries: `[blocks, block, d]`. vectors: `[rows, parts, group, d]`.
        term: `metrics.terms` of them, `[rows, parts, group]`, where the metric has any.
        may_return: of each place whether it holds a vector that may be returned, `[rows, parts, group]`.
        k: at most as many as there are places.
        step_rows: divides the rows.

    Returns:
        scores, best first, and positions, int32: `[blocks, block, k]`. A place that nothing fills has the worst score
        and position -1. Of equal scores any may come first.
    """
    blocks, block, dim = queries.shape
    rows, parts, group, _ = vectors.shape
    kept = min(k, rows * group)  # of a part
    dtype = score_dtype(vectors.dtype, metric)
    sorted_as = jnp.dtype(jnp.float32) if 3 * 128 * 128 * dim < _EXACT_IN_F32 else dtype
    worst = worst_score(sorted_as)

    def in_rows(queries: jax.Array, best: Best | None, some: Rows) -> Best:
        """The best so far of one block, and of some rows."""
        vectors, term, may_return, start = some
        found = scores(queries, vectors, metric, term).astype(sorted_as)
        found = jnp.where(may_return, found, worst)
        new = _best_of_rows(found, start, kept)
        if best is None:
            return new
        values, positions = (jnp.concatenate(two, axis=-1) for two in zip(best, new, strict=True))
        return _best(values, positions, kept)

    def of_blocks(best: Best | None, some: Rows) -> Best:
        if blocks > 1:
            return lax.scan(lambda _, one: (None, in_rows(*one, some)), None, (queries, best))[1]
        one = None if best is None else (best[0][0], best[1][0])
        values, positions = in_rows(queries[0], one, some)
        return values[None], positions[None]

    if step_rows == rows:
        values, positions = of_blocks(None, (vectors, term, may_return, jnp.int32(0)))
    else:
        steps = rows // step_rows
        each = jax.tree.map(lambda a: a.reshape(steps, step_rows, *a.shape[1:]), (vectors, term, may_return))
        starts = jnp.arange(steps, dtype=jnp.int32) * (step_rows * parts * group)
        shape = (blocks, block, parts, kept)
        none = (jnp.full(shape, worst, sorted_as), jnp.full(shape, NO_ID, jnp.int32))
        (values, positions), _ = lax.scan(lambda best, some: (of_blocks(best, some), None), none, (*each, starts))
    values, positions = (a.reshape(blocks, block, -1) for a in (values, positions))
    if parts > 1:
        values, positions = _best(values, positions, min(k, parts * kept))
    positions = jnp.where(values == worst, NO_ID, positions)
    if sorted_as != dtype:
        values = jnp.where(values == worst, worst_score(dtype), values.astype(dtype))
    return values, positions


def _best(values: jax.Array, positions: jax.Array, k: int) -> Best:
    """Along the last dim."""
    values, places = lax.top_k(values, k)
    return values, jnp.take_along_axis(positions, places, axis=-1)


def _best_of_rows(found: jax.Array, start: jax.Array, k: int) -> Best:
    """The best k of each part.

    Args:
        found: scores, `[block, rows, parts, group]`. start: position of the first.

    Returns:
        `[block, parts, min(k, rows x group)]`.
    """
    block, rows, parts, group = found.shape
    row, part = (jnp.arange(size, dtype=jnp.int32) for size in (rows, parts))
    first = start + (row[:, None] * parts + part)[..., None] * group  # of each row of a part
    if group + k * rows < rows * group:
        _, columns = lax.top_k(_maxima(found), k)
        columns = columns[:, None]
        found = jnp.take_along_axis(found, columns, axis=-1)
    else:
        columns = jnp.arange(group, dtype=jnp.int32)
    positions = jnp.broadcast_to(first + columns, found.shape)
    values, positions = (jnp.moveaxis(a, 1, 2).reshape(block, parts, -1) for a in (found, positions))
    return _best(values, positions, min(k, values.shape[-1]))


def _maxima(found: jax.Array) -> jax.Array:
    """`[block, rows, ...]` to `[block, ...]`, by halves: XLA's CPU backend makes vector instructions of that, and not of
    a reduction that it has fused with what makes its operand."""
    while found.shape[1] % 2 == 0:
        half = found.shape[1] // 2
        found = jnp.maximum(found[:, :half], found[:, half:])
    return found[:, 0] if found.shape[1] == 1 else jnp.max(found, axis=1)
