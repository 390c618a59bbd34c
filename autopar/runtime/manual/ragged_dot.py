"""Run a ragged dot (grouped GEMM) with sharded rows or groups: local rows times the matrices of local groups.

In: inside `jax.shard_map`, the local rows, the matrices of the local groups, and the sizes of all groups.
Out: an unreduced result. If rows are kept, it has a row per local row, zero for rows of other devices' groups, and is
summed over the devices with other groups. If rows are contracted, it has a matrix per local group, and is summed over
the devices with other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar.runtime.manual.part import Part, num_parts, position


def ragged_dot_general(part: Part, left: jax.Array, right: jax.Array, sizes: jax.Array) -> Sequence[jax.Array]:
    """`lax.ragged_dot` and its gradients, with one list of sizes for all batches."""
    numbers = part.params["ragged_dot_dimension_numbers"]
    (left_contracting, right_contracting), (left_batch, _) = numbers.dot_dimension_numbers
    (row_dim,) = numbers.lhs_ragged_dimensions
    summed = row_dim in left_contracting
    row_axes = part.operands[0].dims[row_dim]
    group_axes = part.results[0].dims[0] if summed else part.operands[1].dims[numbers.rhs_group_dimensions[0]]
    first, last = _rows_of_groups(sizes, left.shape[row_dim], row_axes, group_axes)
    if not group_axes:  # the first group starts at the first row
        return part.bind([left, right, last - first])
    left = jnp.roll(left, -first[0], row_dim)
    if summed:
        right = jnp.roll(right, -first[0], right_contracting[left_contracting.index(row_dim)])
        return part.bind([left, right, last - first])
    (result,) = part.bind([left, right, last - first])
    free = [d for d in range(left.ndim) if d not in (*left_batch, *left_contracting)]
    return [jnp.roll(result, first[0], len(left_batch) + free.index(row_dim))]


def _rows_of_groups(
    sizes: jax.Array, num_rows: int, row_axes: tuple[str, ...], group_axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """For each of this device's groups, its first row and the row after its last one."""
    ends = lax.cumsum(sizes)
    here = sizes.shape[0] // num_parts(group_axes)
    own = position(group_axes) * here
    before = position(row_axes) * num_rows
    first, last = (
        jnp.clip(lax.dynamic_slice_in_dim(each, own, here).astype(jnp.int32) - before, 0, num_rows).astype(sizes.dtype)
        for each in (ends - sizes, ends)
    )
    return first, last
