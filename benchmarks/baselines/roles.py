"""Name the role of a parameter or module in Megatron-LM's tensor parallelism, by its path.

In: a path of a model of the zoo, such as `transformer/h/0/attn/c_attn/kernel`. Out: its role, and the dim that it
shards. The optimizer state has its parameters' paths behind its own.
"""

from __future__ import annotations

import re

#: Suffixes of the modules that Megatron-LM shards by column, in front of `/kernel` or `/bias`.
_COLUMN_MODULE = (
    r"(c_attn|c_fc|self/(query|key|value)|attention/(query|key|value)|[qkv]_proj|gate_proj|up_proj"
    r"|intermediate/dense|fc1|fc_in|qkv|mlp_in|lm_head|head|classifier/\d+)"
)
_COLUMN = re.compile(_COLUMN_MODULE + r"/(kernel|bias)$")
#: The same of the modules sharded by row.
_ROW = re.compile(r"(c_proj|[^/]*attn/out_proj|o_proj|down_proj|output/dense|fc2|fc_out|attention_out|mlp_out)/kernel$")
_VOCABULARY = re.compile(r"(wte|embed_tokens|word_embeddings|shared|token_embed)/embedding$")
_HEAD = re.compile(r"(^|/)lm_head/(kernel|bias)$")
#: Queries, keys and values in one kernel: a contiguous part of its columns is no set of whole heads.
_FUSED = re.compile(r"(^|/)c_attn/(kernel|bias)$")
#: Hugging Face's GPT-2 has its kernels as (out, in).
_TRANSPOSED = re.compile(r"/(c_attn|c_fc|c_proj)/kernel$")
#: Experts' weights are stacked: each group of GPUs has some whole experts.
_EXPERTS = re.compile(r"(gate|up|down)_experts$")
_CONVOLUTION = re.compile(r"(/convolution/kernel|/normalization/(scale|bias|mean|var))$")


def tensor_dim(path: str, shape: tuple[int, ...]) -> int | None:
    """The dim of a tensor that tensor parallelism shards: columns, rows, the vocabulary, the channels of a
    convolutional network, or the experts of a mixture."""
    if _CONVOLUTION.search(path) or _COLUMN.search(path):
        return 0 if _TRANSPOSED.search(path) else len(shape) - 1
    if _ROW.search(path):
        return 1 if _TRANSPOSED.search(path) else 0
    return 0 if _VOCABULARY.search(path) or _EXPERTS.search(path) else None


def vocabulary_dim(path: str, shape: tuple[int, ...]) -> int | None:
    """The dim of an embedding or head that counts the vocabulary."""
    if _HEAD.search(path):
        return len(shape) - 1
    return 0 if _VOCABULARY.search(path) else None


def is_fused(path: str) -> bool:
    """Whether queries, keys and values are one kernel (or bias)."""
    return bool(_FUSED.search(path))


def is_expert(path: str) -> bool:
    """Whether the tensor has one part for each expert."""
    return bool(_EXPERTS.search(path))


def is_split_by_columns(module: str) -> bool:
    """Whether tensor parallelism shards the last dim of the result of the module at this path."""
    return bool(_COLUMN.search(f"{module}/kernel"))


def is_split_by_rows(module: str) -> bool:
    """Whether tensor parallelism sums the result of the module at this path over the axis."""
    return bool(_ROW.search(f"{module}/kernel"))
