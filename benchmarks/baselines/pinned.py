"""Express sharding recipes as pins for `autopar.plan`, so that each recipe has a prediction.

In: the arguments of a step (shapes are enough) and a mesh. Out: path -> `PartitionSpec`, for every tensor of the state
and of the batch. The optimizer state has the shardings of its parameters. Activations are not pinned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autopar.ir.mesh import MeshShape

Pins = dict[str, PartitionSpec]
Shape = tuple[int, ...]

#: Suffixes of the kernels (or biases) that Megatron-LM shards by column and by row.
_COLUMN = re.compile(
    r"(c_attn|c_fc|self/(query|key|value)|attention/(query|key|value)|[qkv]_proj|gate_proj|up_proj"
    r"|intermediate/dense|fc1|qkv|mlp_in|lm_head|head|classifier/\d+)/(kernel|bias)$"
)
_ROW = re.compile(r"(c_proj|[^/]*attn/out_proj|o_proj|down_proj|output/dense|fc2|attention_out|mlp_out)/kernel$")
_VOCABULARY = re.compile(r"(wte|embed_tokens|word_embeddings|shared|token_embed)/embedding$")
#: Hugging Face's GPT-2 has its kernels as (out, in).
_TRANSPOSED = re.compile(r"/(c_attn|c_fc|c_proj)/kernel$")
#: Experts' weights are stacked: each group of GPUs has some whole experts.
_EXPERTS = re.compile(r"(gate|up|down)_experts$")
_CONVOLUTION = re.compile(r"(/convolution/kernel|/normalization/(scale|bias|mean|var))$")


def data_parallel(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """Data parallelism: the state is replicated, and the batch is sharded."""
    return _pins(args, mesh, lambda path, shape: ())


def fsdp(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """ZeRO-3: every tensor of the state is sharded on its largest divisible dim, over the last axis; the batch over all
    axes."""
    size, axis = mesh.axis_sizes[-1], mesh.axis_names[-1]

    def dims(path: str, shape: Shape) -> tuple[str | None, ...]:
        divisible = [dim for dim, length in enumerate(shape) if length % size == 0]
        if not divisible:
            return ()
        return (*(None,) * max(divisible, key=lambda dim: shape[dim]), axis)

    return _pins(args, mesh, dims, mesh.axis_names)


def tensor_parallel(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """Megatron-LM: attention and MLP sharded by column, then by row, and the vocabulary if it divides; the output
    channels of a convolutional network, and the experts of a mixture. The batch is sharded over the other axis."""
    size = mesh.size("model")

    def dims(path: str, shape: Shape) -> tuple[str | None, ...]:
        dim = _split_dim(path, shape)
        return () if dim is None or shape[dim] % size else (*(None,) * dim, "model")

    return _pins(args, mesh, dims)


def is_split_by_columns(module: str) -> bool:
    """Whether tensor parallelism shards the last dim of the result of the module at this path."""
    return bool(_COLUMN.search(f"{module}/kernel"))


def _split_dim(path: str, shape: Shape) -> int | None:
    """The dim of a tensor that tensor parallelism shards."""
    if _CONVOLUTION.search(path) or _COLUMN.search(path):
        return 0 if _TRANSPOSED.search(path) else len(shape) - 1
    if _ROW.search(path):
        return 1 if _TRANSPOSED.search(path) else 0
    return 0 if _VOCABULARY.search(path) or _EXPERTS.search(path) else None


def _pins(
    args: Sequence[Any],
    mesh: MeshShape,
    state_dims: Callable[[str, Shape], tuple[str | None, ...]],
    batch_axes: tuple[str, ...] = ("data",),
) -> Pins:
    state, batch = args
    num_data = mesh.sizes(batch_axes)
    pins = {f"state/{path}": PartitionSpec(*state_dims(path, leaf.shape)) for path, leaf in _leaves(state)}
    for path, leaf in _leaves(batch):
        if leaf.shape[0] % num_data:
            raise ValueError(f"batch/{path} of {leaf.shape[0]} does not divide by {num_data}")
        over = batch_axes[0] if len(batch_axes) == 1 else batch_axes
        pins[f"batch/{path}"] = PartitionSpec(over) if num_data > 1 else PartitionSpec()
    return pins


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
