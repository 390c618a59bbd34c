"""Recognize the values of some libraries without importing the libraries.

A library that this process has not imported has no values among a step's arguments, so each is looked up among the
loaded modules.

In: a value.
Out: whether it is of a kind.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def nnx() -> Any | None:
    """`flax.nnx` if it is loaded."""
    return sys.modules.get("flax.nnx")


def is_object(value: Any) -> bool:
    """Whether a step mutates it in place: a module, an optimizer, a metric or a variable of Flax NNX."""
    library = nnx()
    return library is not None and isinstance(value, library.Pytree | library.Variable)


def is_pure_state(value: Any) -> bool:
    """Whether it is a functional copy of such objects' values, which a step returns: an `nnx.State`."""
    library = nnx()
    return library is not None and isinstance(value, library.State)


def has_own_numbers(value: Any) -> bool:
    """Whether Python numbers in it are settings rather than data, as in an equinox module: `dropout.inference`."""
    library = sys.modules.get("equinox")
    return library is not None and isinstance(value, library.Module)


def is_box(value: Any) -> bool:
    """Whether it holds one array and its sharding metadata: `nn.Partitioned`, an NNX variable inside a state."""
    meta, library = sys.modules.get("flax.core.meta"), nnx()
    boxed = meta is not None and isinstance(value, meta.AxisMetadata)
    return boxed or (library is not None and isinstance(value, library.Variable))


def active_axis_rules() -> tuple[tuple[str, Any], ...]:
    """The rules of the enclosing `nn.logical_axis_rules`: (logical name, mesh axes)."""
    spmd = sys.modules.get("flax.core.spmd")
    return tuple((name, axes) for name, axes in spmd.get_logical_axis_rules()) if spmd is not None else ()


def building() -> contextlib.AbstractContextManager[Any]:
    """A context for building a state that a plan shards: NNX variables do not require a mesh of their own in it."""
    eager = getattr(nnx(), "use_eager_sharding", None)
    return contextlib.nullcontext() if eager is None else eager(False)
