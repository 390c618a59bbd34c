"""Attend to one block of keys at a time, and merge the results: the steps that all methods share.

In: one device's queries and one block of keys and values, both in zigzag order where the mask is causal.
Out: sums over the blocks so far: output and log-sum-exp, or gradients.

Arrays have their tokens in dim 1, the log-sum-exp too. In zigzag order, a device holds chunks `i` and `2n - 1 - i` of the
`2n` chunks of the sequence: its low and its high half. Under a causal mask, two of the four pairs of halves of the queries
and of another device's keys are seen as a whole, and two not at all: the high queries see the low keys, and the low
queries see them too if these come from a lower device; otherwise the high queries see the high keys too. Both pairs run
as one kernel, stacked along the batch, so each device does the same work in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from autopar.runtime.context_parallel.kernels import Kernel


class Queries(NamedTuple):
    """One device's queries. The last three are those of the backward pass."""

    query: jax.Array
    segments: jax.Array | None = None
    out: jax.Array | None = None
    lse: jax.Array | None = None
    d_out: jax.Array | None = None


class Keys(NamedTuple):
    """One block of keys and values."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None = None


class Output(NamedTuple):
    """Attention to some of the keys, in float32."""

    out: jax.Array
    lse: jax.Array

    def rounded(self, queries: Queries) -> Output:
        """In the dtype of the queries."""
        return self._replace(out=self.out.astype(queries.query.dtype))


class Gradients(NamedTuple):
    """Sums of the terms of the gradients; that of the queries in float32."""

    query: jax.Array
    key: jax.Array
    value: jax.Array

    def rounded(self, queries: Queries) -> Gradients:
        """In the dtype of the queries."""
        return self._replace(query=self.query.astype(queries.query.dtype))


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention that is computed: its kernel, scale and mask."""

    kernel: Kernel
    scale: float
    is_causal: bool

    def own(self, queries: Queries, keys: Keys) -> Output:
        """Attention to the device's own block."""
        return self._forward(queries, keys, is_causal=self.is_causal)

    def add(self, so_far: Output, queries: Queries, keys: Keys, is_lower: Any) -> Output:
        """Attention to another device's block, merged with that to the blocks so far.

        Args:
            is_lower: whether the block is of a lower device.
        """
        if not self.is_causal:
            return merged(so_far, self._forward(queries, keys, is_causal=False))
        pairs = self._forward(_query_pairs(queries, is_lower), _key_pairs(keys, is_lower), is_causal=False)
        first, second = _split(pairs, 0)
        low, high = _split(so_far, 1)
        low = merged(low, _masked(first, is_lower))
        high = merged(merged(high, second), _masked(first, ~is_lower))
        return _concatenated(low, high)

    def own_gradients(self, queries: Queries, keys: Keys) -> Gradients:
        """The terms of the gradients from the device's own block."""
        return self._backward(queries, keys, is_causal=self.is_causal)

    def gradients(self, queries: Queries, keys: Keys, is_lower: Any) -> Gradients:
        """The terms of the gradients from another device's block."""
        if not self.is_causal:
            return self._backward(queries, keys, is_causal=False)
        pairs = _query_pairs(queries, is_lower), _key_pairs(keys, is_lower)
        d_query, d_key, d_value = self._backward(*pairs, is_causal=False)
        return Gradients(_of_queries(d_query, is_lower), _of_keys(d_key, is_lower), _of_keys(d_value, is_lower))

    def _forward(self, queries: Queries, keys: Keys, *, is_causal: bool) -> Output:
        options = self.kernel.options(self.scale, is_causal, _segments(queries, keys))
        out, lse = self.kernel.forward(queries.query, keys.key, keys.value, **options)
        return Output(out.astype(lse.dtype), jnp.swapaxes(lse, 1, 2))

    def _backward(self, queries: Queries, keys: Keys, *, is_causal: bool) -> Gradients:
        assert queries.lse is not None
        options = self.kernel.options(self.scale, is_causal, _segments(queries, keys))
        lse = jnp.swapaxes(queries.lse, 1, 2)
        operands = (queries.query, keys.key, keys.value, queries.out, lse, queries.d_out)
        d_query, d_key, d_value = self.kernel.backward(*operands, **options)
        return Gradients(d_query.astype(lse.dtype), d_key, d_value)


def merged(one: Output, other: Output) -> Output:
    """Attention to the keys of both."""
    lse = jnp.logaddexp(one.lse, other.lse)
    shift = jnp.where(jnp.isneginf(lse), 0, lse)
    first, second = (jnp.exp(each.lse - shift)[..., None] * each.out for each in (one, other))
    return Output(first + second, lse)


def _masked(output: Output, is_kept: Any) -> Output:
    """Attention to no key unless `is_kept`."""
    return Output(output.out, jnp.where(is_kept, output.lse, -jnp.inf))


def _segments(queries: Queries, keys: Keys) -> tuple[jax.Array, jax.Array] | None:
    return None if queries.segments is None or keys.segments is None else (queries.segments, keys.segments)


def _split(tree: Any, dim: int) -> tuple[Any, Any]:
    """The two halves of each array."""
    halves = jax.tree.map(lambda x: tuple(jnp.split(x, 2, dim)), tree)
    return jax.tree.transpose(jax.tree.structure(tree), jax.tree.structure((0, 0)), halves)


def _concatenated(low: Any, high: Any, dim: int = 1) -> Any:
    return jax.tree.map(lambda *halves: jnp.concatenate(halves, dim), low, high)


def _query_pairs(tree: Any, is_lower: Any) -> Any:
    """The queries of both pairs, stacked along the batch."""
    low, high = _split(tree, 1)
    return _concatenated(jax.tree.map(lambda a, b: jnp.where(is_lower, a, b), low, high), high, 0)


def _key_pairs(tree: Any, is_lower: Any) -> Any:
    """The keys of both pairs, stacked along the batch."""
    low, high = _split(tree, 1)
    return _concatenated(jax.tree.map(lambda a, b: jnp.where(is_lower, a, b), low, high), low, 0)


def _of_queries(stacked: jax.Array, is_lower: Any) -> jax.Array:
    """The gradient of the queries from that of both pairs."""
    first, second = jnp.split(stacked, 2, 0)
    return jnp.concatenate([jnp.where(is_lower, first, 0), second + jnp.where(is_lower, 0, first)], 1)


def _of_keys(stacked: jax.Array, is_lower: Any) -> jax.Array:
    """The gradient of keys or values from that of both pairs."""
    first, second = jnp.split(stacked, 2, 0)
    return jnp.concatenate([second + jnp.where(is_lower, first, 0), jnp.where(is_lower, 0, first)], 1)
