"""Jit a step by a recipe as its user would write it: with `in_shardings` and `out_shardings` alone.

In: a step, its arguments (shapes are enough), pins from `pinned`, and a mesh, with or without devices. Out: the result
of `jax.jit`. Without devices, `autopar.diagnose` can read it.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.ir.mesh import MeshShape
from autopar.runtime.jit import abstract_mesh
from benchmarks.baselines.pinned import Pins


def jitted(step: Any, args: tuple[Any, Any], pins: Pins, mesh: MeshShape | Mesh) -> Any:
    """The jitted step `(state, batch) -> (state, loss)`; the new state has the old one's shardings, and the old one is
    donated."""
    over = abstract_mesh(mesh) if isinstance(mesh, MeshShape) else mesh
    shardings = shardings_of(args, pins, over)
    out = (shardings[0], NamedSharding(over, PartitionSpec()))
    return jax.jit(step, in_shardings=shardings, out_shardings=out, donate_argnums=0)


def shardings_of(args: tuple[Any, Any], pins: Pins, mesh: Any) -> tuple[Any, Any]:
    """Shardings of the state and of the batch, as pytrees."""

    def named(root: str, tree: Any) -> Any:
        def one(path: Any, leaf: Any) -> NamedSharding:
            return NamedSharding(mesh, pins[f"{root}/{jax.tree_util.keystr(path, simple=True, separator='/')}"])

        return jax.tree_util.tree_map_with_path(one, tree)

    return named("state", args[0]), named("batch", args[1])
