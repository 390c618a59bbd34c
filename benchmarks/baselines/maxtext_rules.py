"""Shard a model of the zoo by MaxText's default logical axis rules.

In: the arguments of a step, a mesh with some of MaxText's axes. Out: pins. Each dim of a parameter has a logical name,
as MaxText's own layers name the dims of such a parameter; the rules map it to mesh axes.

Source: the wheel `maxtext` 0.2.5 on PyPI. Rules: `logical_axis_rules` of `configs/base.yml`, training only, without the
axes of other schemes (pipelines, DiLoCo, Ulysses, autoregressive decoding), whose default size is 1. Names of dims:
`kernel_axes` in `layers/attentions.py`, `linears.py`, `moe.py`, `embeddings.py`, `normalizations.py`. Default mesh:
`ici_fsdp_parallelism: -1` within a host, `dcn_data_parallelism: -1` between hosts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from autopar.ir.mesh import MeshShape
from benchmarks.baselines import pinned
from benchmarks.baselines.pinned import Dims, Pins, Shape

#: Logical name -> mesh axes, all of which shard the dim.
RULES: dict[str, tuple[str, ...]] = {
    "activation_batch": ("data", "fsdp", "fsdp_transpose", "expert"),
    "activation_norm_length": ("tensor_sequence", "context"),
    "activation_length_attn": ("context",),
    "activation_kv_length": (),
    "activation_heads": ("tensor", "tensor_sequence"),
    "activation_embed": ("tensor",),
    "activation_mlp": ("tensor", "tensor_sequence"),
    "activation_vocab": ("tensor", "tensor_sequence"),
    "vocab": ("tensor", "tensor_sequence"),
    "embed_vocab": ("fsdp", "fsdp_transpose", "context", "expert"),
    "embed_attn": ("fsdp", "fsdp_transpose", "context", "expert"),
    "embed": ("fsdp", "fsdp_transpose", "context", "expert"),
    "heads": ("tensor", "tensor_sequence"),
    "mlp": ("fsdp_transpose", "tensor", "tensor_sequence"),
    "norm": ("tensor",),
    "exp": ("expert",),
    "embed_moe": ("fsdp", "fsdp_transpose", "context"),
    "mlp_moe": ("fsdp_transpose", "tensor", "tensor_sequence"),
    "embed_router": ("fsdp", "fsdp_transpose", "context"),
}
#: Path -> logical names of the dims. The zoo's attention kernels have heads and their width as one dim.
_NAMES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(wte|embed_tokens|word_embeddings|shared|token_embedding)/embedding$", ("vocab", "embed_vocab")),
    (r"embedding$", (None, "embed_vocab")),
    (r"lm_head/kernel$", ("embed_vocab", "vocab")),
    (r"h/\d+/attn/c_attn/kernel$", ("heads", "embed_attn")),
    (r"h/\d+/attn/c_proj/kernel$", ("embed_attn", "heads")),
    (r"mlp/c_fc/kernel$", ("mlp", "embed")),
    (r"mlp/c_proj/kernel$", ("embed", "mlp")),
    (r"(self/(query|key|value)|attention/(query|key|value)|[qkv]_proj)/kernel$", ("embed_attn", "heads")),
    (r"(o_proj|attn/out_proj|attention/output/dense)/kernel$", ("heads", "embed_attn")),
    (r"(gate_proj|up_proj|fc1|fc_in|intermediate/dense)/kernel$", ("embed", "mlp")),
    (r"(down_proj|fc2|fc_out|output/dense)/kernel$", ("mlp", "embed")),
    (r"(gate|up)_experts$", ("exp", "embed_moe", "mlp_moe")),
    (r"down_experts$", ("exp", "mlp_moe", "embed_moe")),
    (r"router/kernel$", ("embed_router", None)),
    (r"(norm|layernorm\w*|ln_\w+|LayerNorm|layer_norm\w*)/(scale|weight|bias)$", ("norm",)),
    (r"kernel$", ("embed", "mlp")),
)


def maxtext(args: Sequence[Any], mesh: MeshShape) -> Pins:
    """Every tensor of the state by the rules; the batch as `activation_batch`."""

    def dims(path: str, shape: Shape) -> Dims:
        return mesh_axes(_names_of(path), shape, mesh)

    return pinned.pins(args, mesh, dims, _present(RULES["activation_batch"], mesh))


def mesh_axes(names: Sequence[str | None], shape: Shape, mesh: MeshShape) -> Dims:
    """The mesh axes of dims with these logical names. An axis shards one dim only, the first that names it; a dim that
    does not divide stays whole, because `jax.jit` refuses it."""
    taken, found = set[str](), list[Any]()
    for name, length in zip(names, shape, strict=False):
        axes = tuple(axis for axis in _present(RULES.get(name or "", ()), mesh) if axis not in taken)
        if not axes or length % mesh.sizes(axes):
            found.append(None)
            continue
        taken.update(axes)
        found.append(axes[0] if len(axes) == 1 else axes)
    while found and found[-1] is None:
        found.pop()
    return tuple(found)


def _names_of(path: str) -> tuple[str | None, ...]:
    """The logical names of a tensor of the state; none for counters, biases and the weights of convolutions."""
    if "convolution" in path:
        return ()
    return next((names for pattern, names in _NAMES if re.search(pattern, path)), ())


def _present(axes: Sequence[str], mesh: MeshShape) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in mesh.axis_names and mesh.size(axis) > 1)
