"""Express sharding recipes as pins for `autopar.plan`, so that each recipe has a prediction.

In: the arguments of a step (shapes are enough) and a mesh. Out: path -> `PartitionSpec`, for every tensor of the state
and of the batch. The optimizer state has the shardings of its parameters, except in ZeRO-1. Activations are not pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autopar.ir.mesh import MeshShape
from benchmarks.baselines import roles

Pins = dict[str, PartitionSpec]
Shape = tuple[int, ...]
#: The mesh axes of each dim: None, one, or several.
Dims = tuple[str | tuple[str, ...] | None, ...]

OPTIMIZER = "opt_state"


def data_parallel(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """Data parallelism: the state is replicated, and the batch is sharded."""
    return pins(args, mesh, lambda path, shape: ())


def zero1(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """ZeRO-1: every tensor of the optimizer state is sharded on its largest divisible dim; parameters are replicated."""

    def dims(path: str, shape: Shape) -> Dims:
        return largest(shape, mesh, mesh.axis_names) if path.startswith(OPTIMIZER) else ()

    return pins(args, mesh, dims, mesh.axis_names)


def fsdp(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """ZeRO-3: every tensor of the state is sharded on its largest divisible dim, over the last axis; the batch over all
    axes. With two axes, `(hosts, GPUs of a host)`, this is HSDP."""
    return pins(args, mesh, lambda path, shape: largest(shape, mesh, mesh.axis_names[-1:]), mesh.axis_names)


def tensor_parallel(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """Megatron-LM: attention and MLP sharded by column, then by row, and the vocabulary if it divides; the output
    channels of a convolutional network, and the experts of a mixture. The batch is sharded over the other axis."""
    size = mesh.size("model")

    def dims(path: str, shape: Shape) -> Dims:
        dim = roles.tensor_dim(path, shape)
        return () if dim is None or shape[dim] % size else (*(None,) * dim, "model")

    return pins(args, mesh, dims)


def sequence_tensor_parallel(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """The state for Megatron-LM's tensor and sequence parallelism: as `tensor_parallel`, but a fused QKV kernel is
    sharded by its input, because its columns are computed for each device's part of the sequence."""
    return _tensor_and(args, mesh, ())


def fsdp_tensor_parallel(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """The same, and what is left is sharded over `data` on the largest other dim."""
    return _tensor_and(args, mesh, ("data",))


def vocabulary_split(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """The vocabulary of embedding and head over `model`; all other state as ZeRO-3, and the batch, over all axes."""

    def dims(path: str, shape: Shape) -> Dims:
        dim = roles.vocabulary_dim(path, shape)
        if dim is None or shape[dim] % mesh.size("model"):
            return largest(shape, mesh, mesh.axis_names)
        return largest(shape, mesh, ("data",), placed={dim: "model"})

    return pins(args, mesh, dims, mesh.axis_names)


def context_parallel(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """The batch over `data`, its sequence over `context`; the state as ZeRO-3 over both."""
    return pins(args, mesh, lambda path, shape: largest(shape, mesh, mesh.axis_names), second_axes=("context",))


def expert_parallel(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """Experts over `expert`; all other state as ZeRO-3, and the batch, over all axes. With an axis `model`, what tensor parallelism shards is
    over that; with `context`, the tokens are. Both axes shard the experts' weights, too."""
    batch = tuple(axis for axis in mesh.axis_names if axis not in ("model", "context"))
    others = tuple(axis for axis in mesh.axis_names if axis != "expert")
    tokens = tuple(axis for axis in mesh.axis_names if axis == "context")

    def dims(path: str, shape: Shape) -> Dims:
        if roles.is_expert(path) and shape[0] % mesh.size("expert") == 0:
            return largest(shape, mesh, others, placed={0: "expert"})
        placed = _tensor_placed(path, shape, mesh) if "model" in mesh.axis_names else {}
        return largest(shape, mesh, batch if placed else mesh.axis_names, placed)

    return pins(args, mesh, dims, batch, tokens)


def largest(shape: Shape, mesh: MeshShape, axes: tuple[str, ...], placed: dict[int, str] | None = None) -> Dims:
    """The largest divisible dim over all of `axes`, beside dims that have an axis already."""
    size, dims = mesh.sizes(axes), dict[int, Any](placed or {})
    divisible = [dim for dim, length in enumerate(shape) if length % size == 0 and dim not in dims]
    if divisible and size > 1:
        dims[max(divisible, key=lambda dim: shape[dim])] = axes[0] if len(axes) == 1 else axes
    return tuple(dims.get(dim) for dim in range(max(dims, default=-1) + 1))


def pins(
    args: Sequence[Any],
    mesh: MeshShape,
    state_dims: Callable[[str, Shape], Dims],
    batch_axes: tuple[str, ...] = ("data",),
    second_axes: tuple[str, ...] = (),
) -> Pins:
    """Pins of the state by a function of path and shape.

    Args:
        batch_axes: axes of the first dim of the batch.
        second_axes: axes of its second dim.

    Raises:
        ValueError: the batch does not divide.
    """
    state, batch = args
    found = {f"state/{path}": PartitionSpec(*state_dims(path, leaf.shape)) for path, leaf in leaves(state)}
    for path, leaf in leaves(batch):
        entries = []
        for length, axes in zip(leaf.shape, (batch_axes, second_axes), strict=False):
            if length % mesh.sizes(axes):
                raise ValueError(f"batch/{path} of {length} does not divide by {mesh.sizes(axes)}")
            entries.append((axes[0] if len(axes) == 1 else axes) if mesh.sizes(axes) > 1 else None)
        while entries and entries[-1] is None:
            entries.pop()
        found[f"batch/{path}"] = PartitionSpec(*entries)
    return found


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a pytree with their paths."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in found]


def _tensor_and(args: Sequence[Any], mesh: MeshShape, others: tuple[str, ...]) -> Pins:
    return pins(args, mesh, lambda path, shape: largest(shape, mesh, others, _tensor_placed(path, shape, mesh)))


def _tensor_placed(path: str, shape: Shape, mesh: MeshShape) -> dict[int, str]:
    """The dim that tensor and sequence parallelism shard over `model`, if there is one that divides."""
    dim = roles.tensor_dim(path, shape)
    if dim is not None and roles.is_fused(path):
        dim = 1 - dim if len(shape) == 2 else None
    return {} if dim is None or shape[dim] % mesh.size("model") else {dim: "model"}
