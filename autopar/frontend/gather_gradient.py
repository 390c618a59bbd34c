"""Rewrite the gradient of a one-element-per-row gather as a comparison instead of a scatter.

In: a `scatter-add` equation into zeros.
Out: an equivalent comparison to inline. The gather of each token's logit (`jnp.take_along_axis`, as in every cross
entropy of integer labels) has a gradient that JAX writes as a scatter-add into zeros of the logits' size. XLA
materializes the zeros, updates them in place, and reads all of them again; and no partitioner can shard the indexed
dim. A comparison with the dim's iota fuses into its user and shards like any elementwise operation. Each element gets
at most one addend, so the result is bitwise equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax


def as_comparison(source: Any) -> Any:
    """A closed jaxpr of operand, indices and updates that equals a scatter-add into zeros.

    Args:
        source: JAX's equation.

    Returns:
        None if it is not a `scatter-add` of one element per row.
    """
    if source.primitive.name != "scatter-add":
        return None
    operand, indices, updates = (var.aval for var in source.invars)
    numbers = source.params["dimension_numbers"]
    looked_up = tuple(numbers.scatter_dims_to_operand_dims)
    rows = tuple(numbers.operand_batching_dims)
    of_rows = tuple(numbers.scatter_indices_batching_dims)
    num_rows = math.prod(operand.shape[dim] for dim in rows)
    one_each = math.prod(indices.shape) == num_rows == math.prod(updates.shape)
    if len(looked_up) != 1 or len(rows) != len(operand.shape) - 1 or not one_each:
        return None
    (dim,) = looked_up
    clips = source.params["mode"] == lax.GatherScatterMode.CLIP
    order = [of for _, of in sorted(zip(rows, of_rows, strict=True))]

    def compare(_zeros: Any, indices: Any, updates: Any) -> Any:
        at = _one_for_each_row(lax.squeeze(indices, [indices.ndim - 1]), order, operand.shape, dim)
        if np.dtype(at.dtype).itemsize < 4:  # smaller integers may not represent all positions
            at = lax.convert_element_type(at, np.int32)
        if clips:
            at = lax.clamp(np.zeros((), at.dtype), at, np.asarray(operand.shape[dim] - 1, at.dtype))
        positions = lax.broadcasted_iota(at.dtype, operand.shape, dim)
        kept = tuple(range(len(operand.shape)))
        is_there = lax.eq(positions, lax.broadcast_in_dim(at, operand.shape, kept))
        updates = lax.squeeze(updates, numbers.update_window_dims)  # none, or the one place
        placed = lax.broadcast_in_dim(_one_for_each_row(updates, order, operand.shape, dim), operand.shape, kept)
        return lax.select(is_there, placed, lax.full_like(placed, 0))

    return jax.make_jaxpr(compare)(operand, indices, updates)


def _one_for_each_row(value: Any, order: Sequence[int], shape: Sequence[int], dim: int) -> Any:
    """Reorder the dims in `order`, which are rows, to the tensor's order; all other dims have size 1."""
    rest = [d for d in range(value.ndim) if d not in order]
    moved = lax.transpose(value, [*order, *rest])
    return lax.reshape(moved, [1 if d == dim else size for d, size in enumerate(shape)])
