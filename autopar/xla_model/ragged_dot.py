"""Lower a ragged dot to the dense matmul that XLA runs on GPUs, with one masked copy of the rows per group.

In: an equation's parameters and local shapes. Out: `DenseProduct`. Source: compiled programs of JAX 0.12 (openxla/xla,
ragged_dot_rewriter.cc).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DenseProduct:
    """`batch` matmuls [m, k] @ [k, n], with `copies` masked copies of each operand (0: it is read directly).

    A matmul that sums over the groups needs another pass that concatenates the copies of a row (`concatenated`).
    """

    batch: int
    m: int
    n: int
    k: int
    copies: tuple[int, int]
    concatenated: bool = False


def dense_product(
    params: Mapping[str, Any], left: Sequence[int], right: Sequence[int], result: Sequence[int]
) -> DenseProduct:
    """The dense matmul of a ragged dot, from the equation's parameters and local shapes."""
    numbers = params["ragged_dot_dimension_numbers"]
    (left_contracting, right_contracting), (left_batch, right_batch) = numbers["dot_dimension_numbers"]
    ragged, group_dims = set(numbers["lhs_ragged_dimensions"]), numbers["rhs_group_dimensions"]
    m = math.prod(s for d, s in enumerate(left) if d not in (*left_contracting, *left_batch))
    n = math.prod(s for d, s in enumerate(right) if d not in (*right_contracting, *right_batch, *group_dims))
    k = math.prod(left[d] for d in left_contracting)
    batch = math.prod(left[d] for d in left_batch)
    if ragged & set(left_contracting):  # groups lead the result
        return DenseProduct(batch * result[0], m, n, k, (result[0], result[0]))
    if ragged & set(left_batch):
        return DenseProduct(batch, m, n, k, (0, 0))
    groups = math.prod(right[d] for d in group_dims)
    return DenseProduct(batch, m, n, k * groups, (groups, 0), concatenated=True)
