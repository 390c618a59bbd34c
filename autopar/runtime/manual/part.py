"""What one device's part of a node may know of the whole.

In: an equation and the shardings of its operands and results. Out: `Part`, which a local implementation takes
beside its local operands.
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
    """One node, as one of the devices sees it.

    Args:
        name: of the primitive.
        params: of the equation, as JAX has them.
        view: the whole node, as rules see it.
        operands, results: shardings; a result may be unreduced, and is then one of the terms.
        bind: runs the primitive itself, on local operands; other parameters by name.
    """

    name: str
    params: Mapping[str, Any]
    view: NodeView
    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    bind: Callable[..., Sequence[Any]]


#: A part and local operands -> local results.
LocalFunction = Callable[..., Sequence[Any]]


def position(axes: tuple[str, ...]) -> Any:
    """Which part along these mesh axes this device has, an int32 scalar; 0 along none."""
    return jax.lax.axis_index(axes).astype(jax.numpy.int32) if axes else jax.numpy.int32(0)


def num_parts(axes: tuple[str, ...]) -> int:
    """How many parts there are."""
    return jax.lax.axis_size(axes) if axes else 1
