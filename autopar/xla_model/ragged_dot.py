"""A product in groups of unequal size as XLA runs it on GPUs: dense, with every row copied once for each group and
masked but for its own.

In: an equation's parameters and local shapes. Out: `DenseProduct`. Seen in compiled programs of JAX 0.12 (openxla/xla,
ragged_dot_rewriter.cc).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DenseProduct:
    """`batch` times [m, k] @ [k, n]; `copies` of each of the two operands are made first, none where it is read as
    it is. Where groups are summed, their copies are put beside each other in each row (`beside`), another pass."""

    batch: int
    m: int
    n: int
    k: int
    copies: tuple[int, int]
    beside: bool = False


def dense_product(
    params: Mapping[str, Any], left: Sequence[int], right: Sequence[int], result: Sequence[int]
) -> DenseProduct:
    """What is multiplied, from the shapes of both operands and the result on one device."""
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
    return DenseProduct(batch, m, n, k * groups, (groups, 0), beside=True)
