"""Sharding recipes as experts write them by hand, for a GPT with fused QKV.

A recipe is a mesh and two functions from a tensor's path and shape to its `PartitionSpec`; it is applied by `jax.jit`'s
in and out shardings. Paths are like `params/block_0/qkv/kernel`; a path of the optimizer state ends with the path of
its parameter and has the same sharding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

SpecOf = Callable[[str, tuple[int, ...]], PartitionSpec]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sharding of every tensor of a `TrainState` and of the batch on a mesh with these axes.

    Args:
        axes: name and size of each mesh axis.
        state_spec, batch_spec: functions from a tensor's path and shape to its `PartitionSpec`.
        gather_params: whether the step first all-gathers the parameters. Without this constraint, XLA reshards
            activations rather than gather sharded weights.
    """

    axes: dict[str, int]
    state_spec: SpecOf
    batch_spec: SpecOf
    gather_params: bool = False

    def mesh(self) -> Mesh:
        """The mesh, over the visible devices."""
        types = (AxisType.Auto,) * len(self.axes)
        return jax.make_mesh(tuple(self.axes.values()), tuple(self.axes), axis_types=types)


def apply(
    recipe: Recipe, step: Callable[..., Any], create_state: Callable[[jax.Array], Any], batch: Any
) -> tuple[Callable[..., Any], Any]:
    """The step jitted with the recipe's shardings, and its state, created sharded."""
    mesh, rng = recipe.mesh(), jax.random.key(0)
    state = _shardings(mesh, recipe.state_spec, jax.eval_shape(create_state, rng))
    whole = NamedSharding(mesh, PartitionSpec())
    inputs = (state, _shardings(mesh, recipe.batch_spec, batch))

    def gathered_step(state: Any, batch: Any) -> Any:
        return step(state.replace(params=jax.lax.with_sharding_constraint(state.params, whole)), batch)

    run = gathered_step if recipe.gather_params else step
    jitted = jax.jit(run, in_shardings=inputs, out_shardings=(state, whole), donate_argnums=0)
    return jitted, jax.jit(create_state, out_shardings=state)(rng)


def data_parallel(num_devices: int) -> Recipe:
    """Data parallelism: the state is replicated, and the batch is sharded."""
    return Recipe({"data": num_devices}, _replicated, _split_batch)


def fsdp(num_devices: int, gather_params: bool) -> Recipe:
    """ZeRO-3: every tensor of the state is sharded on its largest divisible dim; so is the batch."""

    def state_spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        divisible = [dim for dim, size in enumerate(shape) if size % num_devices == 0]
        if not divisible:
            return PartitionSpec()
        largest = max(divisible, key=lambda dim: shape[dim])
        return PartitionSpec(*(None,) * largest, "data")

    return Recipe({"data": num_devices}, state_spec, _split_batch, gather_params)


def megatron(num_data: int, num_model: int) -> Recipe:
    """Megatron-LM: attention and MLP sharded by column, then by row; embedding and head sharded over the vocabulary."""
    column, row, vector = PartitionSpec(None, "model"), PartitionSpec("model"), PartitionSpec("model")
    table = {
        r"(qkv|mlp_in|head)/kernel$": column,
        r"(qkv|mlp_in)/bias$": vector,
        r"(attention_out|mlp_out)/kernel$": row,
        r"token_embed/embedding$": row,
    }

    def state_spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        return next((spec for pattern, spec in table.items() if re.search(pattern, path)), PartitionSpec())

    return Recipe({"data": num_data, "model": num_model}, state_spec, _split_batch)


def recipes(num_devices: int) -> dict[str, Recipe]:
    """All recipes; Megatron on every mesh from tensor parallelism alone to two model shards."""
    hybrids = {
        f"Megatron {data}x{num_devices // data}": megatron(data, num_devices // data)
        for data in range(1, num_devices)
        if num_devices % data == 0
    }
    return {
        "data parallel": data_parallel(num_devices),
        "FSDP": fsdp(num_devices, gather_params=True),
        "FSDP, shardings only": fsdp(num_devices, gather_params=False),
        **hybrids,
    }


def _replicated(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec()


def _split_batch(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec("data")


def _shardings(mesh: Mesh, spec_of: SpecOf, tree: Any) -> Any:
    def sharding(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec_of(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape))

    return jax.tree_util.tree_map_with_path(sharding, tree)
