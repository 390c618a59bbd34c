"""Put every layer of a Flax model under `jax.checkpoint`, as users write it by hand if a step does not fit.

In: module and name of the layer's class. Out: a context in which models are built of such layers.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import flax.linen as nn


@contextmanager
def whole_layers(module: str, name: str) -> Iterator[None]:
    """A context in which layers keep only their inputs, and recompute the rest in the backward pass.

    Args:
        module, name: the layer's class. It is called with arrays by position and with flags by name.
    """
    layer: Any = getattr(importlib.import_module(module), name)

    def call(self: Any, *arrays: Any, **flags: Any) -> Any:
        return nn.remat(lambda block, *given: layer.__call__(block, *given, **flags))(self, *arrays)

    with mock.patch(f"{module}.{name}", type(name, (layer,), {"__call__": call})):
        yield
