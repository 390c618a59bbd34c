"""Digest arrays, with the same result however an array is sharded over devices and processes.

In: an array. Out: a number for each of its parts in this process; the numbers of all parts add up to the digest:

    sum over 32-bit words of mix(word xor c * its position in the whole array)   modulo 2^32

`mix` is the last step of MurmurHash3, a bijection: a change of one word always changes the sum, and any other change is missed
with a probability of 2^-32. A digest of the bytes in order (CRC-32, BLAKE2) would depend on the shards as they were saved, and a
restore under another plan reads other shards. This one is also fast: a host's core digests some 15 GB/s (CRC-32 of zlib 3.7,
BLAKE2b 0.9), a GPU reads the array once. Parts on CPU devices are digested in place, by a compiled loop; XLA's CPU compiler would
write the mixed words to memory first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.solve.numba_jit import compiled

#: Where a part begins and ends in the whole array, in each dim.
Box = tuple[tuple[int, int], ...]
#: A part's number, which a device may still compute.
Part = int | jax.Array

_POSITION = 0x9E3779B1  # 2^32 over the golden ratio, odd


def parts_of(array: Any, *, once: bool) -> Mapping[Box, Part]:
    """Start to digest an array's shards in this process. The array may be donated meanwhile.

    Args:
        once: digest only the first replica of each shard over all processes.
    """
    if not isinstance(array, jax.Array):  # a number: the same in every process
        return {(): _of_host(np.asarray(array), (), ())} if jax.process_index() == 0 or not once else {}
    found: dict[Box, Part] = {}
    for shard in array.addressable_shards:
        if once and shard.replica_id:
            continue
        bounds = [one.indices(size) for one, size in zip(shard.index, array.shape, strict=True)]
        box = tuple((start, stop) for start, stop, _ in bounds)
        starts = tuple(start for start, _ in box)
        if box in found:
            continue
        if shard.device.platform == "cpu":
            found[box] = _of_host(np.asarray(shard.data), starts, array.shape)
        else:
            first = np.uint32(_first(starts, array.shape, _num_words(array.dtype)) % 2**32)
            found[box] = _of_device(shard.data, first, shape=array.shape)
    return found


def total(parts: Mapping[Box, Part]) -> int:
    """Wait for the digests of the shards, and add them up."""
    return sum(map(int, parts.values())) % 2**32


def _strides(shape: Sequence[int], num_words: int) -> list[int]:
    """The stride of each dim of the whole array, in words."""
    return [num_words * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _first(starts: Sequence[int], shape: Sequence[int], num_words: int) -> int:
    """The position of a shard's first word in the whole array."""
    return sum(start * stride for start, stride in zip(starts, _strides(shape, num_words), strict=True))


def _num_words(dtype: Any) -> int:
    """The number of words of an element."""
    return max(1, np.dtype(dtype).itemsize // 4)


# -- on a host -------------------------------------------------------------------------------


def _of_host(part: NDArray[Any], starts: Sequence[int], shape: Sequence[int]) -> int:
    num_words = _num_words(part.dtype)
    if part.dtype.name in ("int2", "int4", "uint2", "uint4"):
        part = part.astype(np.int8)
    words = np.ascontiguousarray(part).reshape(-1).view(f"u{min(4, part.dtype.itemsize)}")
    first, strides = _first(starts, shape, num_words), _strides(shape, num_words)
    dim = part.ndim  # from it on the part has all of the array, so that its words follow one another
    while dim > 0 and part.shape[dim:] == tuple(shape[dim:]):
        dim -= 1
    firsts = np.full(1, first % 2**32, np.uint32)  # of each run of words that follow one another
    for size, stride in zip(part.shape[:dim], strides, strict=False):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride)
        firsts = (firsts[:, None] + steps.astype(np.uint32)).reshape(-1)
    return int(_sum_of_runs(words, firsts))


@compiled
def _sum_of_runs(words: NDArray[Any], firsts: NDArray[np.uint32]) -> np.uint32:
    length = words.size // firsts.size
    total = np.uint32(0)
    for number in range(firsts.size):
        first, run = firsts[number], words[number * length : (number + 1) * length]
        for n in range(run.size):
            mixed = np.uint32(run[n]) ^ np.uint32(np.uint32(first + np.uint32(n)) * np.uint32(_POSITION))
            mixed = np.uint32((mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B))
            mixed = np.uint32((mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35))
            total = np.uint32(total + (mixed ^ (mixed >> np.uint32(16))))
    return total


# -- on other devices ------------------------------------------------------------------------


@partial(jax.jit, static_argnames="shape")
def _of_device(part: jax.Array, first: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    words = _words(part)
    strides = _strides(shape, _num_words(part.dtype))
    position = jnp.full(words.shape, first)
    for dim, stride in enumerate([*strides, 1][: words.ndim]):
        position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride % 2**32)
    mixed = words ^ (position * jnp.uint32(_POSITION))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(array: jax.Array) -> jax.Array:
    """The bits of the elements as 32-bit words; wider elements have several words, along an extra last dim."""
    cast = jax.lax.bitcast_convert_type
    if array.dtype.name in ("int2", "int4", "uint2", "uint4"):
        array = array.astype(jnp.int8)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        halves = [cast(half, jnp.uint32) for half in (array.real, array.imag)]
        words = jnp.stack(halves, axis=array.ndim)
        return words.reshape(*array.shape, -1)
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    if array.dtype.itemsize >= 4:
        return cast(array, jnp.uint32)
    bits = jnp.finfo(array.dtype).bits if jnp.issubdtype(array.dtype, jnp.floating) else 8 * array.dtype.itemsize
    return cast(array, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
