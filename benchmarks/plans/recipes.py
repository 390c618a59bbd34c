"""Define sharding recipes by hand, each as most users write it and as an expert does.

In: a step `(state, batch) -> (state, loss)` of a Flax linen model, its arguments as shapes, a mesh. Out: the jitted
step. A user gives the shardings of inputs and outputs only. An expert also gives those of activations at the end of
every module, as MaxText does. This needs no change to the model, because Flax can intercept its modules' calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.ir.mesh import MeshShape
from autopar.runtime.jit import abstract_mesh
from benchmarks.baselines import pinned
from benchmarks.baselines.jitted import jitted
from benchmarks.baselines.pinned import Pins

DATA, MODEL, FSDP = "data", "model", "fsdp"
GPUS_PER_HOST = 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to shard, for a mesh.

    Args:
        name: name in the table, e.g. "FSDP" or "data x tensor 2x4".
    """

    name: str
    mesh: MeshShape
    pins: Callable[[Sequence[Any], MeshShape], Pins]

    def by_user(self, step: Any, args: tuple[Any, Any]) -> Any:
        """The step with the shardings of inputs and outputs only."""
        return jitted(step, args, self.pins(args, self.mesh), self.mesh)

    def by_expert(self, step: Any, args: tuple[Any, Any]) -> Any:
        """The step with the shardings of activations too."""
        over, sizes = abstract_mesh(self.mesh), _batch_sizes(args[1])

        def constrained(method: Any, given: Any, named: Any, context: nn.module.InterceptorContext) -> Any:
            result = method(*given, **named)
            if context.method_name != "__call__":
                return result
            path = "/".join(map(str, context.module.path))
            return jax.tree.map(lambda leaf: self._constrained(path, leaf, sizes, over), result)

        def as_an_expert(state: Any, batch: Any) -> Any:
            with nn.intercept_methods(constrained):
                return step(state, batch)

        return jitted(as_an_expert, args, self.pins(args, self.mesh), self.mesh)

    def _constrained(self, path: str, value: Any, batch_sizes: set[int], over: Any) -> Any:
        """A module's result with a sharding constraint: the batch is sharded, and so is the last dim if the module is
        sharded by columns."""
        if not isinstance(value, jax.Array) or value.ndim < 2 or value.shape[0] not in batch_sizes:
            return value
        dims: list[Any] = [None] * value.ndim
        batch_axes = tuple(axis for axis in self.mesh.axis_names if axis != MODEL)
        if value.shape[0] % self.mesh.sizes(batch_axes) == 0:
            dims[0] = batch_axes
        num_model = self.mesh.size(MODEL) if MODEL in self.mesh.axis_names else 1
        if num_model > 1 and pinned.is_split_by_columns(path) and value.shape[-1] % num_model == 0:
            dims[-1] = MODEL
        return jax.lax.with_sharding_constraint(value, NamedSharding(over, PartitionSpec(*dims)))


def recipes(num_gpus: int, batch: int) -> list[Recipe]:
    """All recipes for this number of GPUs that can shard the batch; tensor parallelism stays within a host."""
    found = []
    if batch % num_gpus == 0:
        found += [
            Recipe("data parallel", MeshShape((DATA,), (num_gpus,)), pinned.data_parallel),
            Recipe("FSDP", MeshShape((DATA,), (num_gpus,)), pinned.fsdp),
        ]
        if num_gpus > GPUS_PER_HOST:
            hosts = MeshShape((DATA, FSDP), (num_gpus // GPUS_PER_HOST, GPUS_PER_HOST))
            found.append(Recipe("FSDP within hosts", hosts, pinned.fsdp))
    for num_model in (2, 4, 8):
        num_data = num_gpus // num_model
        if num_model <= num_gpus and batch % num_data == 0:
            name = "tensor parallel" if num_data == 1 else f"data x tensor {num_data}x{num_model}"
            found.append(Recipe(name, MeshShape((DATA, MODEL), (num_data, num_model)), pinned.tensor_parallel))
    return found


def _batch_sizes(batch: Any) -> set[int]:
    """The first dims of a batch's arrays."""
    return {leaf.shape[0] for leaf in jax.tree.leaves(batch) if math.prod(leaf.shape)}
