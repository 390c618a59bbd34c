"""Pass values whose planned sharding divides no dim evenly from piece to piece: padded, so that they stay sharded.

In: the planned shardings of a stage's values. Out: a value padded where a piece returns it, and whole again where the next
piece takes it. XLA shards any dim inside a program, but the results of a jitted function only evenly: without padding it
would gather such a value, for example logits of 50,257 words over 4 devices, in every microbatch. The padding is what the
last device holds anyway, so both changes are local.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.frontend.trace import Trace
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop.partition_spec import partition_spec


class UnevenValues:
    """The values of a stage that are passed padded.

    Args:
        at_definition: the shardings that each value goes through where it is defined.
        others: values that have another form between pieces.
    """

    def __init__(
        self,
        at_definition: Mapping[int, tuple[TensorSharding, ...]],
        trace: Trace,
        shape: MeshShape,
        mesh: Mesh,
        others: Container[int],
    ) -> None:
        inputs = set(trace.inputs)
        self.shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...], NamedSharding]] = {}
        for value, path in at_definition.items():
            aval = trace.avals[value]
            whole = tuple(aval.shape)
            if value in inputs or value in others or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
                continue
            sharding = path[-1].resolved()
            if len(sharding.dims) == len(whole) and not sharding.divides(whole, shape):
                parts = [shape.sizes(axes) for axes in sharding.dims]
                even = tuple(-(-size // count) * count for size, count in zip(whole, parts, strict=True))
                self.shapes[value] = whole, even, NamedSharding(mesh, partition_spec(sharding))

    def padded(self, value: int, array: Any) -> Any:
        """The array of a value, as a piece returns it."""
        if value not in self.shapes or array.shape != self.shapes[value][0]:
            return array
        whole, even, sharding = self.shapes[value]
        array = jax.lax.with_sharding_constraint(array, sharding)
        more = [(0, to - size, 0) for size, to in zip(whole, even, strict=True)]
        return jax.lax.with_sharding_constraint(jax.lax.pad(array, jnp.zeros((), array.dtype), more), sharding)

    def whole(self, value: int, array: Any) -> Any:
        """The inverse of `padded`; a value from another stage arrives whole, and is split here as planned."""
        if value not in self.shapes:
            return array
        whole, even, sharding = self.shapes[value]
        if array.shape != even:
            return jax.lax.with_sharding_constraint(array, sharding) if array.shape == whole else array
        array = jax.lax.slice(jax.lax.with_sharding_constraint(array, sharding), (0,) * len(whole), whole)
        return jax.lax.with_sharding_constraint(array, sharding)
