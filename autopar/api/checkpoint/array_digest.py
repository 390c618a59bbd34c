"""Digest arrays, with the same result however an array is sharded over devices and processes.

In: an array. Out: a number for each part in this process. The numbers of all parts add up to the digest:

    sum over 32-bit words of mix(word xor c * its position in the whole array)   modulo 2^32

`mix` is the last step of MurmurHash3, a bijection. So a change of one word always changes the sum, and any other change
is missed with a probability of 2^-32. A digest of the bytes in order (CRC-32, BLAKE2) would depend on the shards as
saved, but a restore under another plan reads other shards. This digest is also fast: a host core digests about 15 GB/s
(zlib's CRC-32 3.7, BLAKE2b 0.9), and a GPU reads the array once. Parts on CPU devices are digested in place by a
compiled loop, because XLA's CPU compiler would write the mixed words to memory first.
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

#: The start and end of a part in each dim of the whole array.
Box = tuple[tuple[int, int], ...]
#: The digest of a part, which a device may still be computing.
Part = int | jax.Array

_POSITION = 0x9E3779B1  # 2^32 over the golden ratio, odd


def parts_of(array: Any, *, once: bool) -> Mapping[Box, Part]:
    """Start to digest this process's parts of an array. The array may be donated before the digest is ready.

    Args:
        once: whether to digest each part only once: a replica is skipped if the first copy is on another device of any
            process.
    """
    if not isinstance(array, jax.Array):  # a number, equal in every process
        return {(): _of_host(np.asarray(array), (), ())} if jax.process_index() == 0 or not once else {}
    parts: dict[Box, Part] = {}
    for shard in array.addressable_shards:
        if once and shard.replica_id:
            continue
        bounds = [one.indices(size) for one, size in zip(shard.index, array.shape, strict=True)]
        box = tuple((start, stop) for start, stop, _ in bounds)
        starts = tuple(start for start, _ in box)
        if box in parts:
            continue
        if shard.device.platform == "cpu":
            parts[box] = _of_host(np.asarray(shard.data), starts, array.shape)
        else:
            first = np.uint32(_first(starts, array.shape, _num_words(array.dtype)) % 2**32)
            parts[box] = _of_device(shard.data, first, shape=array.shape)
    return parts


def total(parts: Mapping[Box, Part]) -> int:
    """The sum of the parts' digests; waits for the devices."""
    return sum(map(int, parts.values())) % 2**32


def _strides(shape: Sequence[int], num_words: int) -> list[int]:
    """The number of words from one element to the next, in each dim of the whole array."""
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
    dim = part.ndim  # from this dim on, the part spans the whole array, so its words are contiguous
    while dim > 0 and part.shape[dim:] == tuple(shape[dim:]):
        dim -= 1
    firsts = np.full(1, first % 2**32, np.uint32)  # the position of the first word of each contiguous run
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
    """The bits of the elements as 32-bit words. Elements of several words get one more dim."""
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
