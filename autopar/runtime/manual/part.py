"""Describe one device's part of a node.

In: an equation and the shardings of its operands and results.
Out: `Part`, which a local implementation takes together with its local operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.ir.sharding import TensorSharding
from autopar.rules.node_view import NodeView


@dataclass(frozen=True, slots=True)
class Part:
    """One node as one device sees it.

    Args:
        name: the primitive's name.
        params: the equation's JAX parameters.
        view: the whole node, as rules see it.
        operands: the shardings of the operands.
        results: the shardings of the results; an unreduced local result is one term of the sum.
        bind: the primitive itself on local operands, with changed parameters by name.
        method: the method of context parallelism of an attention whose tokens are split.
    """

    name: str
    params: Mapping[str, Any]
    view: NodeView
    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    bind: Callable[..., Sequence[Any]]
    method: str | None = None


#: A function from a part and local operands to local results.
LocalFunction = Callable[..., Sequence[Any]]


def position(axes: tuple[str, ...]) -> Any:
    """The index of this device's shard along mesh axes, an int32 scalar; 0 for no axes."""
    return jax.lax.axis_index(axes).astype(jax.numpy.int32) if axes else jax.numpy.int32(0)


def num_parts(axes: tuple[str, ...]) -> int:
    """The number of shards along mesh axes."""
    return jax.lax.axis_size(axes) if axes else 1
