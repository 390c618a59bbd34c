"""How like two vectors are: scores to search by, and distances as a user sees them.

In: queries and vectors, `[.., d]`, of f32, bf16 or int8. Out: scores, of which larger is better, so that one
program serves every metric; and from them the distances: of `l2` squared, smaller is better; of `inner_product` and
`cosine` the similarity itself. Missing results have id -1 and score -inf (of integers the smallest there is).

    l2              2 q.x - |x|^2        squared distance |q|^2 - score
    inner_product   q.x                  q.x
    cosine          q.x / |x|            q.x / (|q| |x|)

What depends on the vectors alone, `|x|^2` or `1/|x|`, is their *term*: made once, when an index is built.

int8 is exact: products are added as 32-bit integers, as which l2's scores and distances stay. bf16 is added as f32, and
f32 is multiplied as such, also where a device would round it to fewer bits.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

Metric = Literal["l2", "inner_product", "cosine"]
METRICS: tuple[Metric, ...] = get_args(Metric)

#: Of a place in a result that nothing fills.
NO_ID = -1

#: Up to so many, the vectors come first in a product.
FEW_QUERIES = 4

#: Elements that a vector of int8 may have at most: |2 q.x - |x|^2| stays within 32 bits.
MAX_INT8_DIM = (2**31 - 1) // (3 * 128 * 128)


def score_dtype(vectors: jnp.dtype, metric: Metric) -> jnp.dtype:
    """Of scores and distances of vectors of a dtype: int32 of int8, except of cosine; else f32."""
    is_exact = vectors == jnp.int8 and metric != "cosine"
    return jnp.dtype(jnp.int32 if is_exact else jnp.float32)


def worst_score(dtype: jnp.dtype) -> float | int:
    """What no score is below."""
    return int(jnp.iinfo(dtype).min) if jnp.issubdtype(dtype, jnp.integer) else -math.inf


def terms(vectors: jax.Array, metric: Metric) -> jax.Array | None:
    """What a score needs of each vector, `[..., d]`, beside its product with the query, `[...]`; None of `inner_product`.

    The cosine of a vector of zeros is 0.
    """
    if metric == "inner_product":
        return None
    squares = _squares(vectors)
    if metric == "l2":
        return squares
    length = jnp.sqrt(squares.astype(jnp.float32))
    return jnp.where(length > 0, 1 / jnp.where(length > 0, length, 1), 0)


def scores(queries: jax.Array, vectors: jax.Array, metric: Metric, term: jax.Array | None = None) -> jax.Array:
    """Of each query and vector, larger is better.

    Args:
        queries: `[num_queries, d]`. vectors: `[..., d]`, of the same dtype.
        term: `terms(vectors, metric)`, `[...]`, where it is known.

    Returns:
        `[num_queries, ...]`, of `score_dtype`.
    """
    term = terms(vectors, metric) if term is None else term
    if term is None:
        return products(queries, vectors)
    if metric == "cosine":
        return products(queries, vectors).astype(jnp.float32) * term
    if queries.dtype == jnp.int8:
        return 2 * products(queries, vectors) - term
    return products(2 * queries, vectors) - term  # doubled exactly, and before there are many


def products(queries: jax.Array, vectors: jax.Array) -> jax.Array:
    """`[num_queries, ...]`: q.x, of int8 exact in int32."""
    kind = {
        "precision": lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None,
        "preferred_element_type": jnp.int32 if queries.dtype == jnp.int8 else jnp.float32,
    }
    *shape, dim = vectors.shape
    if len(queries) <= FEW_QUERIES:  # XLA's CPU backend is 15 times slower at so few rows from the left
        found = lax.dot_general(vectors, queries, (((len(shape),), (1,)), ((), ())), **kind)
        return jnp.moveaxis(found, -1, 0)
    # as a matrix: a product with more dims begins by copying them, transposed
    found = lax.dot_general(queries, vectors.reshape(-1, dim), (((1,), (1,)), ((), ())), **kind)
    return found.reshape(len(queries), *shape)


def distances_of(found: jax.Array, queries: jax.Array, metric: Metric) -> jax.Array:
    """Scores as a user sees them.

    Args:
        found: `[..., k]`, of `queries`, `[..., d]`.

    Returns:
        of l2 the squared distance; else the similarity. What is missing stays the worst there is: of l2 the largest.
    """
    if metric == "inner_product":
        return found
    squares = _squares(queries)[..., None]
    if metric == "cosine":
        length = jnp.sqrt(squares.astype(jnp.float32))
        return jnp.where(length > 0, found / jnp.where(length > 0, length, 1), jnp.where(jnp.isneginf(found), found, 0))
    missing = found == worst_score(found.dtype)
    distances = jnp.maximum(squares - jnp.where(missing, 0, found), 0)  # by rounding it might be below
    return jnp.where(missing, worst_distance(found.dtype, metric), distances)


def worst_distance(dtype: jnp.dtype, metric: Metric) -> float | int:
    """Of a place in a result that nothing fills."""
    if metric != "l2":
        return worst_score(dtype)
    return int(jnp.iinfo(dtype).max) if jnp.issubdtype(dtype, jnp.integer) else math.inf


def _squares(vectors: jax.Array) -> jax.Array:
    """`[...]`: |x|^2."""
    wide = vectors.astype(jnp.int32 if vectors.dtype == jnp.int8 else jnp.float32)
    return jnp.sum(wide * wide, axis=-1)
