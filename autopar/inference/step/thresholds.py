"""Find the least logit that `top_k` or `top_p` keeps, for any number of tokens, without sorting the vocabulary.

In: logits, their weights. Out: the last token that is kept. Floats are compared as integers of the same order, whose bits are found one by
one, from the highest: a bit is set if at least `k` tokens, or the mass `p`, lie at or above it. So 32 reductions over the vocabulary take
the place of a sort, and if it is split, devices send each other a number per row and reduction.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_SIGN = jnp.uint32(1 << 31)


def last_kept(logits: jax.Array, scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last token of each row that is kept, in the order of falling logits, and of tokens among equal ones.

    Args:
        logits: f32 `[rows, vocabulary]`, without -0. scaled: the same, less the largest, over the temperature.
        top_k: int32 `[rows]`; 0 for all. top_p: f32 `[rows]`.

    Returns:
        Its logit and its token, `[rows]` each.
    """
    vocabulary, keys, weights = logits.shape[-1], _keys_of(logits), jnp.exp(scaled)
    num = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)
    by_k = _largest(lambda key: (keys >= key[:, None]).sum(-1) >= num, 32, jnp.uint32, num)
    num_equal_k = num - (keys > by_k[:, None]).sum(-1)
    mass = _mass_above(keys, weights, by_k) + num_equal_k * _weight_at(keys, weights, by_k)
    needed = top_p * mass
    by_p = _largest(lambda key: _mass_from(keys, weights, key) >= needed, 32, jnp.uint32, num)
    by_p = jnp.maximum(by_p, by_k)  # rounding aside, it is
    weight = jnp.maximum(_weight_at(keys, weights, by_p), jnp.finfo(jnp.float32).tiny)
    num_equal_p = jnp.ceil((needed - _mass_above(keys, weights, by_p)) / weight).astype(jnp.int32)
    most = jnp.where(by_p == by_k, num_equal_k, (keys == by_p[:, None]).sum(-1))
    has_p = top_p < 1
    key = jnp.where(has_p, by_p, by_k)
    num_equal = jnp.where(has_p, jnp.clip(num_equal_p, 1, most), num_equal_k)
    tokens, is_equal = lax.broadcasted_iota(jnp.int32, logits.shape, 1), keys == key[:, None]

    def has_fewer(token: jax.Array) -> jax.Array:
        return (is_equal & (tokens < token[:, None])).sum(-1) < num_equal

    return _logits_of(key), _largest(has_fewer, vocabulary.bit_length(), jnp.int32, num)


def _keys_of(logits: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _logits_of(keys: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(keys >= _SIGN, keys ^ _SIGN, ~keys), jnp.float32)


def _mass_above(keys: jax.Array, weights: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(keys > key[:, None], weights, 0.0).sum(-1)


def _mass_from(keys: jax.Array, weights: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(keys >= key[:, None], weights, 0.0).sum(-1)


def _weight_at(keys: jax.Array, weights: jax.Array, key: jax.Array) -> jax.Array:
    """The weight of the tokens with a key; those of equal logits are equal."""
    return jnp.where(keys == key[:, None], weights, 0.0).max(-1)


def _largest(
    holds: Callable[[jax.Array], jax.Array], num_bits: int, dtype: jax.typing.DTypeLike, like: jax.Array
) -> jax.Array:
    """The largest integer of so many bits for which a condition holds, which holds for 0 and for all below one for which it holds."""

    def set_bit(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        value, bit = carry
        more = value | bit
        return jnp.where(holds(more), more, value), bit >> jnp.ones_like(bit)

    # The planner takes a loop of unknown length to be short, as it is: it runs for few requests.
    highest = jnp.asarray(1 << (num_bits - 1), dtype)
    return lax.while_loop(lambda carry: carry[1] > 0, set_bit, (jnp.zeros_like(like, dtype), highest))[0]
