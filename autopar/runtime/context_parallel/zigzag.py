"""Move tokens between contiguous and zigzag order, in which a causal mask leaves each device the same work.

In: inside `jax.shard_map`, arrays with their tokens in dim 1, sharded over mesh axes of `n` devices. Of the `2n` chunks of
the sequence, device `i` holds chunks `2i` and `2i + 1` in contiguous order, and chunks `i` and `2n - 1 - i` in zigzag order.
Out: the arrays in the other order. Each chunk moves at most once: the even chunks by one collective-permute, the odd
chunks by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.cost.context_parallel import zigzag_moves
from autopar.runtime.manual.part import num_parts, position


def to_zigzag(tree: Any, axes: tuple[str, ...]) -> Any:
    """Arrays in zigzag order."""
    even, odd = zigzag_moves(num_parts(axes))
    holds_even_low = position(axes) % 2 == 0  # chunk `i` is the low one of device `i`

    def moved(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, 1)
        first, second = _permuted(first, axes, even), _permuted(second, axes, odd)
        low, high = jnp.where(holds_even_low, first, second), jnp.where(holds_even_low, second, first)
        return jnp.concatenate([low, high], 1)

    return jax.tree.map(moved, tree)


def from_zigzag(tree: Any, axes: tuple[str, ...]) -> Any:
    """Arrays in contiguous order."""
    even, odd = (tuple((target, source) for source, target in moves) for moves in zigzag_moves(num_parts(axes)))
    holds_even_low = position(axes) % 2 == 0

    def moved(x: jax.Array) -> jax.Array:
        low, high = jnp.split(x, 2, 1)
        first, second = jnp.where(holds_even_low, low, high), jnp.where(holds_even_low, high, low)
        return jnp.concatenate([_permuted(first, axes, even), _permuted(second, axes, odd)], 1)

    return jax.tree.map(moved, tree)


def _permuted(x: jax.Array, axes: tuple[str, ...], moves: Sequence[tuple[int, int]]) -> jax.Array:
    return x if all(source == target for source, target in moves) else lax.ppermute(x, axes, moves)
