"""Run equations that see two dims as the program wrote them, with one.

In: `Trace`, and which dims a plan shards. Out: which equations to run with whole dims, and how. XLA chooses better
layouts for these if the plan shards neither of the two dims.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import jax

from autopar.frontend.trace import Rewritten, Trace
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop import compat as jax_compat


def as_written(trace: Trace, split: Set[tuple[int, int]]) -> dict[int, Rewritten]:
    """The equations on two split dims neither of which is sharded, by position.

    Args:
        split: pairs (value, dim) that a plan shards.
    """
    whole = [one for one in trace.rewritten if not _is_split(one, split)]
    return {n: one for one in whole for n in range(one.start, one.stop)}


def sees_two(trace: Trace, split: Set[tuple[int, int]]) -> bool:
    """Whether a plan shards any of the two dims."""
    return any(_is_split(one, split) for one in trace.rewritten)


def _is_split(one: Rewritten, split: Set[tuple[int, int]]) -> bool:
    return any((v, d) in split or (v, d + 1) in split for v, d in one.pairs)


def run_whole(one: Rewritten, operands: Sequence[Any]) -> Sequence[Any]:
    """The results of equations that see two dims, computed by the original equation."""
    if one.source is None:
        return operands
    whole = [
        operand if shape is None or operand.shape == shape else jax.lax.reshape(operand, shape)
        for operand, shape in zip(operands, one.operand_shapes, strict=True)
    ]
    return jax_compat.bind(one.source, whole)


def seen_whole(sharding: TensorSharding, shape: Sequence[int], whole: Sequence[int]) -> TensorSharding:
    """The sharding of a tensor after a reshape to a shape that keeps each sharded dim.

    >>> seen_whole(TensorSharding((("x",), (), ())), (8, 3, 4), (8, 12)).dims
    (('x',), ())
    """
    axes = {_stride(shape, d): axes for d, axes in enumerate(sharding.dims) if axes}
    dims = tuple(axes.get(_stride(whole, d), ()) if size > 1 else () for d, size in enumerate(whole))
    assert sum(map(bool, dims)) == len(axes), f"{sharding} of {shape} is no sharding of {whole}"
    return TensorSharding(dims, sharding.unreduced)


def _stride(shape: Sequence[int], dim: int) -> tuple[int, int]:
    return shape[dim], math.prod(shape[dim + 1 :])
