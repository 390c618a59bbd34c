"""All-gather keys and values, and attend to them with the device's own queries.

In: inside `jax.shard_map`, one device's part of queries, keys and values, and the mesh axes that shard the tokens.
Out: its part of the output and the log-sum-exp, or of the gradients.

Without a causal mask this is one kernel call. With one, the queries are in zigzag order, and the kernel runs on the same
pairs of chunks as in a ring, so each device does the same work. The gradients of keys and values are reduce-scattered.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.context_parallel.blocks import Attention, Gradients, Keys, Output, Queries
from autopar.runtime.context_parallel.zigzag import from_zigzag, to_zigzag
from autopar.runtime.manual.part import num_parts, position


def forward(attention: Attention, queries: Queries, keys: Keys, axes: tuple[str, ...]) -> Output:
    """Attention of the device's queries to all keys."""
    if not attention.is_causal:
        return attention.own(queries, _all_tokens(keys, axes)).rounded(queries)
    queries, chunks = to_zigzag(queries, axes), _all_chunks(keys, axes)
    here, num_devices = position(axes), num_parts(axes)

    def step(so_far: Output, index: Any) -> tuple[Output, None]:
        block = _block(chunks, (here - index) % num_devices)
        return attention.add(so_far, queries, block, here >= index), None

    out, _ = lax.scan(step, attention.own(queries, _block(chunks, here)), _others(num_devices))
    return from_zigzag(out.rounded(queries), axes)


def backward(attention: Attention, queries: Queries, keys: Keys, axes: tuple[str, ...]) -> Gradients:
    """The gradients of the device's queries, keys and values."""
    if not attention.is_causal:
        gradients = attention.own_gradients(queries, _all_tokens(keys, axes)).rounded(queries)
        d_key, d_value = (
            lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True) for x in (gradients.key, gradients.value)
        )
        return gradients._replace(key=d_key, value=d_value)
    queries, chunks = to_zigzag(queries, axes), _all_chunks(keys, axes)
    here, num_devices = position(axes), num_parts(axes)

    def step(so_far: Any, index: Any) -> tuple[Any, None]:
        source, (d_query, d_chunks) = (here - index) % num_devices, so_far
        terms = attention.gradients(queries, _block(chunks, source), here >= index)
        return (d_query + terms.query, _placed(d_chunks, (terms.key, terms.value), source)), None

    own = attention.own_gradients(queries, _block(chunks, here))
    d_chunks = _placed(jax.tree.map(jnp.zeros_like, (chunks.key, chunks.value)), (own.key, own.value), here)
    (d_query, d_chunks), _ = lax.scan(step, (own.query, d_chunks), _others(num_devices))
    d_key, d_value = (_tokens(lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)) for x in d_chunks)
    gradients = own._replace(query=d_query).rounded(queries)
    return Gradients(from_zigzag(gradients.query, axes), d_key, d_value)


def _others(num_devices: int) -> jax.Array:
    return jnp.arange(1, num_devices, dtype=jnp.int32)


def _all_tokens(keys: Keys, axes: tuple[str, ...]) -> Keys:
    return jax.tree.map(lambda x: lax.all_gather(x, axes, axis=1, tiled=True), keys)


def _all_chunks(keys: Keys, axes: tuple[str, ...]) -> Keys:
    """Two chunks of each device's tokens, in the order of the sequence, as a new first dim."""

    def gathered(x: jax.Array) -> jax.Array:
        return lax.all_gather(jnp.stack(jnp.split(x, 2, 1)), axes, axis=0, tiled=True)

    return jax.tree.map(gathered, keys)


def _tokens(chunks: jax.Array) -> jax.Array:
    """Two chunks, one after the other."""
    return jnp.concatenate(list(chunks), 1)


def _block(chunks: Keys, device: Any) -> Keys:
    """The keys of a device in zigzag order."""

    def taken(x: jax.Array) -> jax.Array:
        places = (device, x.shape[0] - 1 - device)
        return jnp.concatenate([lax.dynamic_index_in_dim(x, place, keepdims=False) for place in places], 1)

    return jax.tree.map(taken, chunks)


def _placed(chunks: Any, terms: Any, device: Any) -> Any:
    """Chunks, with those of a device replaced by a block in zigzag order."""

    def placed(x: jax.Array, block: jax.Array) -> jax.Array:
        low, high = jnp.split(block, 2, 1)
        x = lax.dynamic_update_index_in_dim(x, low, device, 0)
        return lax.dynamic_update_index_in_dim(x, high, x.shape[0] - 1 - device, 0)

    return jax.tree.map(placed, chunks, terms)
