"""Compute attention block by block over the keys in plain JAX, for platforms without a fused kernel.

In: one device's queries, keys and values. Out: the output and the log-sum-exp of each query's scores, or the gradients.
At most one block of scores per query is in memory. Sums are in float32 (float64 for float64 operands). A query that sees
no key has output 0 and log-sum-exp -inf.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

#: The keys of a block.
_BLOCK = 512

#: Segment ids of queries and keys, [batch, tokens] each: a query sees the keys of its own segment only.
Segments = tuple[jax.Array, jax.Array]


def forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    is_causal: bool,
    segments: Segments | None = None,
    block: int = _BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """Output [batch, tokens, heads, dim] and log-sum-exp [batch, heads, tokens] of softmax(scale * QK^T) V."""
    queries = _grouped(query, key)
    batch, num_queries, num_groups, per_group, _ = queries.shape
    rows = (batch, num_groups, per_group, num_queries)
    dtype = _sum_dtype(query)

    def step(carry: Any, keys: Any) -> tuple[Any, None]:
        out, highest, total = carry
        scores, is_seen = _scores(queries, keys, scale, is_causal, segments)
        higher = jnp.maximum(highest, jnp.max(scores, axis=-1))
        shift = jnp.where(jnp.isneginf(higher), 0, higher)
        weights = jnp.where(is_seen, jnp.exp(scores - shift[..., None]), 0)
        rescale = jnp.exp(highest - shift)
        values = jnp.einsum("bgrts,bsgh->bgrth", weights.astype(value.dtype), keys[1], preferred_element_type=dtype)
        return (out * rescale[..., None] + values, higher, total * rescale + jnp.sum(weights, axis=-1)), None

    start = (jnp.zeros((*rows, value.shape[-1]), dtype), jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype))
    (out, highest, total), _ = lax.scan(step, start, _blocks(key, value, segments, block))
    out = out / jnp.where(total == 0, 1, total)[..., None]
    lse = jnp.where(total == 0, -jnp.inf, highest + jnp.log(jnp.where(total == 0, 1, total)))
    return _ungrouped(out).astype(query.dtype), lse.reshape(batch, num_groups * per_group, num_queries)


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    scale: float,
    is_causal: bool,
    segments: Segments | None = None,
    block: int = _BLOCK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The terms of the gradients from these keys. `out` and `lse` may be those over more keys."""
    queries, d_outs = _grouped(query, key), _grouped(d_out, key)
    dtype = _sum_dtype(query)
    rows = queries.shape[:1] + queries.shape[2:4] + queries.shape[1:2]
    inner = jnp.sum(_grouped(out, key).astype(dtype) * d_outs.astype(dtype), axis=-1)
    inner = jnp.moveaxis(inner, 1, -1)[..., None]
    shift = jnp.where(jnp.isneginf(lse), 0, lse).reshape(rows)[..., None]

    def step(d_query: Any, keys: Any) -> tuple[Any, Any]:
        scores, is_seen = _scores(queries, keys, scale, is_causal, segments)
        weights = jnp.where(is_seen, jnp.exp(scores - shift), 0)
        d_weights = jnp.einsum("btgrh,bsgh->bgrts", d_outs, keys[1], preferred_element_type=dtype)
        d_scores = (weights * (d_weights - inner) * scale).astype(query.dtype)
        d_query += jnp.einsum("bgrts,bsgh->bgrth", d_scores, keys[0], preferred_element_type=dtype)
        d_key = jnp.einsum("bgrts,btgrh->bsgh", d_scores, queries, preferred_element_type=dtype)
        weights = weights.astype(query.dtype)
        d_value = jnp.einsum("bgrts,btgrh->bsgh", weights, d_outs, preferred_element_type=dtype)
        return d_query, (d_key.astype(key.dtype), d_value.astype(value.dtype))

    start = jnp.zeros((*rows, query.shape[-1]), dtype)
    d_query, gradients = lax.scan(step, start, _blocks(key, value, segments, block))
    d_key, d_value = (
        jnp.moveaxis(one, 0, 1).reshape(one.shape[1], -1, *one.shape[3:])[:, : key.shape[1]] for one in gradients
    )
    return _ungrouped(d_query).astype(query.dtype), d_key, d_value


def _sum_dtype(x: jax.Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _grouped(x: jax.Array, key: jax.Array) -> jax.Array:
    """[batch, tokens, heads, dim] with the heads as [key heads, heads per key head]."""
    return x.reshape(*x.shape[:2], key.shape[2], -1, x.shape[-1])


def _ungrouped(x: jax.Array) -> jax.Array:
    """[batch, key heads, heads per key head, tokens, dim] as [batch, tokens, heads, dim]."""
    return jnp.moveaxis(x, 3, 1).reshape(x.shape[0], x.shape[3], -1, x.shape[-1])


def _blocks(key: jax.Array, value: jax.Array, segments: Segments | None, block: int) -> Any:
    """Keys, values, positions and segment ids, with the blocks as first dim. Padding at the end has position -1."""
    size = min(block, key.shape[1])
    num_blocks = -(-key.shape[1] // size)

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, num_blocks * size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(x.shape[0], num_blocks, size, *x.shape[2:]), 1, 0)

    positions = jnp.arange(num_blocks * size, dtype=jnp.int32)
    positions = jnp.where(positions < key.shape[1], positions, -1).reshape(num_blocks, size)
    return blocks(key), blocks(value), positions, None if segments is None else blocks(segments[1])


def _scores(
    queries: jax.Array, keys: Any, scale: float, is_causal: bool, segments: Segments | None
) -> tuple[jax.Array, jax.Array]:
    """Scores of one block of keys, -inf where a query does not see a key, and where it does."""
    key, _, positions, ids = keys
    scores = scale * jnp.einsum("btgrh,bsgh->bgrts", queries, key, preferred_element_type=_sum_dtype(key))
    is_seen = positions >= 0
    if is_causal:
        is_seen &= positions <= jnp.arange(queries.shape[1], dtype=jnp.int32)[:, None]
    if segments is not None:
        is_seen = is_seen & (segments[0][:, :, None] == ids[:, None, :])[:, None, None]
    return jnp.where(is_seen, scores, -jnp.inf), is_seen
