"""Draw random numbers by a hash that XLA compiles quickly.

In: a seed. Out: a key for `jax.random`. XLA takes a minute to compile threefry for all parameters of a model on a GPU; a
hash of a counter takes a tenth of that, and initial values need no more. The numbers do not depend on the sharding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import define_prng_impl  # noqa: TID251 - the way to define a PRNG

#: 2^32 divided by the golden ratio, so that no key and no number is 0 for small seeds.
_GOLDEN = 0x9E3779B9


def quick_key(seed: int) -> jax.Array:
    """A key whose numbers are quick to compile; not for cryptography, or for more than 2^32 numbers from one key."""
    return jax.random.key(seed, impl=_HASH)


def _mixed(x: Any) -> Any:
    """The finalizer of MurmurHash3: each bit of the result depends on each bit of `x`."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _counter(shape: Sequence[int]) -> Any:
    return lax.iota(jnp.uint32, math.prod(shape)).reshape(tuple(shape))


def _seed(seed: Any) -> Any:
    word = lax.convert_element_type(seed, jnp.uint32) + jnp.uint32(_GOLDEN)
    return jnp.stack([_mixed(word), _mixed(word + jnp.uint32(_GOLDEN))])


def _split(key: Any, shape: Sequence[int]) -> Any:
    return _mixed(key ^ _mixed(_counter((*shape, 2)) + jnp.uint32(1)))


def _fold_in(key: Any, data: Any) -> Any:
    return _mixed(key ^ _mixed(lax.convert_element_type(data, jnp.uint32) + jnp.uint32(_GOLDEN)))


def _random_bits(key: Any, bit_width: int, shape: Sequence[int]) -> Any:
    bits = _mixed(key[0] ^ _mixed(_counter(shape) + key[1]))
    return lax.convert_element_type(bits, jnp.dtype(f"uint{bit_width}"))


_HASH = define_prng_impl(
    key_shape=(2,), seed=_seed, split=_split, random_bits=_random_bits, fold_in=_fold_in, name="hash", tag="hash"
)
