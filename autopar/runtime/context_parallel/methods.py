"""Run attention by a method of context parallelism, on one device's part of the tokens.

In: inside `jax.shard_map`, [batch, tokens, heads, dim] with the tokens sharded contiguously over mesh axes.
Out: the output with the same sharding and the log-sum-exp [batch, heads, tokens], or the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from autopar.cost.context_parallel import AttentionShape, refusal
from autopar.errors import AttentionError
from autopar.runtime.context_parallel import gathered, ring, ulysses
from autopar.runtime.context_parallel.blocks import Attention, Gradients, Keys, Output, Queries
from autopar.runtime.context_parallel.kernels import Kernel
from autopar.runtime.manual.part import num_parts


class Method(NamedTuple):
    """The functions of a method, for arrays with their tokens in dim 1."""

    forward: Callable[[Attention, Queries, Keys, tuple[str, ...]], Output]
    backward: Callable[[Attention, Queries, Keys, tuple[str, ...]], Gradients]


#: The methods of `cost.context_parallel`. Read-only.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "ring": Method(ring.forward, ring.backward),
        "ulysses": Method(ulysses.forward, ulysses.backward),
        "gathered": Method(gathered.forward, gathered.backward),
    }
)


def forward(
    method: str,
    kernel: Kernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axes: tuple[str, ...],
    scale: float,
    is_causal: bool,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The output and the float32 log-sum-exp of softmax(scale * QK^T) V.

    Args:
        axes: the mesh axes that shard the tokens of all operands.
        segments: segment ids [batch, tokens] of the local queries and keys: a query sees the keys of its segment only.

    Raises:
        AttentionError: the method cannot shard these shapes, or the kernel takes no segment ids.
    """
    given = segments or (None, None)
    queries, keys = Queries(query, given[0]), Keys(key, value, given[1])
    _check(method, queries, keys, axes, is_causal=is_causal)
    out, lse = METHODS[method].forward(Attention(kernel, scale, is_causal), queries, keys, axes)
    return out, jnp.swapaxes(lse, 1, 2)


def backward(
    method: str,
    kernel: Kernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    axes: tuple[str, ...],
    scale: float,
    is_causal: bool,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, from the results of `forward` and the gradient of the output."""
    given = segments or (None, None)
    queries = Queries(query, given[0], out, jnp.swapaxes(lse, 1, 2), d_out)
    keys = Keys(key, value, given[1])
    _check(method, queries, keys, axes, is_causal=is_causal)
    gradients = METHODS[method].backward(Attention(kernel, scale, is_causal), queries, keys, axes)
    return gradients.query, gradients.key, gradients.value


def _check(method: str, queries: Queries, keys: Keys, axes: tuple[str, ...], *, is_causal: bool) -> None:
    num_devices = num_parts(axes)
    batch, num_queries, num_heads, head_dim = queries.query.shape
    whole = AttentionShape(
        batch=batch,
        num_queries=num_devices * num_queries,
        num_keys=num_devices * keys.key.shape[1],
        num_heads=num_heads,
        num_key_heads=keys.key.shape[2],
        head_dim=head_dim,
        value_dim=keys.value.shape[3],
        itemsize=queries.query.dtype.itemsize,
    )
    if reason := refusal(method, whole, num_devices, is_causal=is_causal):
        raise AttentionError(reason)
