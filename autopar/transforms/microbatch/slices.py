"""Slice a value into microbatches, merge the slices, and compute a slice from its positions.

In: arrays, and their batch dims. Out: arrays. These functions are traced (`jax_compat.staged`). Microbatch *j* of *m*
has the examples *j, m + j, ...*, so each device's part of the batch holds its share of every microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.transforms.microbatch.batch_dims import Place


@dataclass(frozen=True, slots=True)
class Cut:
    """How a batch dim is sliced.

    Args:
        place: the batch dim.
        size: number of examples.
        m: number of microbatches.
    """

    place: Place
    size: int
    m: int

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a slice."""
        dim = self.place.dim
        return (*shape[:dim], shape[dim] // self.m, *shape[dim + 1 :])

    def loops(self, shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The shape with a separate dim for the microbatches, and the position of that dim."""
        dim, minor = self.place.dim, self.place.minor
        major = shape[dim] // (self.size * minor)
        outer = (*shape[:dim], *(size for size in (major,) if size > 1), self.size // self.m)
        return (*outer, self.m, *(size for size in (minor,) if size > 1), *shape[dim + 1 :]), len(outer)

    def apart(self, whole: Any) -> Any:
        """The whole array with a separate dim for the microbatches."""
        return lax.reshape(whole, self.loops(whole.shape)[0])

    def merged(self, stack: Any, shape: Sequence[int]) -> Any:
        """The whole array, of this shape, merged from its slices."""
        loops, at = self.loops(shape)
        apart = lax.reshape(stack, (self.m, *loops[:at], *loops[at + 1 :]))
        order = (*range(1, at + 1), 0, *range(at + 1, len(loops)))
        return lax.reshape(lax.transpose(apart, order), tuple(shape))

    def one(self, apart: Any, j: Any, shape: Sequence[int]) -> Any:
        """Slice *j* of a whole array of this shape.

        Args:
            apart: the whole, reshaped by `apart`.
            j: index of the microbatch, an unsigned integer.
        """
        loops, at = self.loops(shape)
        first = [j if d == at else np.uint32(0) for d in range(len(loops))]
        part = lax.dynamic_slice(apart, first, (*loops[:at], 1, *loops[at + 1 :]))
        return lax.reshape(part, self.local(shape))

    def positions(self, shape: Sequence[int], dim: int, dtype: Any, j: Any) -> Any:
        """For each element of slice *j*, its position along a dim of the whole array.

        Args:
            shape: shape of the whole array.
        """
        local = self.local(shape)
        here = lax.broadcasted_iota(dtype, local, dim)
        if dim != self.place.dim:
            return here
        of = np.dtype(dtype).type
        minor, rows = self.place.minor, self.size // self.m
        inner = here % of(minor) if minor > 1 else None
        row = here // of(minor) if minor > 1 else here
        outer = row // of(rows) if shape[dim] > self.size * minor else None
        row = row if outer is None else row % of(rows)
        row = row * of(self.m) + lax.convert_element_type(j, dtype)
        row = row if outer is None else row + outer * of(self.size)
        return row if inner is None else row * of(minor) + inner

    def counts(self, shape: Sequence[int], j: Any) -> tuple[Any, Any] | None:
        """For each element of slice *j*, its linear position in the whole array, as high and low 32 bits (as in
        `iota_2x32_shape`). None if the high bits are not all zero."""
        if math.prod(shape) >= 2**32:
            return None
        low, stride = jnp.zeros(self.local(shape), "uint32"), 1
        for dim in reversed(range(len(shape))):
            if shape[dim] > 1:
                step = self.positions(shape, dim, "uint32", j)
                low = low + (step if stride == 1 else step * np.uint32(stride))
            stride *= shape[dim]
        return jnp.zeros(self.local(shape), "uint32"), low


def made(source: Any, operands: Sequence[Any], cut: Cut, shape: Sequence[int], j: Any) -> Sequence[Any] | None:
    """Slice *j* of an array that is computed from positions; None if only the whole can be computed.

    Args:
        source: JAX's equation.
        shape: shape of its results for the whole batch.
    """
    if source.primitive.name == "iota":
        dtype = source.params["dtype"]
        if not jnp.issubdtype(dtype, jnp.integer):
            return None
        return [cut.positions(shape, source.params["dimension"], dtype, j)]
    if source.primitive.name == "iota_2x32_shape":
        return cut.counts(shape, j)
    return None


#: The operation that combines the terms of two microbatches.
COMBINE: Mapping[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "prod": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}


def identity(kind: str, shape: Sequence[int], dtype: Any) -> Any:
    """The identity element of a reduction."""
    if kind in ("max", "min"):
        limits = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
        infinite = jnp.issubdtype(dtype, jnp.floating)
        low, high = (-np.inf, np.inf) if infinite else (limits.min, limits.max)
        return jnp.full(shape, low if kind == "max" else high, dtype)
    if kind == "and":
        return jnp.full(shape, True if np.dtype(dtype).kind == "b" else -1, dtype)
    return jnp.full(shape, 1 if kind == "prod" else 0, dtype)
