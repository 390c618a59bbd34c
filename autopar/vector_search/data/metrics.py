"""Score vectors against queries, and convert scores to user-facing distances, for each metric.

In: queries and vectors, `[.., d]`, of f32, bf16, f16, int8 or uint8. Out: scores, larger is better, so that one program serves
every metric; and distances: squared distances for `l2`, smaller is better; similarities for `inner_product` and
`cosine`. A missing result has id -1 and score -inf (for integers the minimum).

    l2              2 q.x - |x|^2        squared distance |q|^2 - score
    inner_product   q.x                  q.x
    cosine          q.x / |x|            q.x / (|q| |x|)

`|x|^2` or `1/|x|` depends on the vector only. It is called the vector's *term* and is computed once, at build time.

int8 and uint8 are exact: products accumulate in int32, which is also the dtype of the scores and distances of l2. bf16
and f16 accumulate in f32. f32 products use full precision, also on devices whose default is lower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Metric = Literal["l2", "inner_product", "cosine"]
METRICS: tuple[Metric, ...] = get_args(Metric)

#: The id and position of a missing result.
NO_ID = -1

#: With at most this many queries, the vectors are the left operand of the matmul.
FEW_QUERIES = 4

#: f32 has all integers below.
_EXACT_IN_F32 = 2**24

#: Bound of |2 q.x - |x|^2|, and of what it is computed from, per element of integer vectors. Read-only.
_LARGEST_SCORES: Mapping[str, int] = MappingProxyType({"int8": 3 * 128 * 128, "uint8": 2 * 255 * 255})


def is_integer(dtype: Any) -> bool:
    """Whether scores of vectors of this dtype are computed in int32, and so are exact."""
    return np.dtype(dtype).name in _LARGEST_SCORES


def largest_score(dtype: Any, dim: int) -> int:
    """Bound of the scores of integer vectors `[.., d]`."""
    return _LARGEST_SCORES[np.dtype(dtype).name] * dim


def max_dim(dtype: Any) -> int:
    """Maximum d of integer vectors, whose scores have to fit in int32."""
    return (2**31 - 1) // largest_score(dtype, 1)


def score_dtype(vectors: jnp.dtype, metric: Metric) -> jnp.dtype:
    """The dtype of scores and distances: int32 for integer vectors, except cosine; f32 otherwise."""
    is_exact = is_integer(vectors) and metric != "cosine"
    return jnp.dtype(jnp.int32 if is_exact else jnp.float32)


def sorted_dtype(vectors: Any, metric: Metric, dim: int) -> jnp.dtype:
    """The dtype that scores of vectors `[.., d]` are sorted in: f32 if it has all of them exactly, as XLA sorts it ten
    times as fast as int32."""
    made = score_dtype(vectors, metric)
    is_small = made == jnp.int32 and largest_score(vectors, dim) < _EXACT_IN_F32
    return jnp.dtype(jnp.float32) if is_small else made


def worst_score(dtype: jnp.dtype) -> float | int:
    """The lower bound of all scores."""
    return int(jnp.iinfo(dtype).min) if jnp.issubdtype(dtype, jnp.integer) else -math.inf


def terms(vectors: jax.Array, metric: Metric) -> jax.Array | None:
    """The terms, `[...]`, of vectors `[..., d]`; None for `inner_product`. A zero vector has cosine 0."""
    if metric == "inner_product":
        return None
    squares = _squares(vectors)
    if metric == "l2":
        return squares
    length = jnp.sqrt(squares.astype(jnp.float32))
    return jnp.where(length > 0, 1 / jnp.where(length > 0, length, 1), 0)


def scores(queries: jax.Array, vectors: jax.Array, metric: Metric, term: jax.Array | None = None) -> jax.Array:
    """Score every query against every vector; larger is better.

    Args:
        queries: `[num_queries, d]`.
        vectors: `[..., d]`, of the same dtype.
        term: `terms(vectors, metric)`, `[...]`; computed if None.

    Returns:
        `[num_queries, ...]`, of `score_dtype`.
    """
    term = terms(vectors, metric) if term is None else term
    if term is None:
        return inner_products(queries, vectors)
    if metric == "cosine":
        return inner_products(queries, vectors).astype(jnp.float32) * term
    if is_integer(queries.dtype):
        return 2 * inner_products(queries, vectors) - term
    # doubling is exact, and cheaper on the queries than on the scores
    return inner_products(2 * queries, vectors) - term


def inner_products(queries: jax.Array, vectors: jax.Array) -> jax.Array:
    """The inner products q.x, `[num_queries, ...]`; exact in int32 for int8 and uint8."""
    if queries.dtype == jnp.uint8:  # JAX accumulates unsigned numbers in unsigned ones only; these fit in int32
        return _products(queries, vectors, jnp.uint32).astype(jnp.int32)
    return _products(queries, vectors, jnp.int32 if queries.dtype == jnp.int8 else jnp.float32)


def _products(queries: jax.Array, vectors: jax.Array, made: Any) -> jax.Array:
    kind = {
        "precision": lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None,
        "preferred_element_type": made,
    }
    *shape, dim = vectors.shape
    if len(queries) <= FEW_QUERIES:  # XLA's CPU backend is 15 times slower with so few rows on the left
        found = lax.dot_general(vectors, queries, (((len(shape),), (1,)), ((), ())), **kind)
        return jnp.moveaxis(found, -1, 0)
    # flattened to a matrix: XLA transposes and copies operands with more dims first
    found = lax.dot_general(queries, vectors.reshape(-1, dim), (((1,), (1,)), ((), ())), **kind)
    return found.reshape(len(queries), *shape)


def distances_of(found: jax.Array, queries: jax.Array, metric: Metric) -> jax.Array:
    """Convert scores to user-facing distances.

    Args:
        found: scores, `[..., k]`, of `queries`, `[..., d]`.

    Returns:
        Squared distances for l2; similarities otherwise. A missing result keeps the worst value; for l2 the largest.
    """
    if metric == "inner_product":
        return found
    squares = _squares(queries)[..., None]
    if metric == "cosine":
        length = jnp.sqrt(squares.astype(jnp.float32))
        return jnp.where(length > 0, found / jnp.where(length > 0, length, 1), jnp.where(jnp.isneginf(found), found, 0))
    missing = found == worst_score(found.dtype)
    distances = jnp.maximum(squares - jnp.where(missing, 0, found), 0)  # rounding can make it negative
    return jnp.where(missing, worst_distance(found.dtype, metric), distances)


def worst_distance(dtype: jnp.dtype, metric: Metric) -> float | int:
    """The distance of a missing result."""
    if metric != "l2":
        return worst_score(dtype)
    return int(jnp.iinfo(dtype).max) if jnp.issubdtype(dtype, jnp.integer) else math.inf


def _squares(vectors: jax.Array) -> jax.Array:
    """|x|^2, `[...]`."""
    wide = vectors.astype(jnp.int32 if is_integer(vectors.dtype) else jnp.float32)
    return jnp.sum(wide * wide, axis=-1)
