"""Compute attention while keys and values travel around a ring of devices (Liu, Zaharia, Abbeel 2023).

In: inside `jax.shard_map`, one device's part of queries, keys and values, and the mesh axes that shard the tokens.
Out: its part of the output and the log-sum-exp, or of the gradients.

Each step attends to one block of keys while the next block arrives. In the backward pass the gradients of a block's keys
and values follow the block around the ring; each device adds its term and rounds to the dtype of the keys. A device
attends to its own block last, when the gradients of that block arrive.

XLA's latency-hiding scheduler overlaps one collective at a time with kernels, so a step sends one array of each dtype.
Barriers between steps keep XLA from sending all blocks before the first kernel, and the last gradients after the last
kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.context_parallel.blocks import Attention, Gradients, Keys, Output, Queries
from autopar.runtime.context_parallel.zigzag import from_zigzag, to_zigzag
from autopar.runtime.manual.part import num_parts, position

#: The largest ring whose steps are unrolled. The program of a larger ring is a loop, and does not grow with it.
_MOST_UNROLLED = 8
#: Steps per iteration of the loop: two buffers then take turns, where XLA would copy one in each iteration.
_STEPS_PER_ITERATION = 2


def forward(attention: Attention, queries: Queries, keys: Keys, axes: tuple[str, ...]) -> Output:
    """Attention of the device's queries to all keys."""
    if attention.is_causal:
        queries, keys = to_zigzag((queries, keys), axes)
    here = position(axes)

    def step(so_far: Output, block: Keys, _: Any, index: Any) -> tuple[Output, None]:
        return attention.add(so_far, queries, block, here >= index), None

    out = attention.own(queries, keys)
    if num_parts(axes) > 1:
        out, _ = _around(step, out, _next(keys, axes), None, 1, axes)
    out = out.rounded(queries)
    return from_zigzag(out, axes) if attention.is_causal else out


def backward(attention: Attention, queries: Queries, keys: Keys, axes: tuple[str, ...]) -> Gradients:
    """The gradients of the device's queries, keys and values."""
    if attention.is_causal:
        queries, keys = to_zigzag((queries, keys), axes)
    here, num_devices = position(axes), num_parts(axes)

    def step(d_query: jax.Array, block: Keys, arrived: Any, index: Any) -> tuple[jax.Array, Any]:
        terms = attention.gradients(queries, block, here >= index)
        return d_query + terms.query, (arrived[0] + terms.key, arrived[1] + terms.value)

    if num_devices == 1:
        gradients = attention.own_gradients(queries, keys)
    else:
        block = _next(keys, axes)
        following = _next(block, axes) if num_devices > 2 else block
        d_query, *d_keys = attention.gradients(queries, block, here >= 1)
        if num_devices > 2:
            d_query, d_keys = _around(step, d_query, following, tuple(d_keys), 2, axes)
        d_query, d_keys, keys = lax.optimization_barrier((d_query, tuple(d_keys), keys))
        arrived, own = _next(d_keys, axes), attention.own_gradients(queries, keys)
        (d_key, d_value), own = lax.optimization_barrier((arrived, own))
        gradients = Gradients(d_query + own.query, d_key + own.key, d_value + own.value)
    gradients = gradients.rounded(queries)
    return from_zigzag(gradients, axes) if attention.is_causal else gradients


def _around(
    step: Callable[..., tuple[Any, Any]], so_far: Any, block: Keys, trailing: Any, start: int, axes: tuple[str, ...]
) -> tuple[Any, Any]:
    """`so_far, trailing = step(so_far, block, arrived, index)` for each index from `start` on.

    Args:
        block: the keys of the device `index` before.
        trailing: what each step leaves to the next device; there it is `arrived`.
    """
    last = num_parts(axes) - 1
    both = jax.eval_shape(lambda: (block, trailing))

    def one(state: Any, index: Any) -> tuple[Any, None]:
        so_far, packed = lax.optimization_barrier(state)
        following, arrived = _unpacked(_moved(packed, axes), both)
        block, _ = _unpacked(packed, both)
        so_far, trailing = step(so_far, block, arrived, index)
        return (so_far, _packed((following, trailing))), None

    state = (so_far, _packed((block, trailing)))
    if last > start:
        unroll = last - start if last < _MOST_UNROLLED else _STEPS_PER_ITERATION
        state, _ = lax.scan(one, state, jnp.arange(start, last, dtype=jnp.int32), unroll=unroll)
    so_far, packed = lax.optimization_barrier(state)
    block, trailing = _unpacked(packed, both)
    return step(so_far, block, _next(trailing, axes), jnp.int32(last))


def _next(tree: Any, axes: tuple[str, ...]) -> Any:
    """The previous device's arrays: each device sends its own to the next one."""
    return _unpacked(_moved(_packed(tree), axes), tree)


def _moved(packed: dict[str, jax.Array], axes: tuple[str, ...]) -> dict[str, jax.Array]:
    num_devices = num_parts(axes)
    moves = [(device, (device + 1) % num_devices) for device in range(num_devices)]
    return {name: lax.ppermute(x, axes, moves) for name, x in packed.items()}


def _packed(tree: Any) -> dict[str, jax.Array]:
    """One flat array of each dtype."""
    found: dict[str, list[jax.Array]] = {}
    for x in jax.tree.leaves(tree):
        found.setdefault(x.dtype.name, []).append(x.reshape(-1))
    return {name: jnp.concatenate(parts) for name, parts in found.items()}


def _unpacked(packed: dict[str, jax.Array], like: Any) -> Any:
    """Arrays of the shapes and dtypes of `like`, from those of `_packed`."""
    starts = dict.fromkeys(packed, 0)

    def taken(x: Any) -> jax.Array:
        start, size = starts[x.dtype.name], math.prod(x.shape)
        starts[x.dtype.name] += size
        return lax.slice_in_dim(packed[x.dtype.name], start, start + size).reshape(x.shape)

    return jax.tree.map(taken, like)
