"""Map each decoder parameter to its tensor in a checkpoint: name, shape, layout.

In: a decoder's configuration, and the path and shape of one of its parameters. Out: a `Source`: the tensor's name and shape
in the file, and the part of the tensor that is the parameter. A parameter is a view of its tensor, so a slice of the
parameter is read as a slice of the tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from autopar.inference.model.config import DecoderConfig

Path = tuple[str, ...]
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Source:
    """The stored tensor of one parameter.

    Args:
        name: the tensor's name. stored_shape: the tensor's shape.
        shape: the parameter's shape.
        part, parts: the parameter is part number `part` of `parts` equal parts of the tensor's output dim.
        transposed: whether the tensor is [in, out].
    """

    name: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    part: int
    parts: int
    transposed: bool

    def view(self, stored: NDArray[Any]) -> NDArray[Any]:
        """The parameter as a view of its tensor, without a copy."""
        outs_first = stored.T if self.transposed else stored
        return outs_first.reshape(self.parts, *self.shape)[self.part]


@dataclass(frozen=True, slots=True)
class _Names:
    """The tensor names in the checkpoints of a model family.

    Args:
        prefix: the prefix of all tensors but the head; checkpoints of the bare model lack it.
        modules: the tensor name of each decoder module, with `{}` for the layer number.
        fused: for a module whose weight is a part of a fused tensor, such as QKV: (index of the part, number of parts).
        transposed: whether linear weights are [in, out].
        not_weights: a pattern of other tensors that some checkpoints hold, such as attention masks.
    """

    prefix: str
    modules: Mapping[str, str]
    fused: Mapping[str, tuple[int, int]]
    transposed: bool
    not_weights: str


_LLAMA = _Names(
    prefix="model.",
    modules={
        "embed": "embed_tokens",
        "norm": "norm",
        "attention_norm": "layers.{}.input_layernorm",
        "query": "layers.{}.self_attn.q_proj",
        "key": "layers.{}.self_attn.k_proj",
        "value": "layers.{}.self_attn.v_proj",
        "out": "layers.{}.self_attn.o_proj",
        "query_norm": "layers.{}.self_attn.q_norm",
        "key_norm": "layers.{}.self_attn.k_norm",
        "mlp_norm": "layers.{}.post_attention_layernorm",
        "gate": "layers.{}.mlp.gate_proj",
        "up": "layers.{}.mlp.up_proj",
        "down": "layers.{}.mlp.down_proj",
    },
    fused={},
    transposed=False,
    not_weights=r".*rotary_emb\.inv_freq",
)
_GPT2 = _Names(
    prefix="transformer.",
    modules={
        "embed": "wte",
        "embed_positions": "wpe",
        "norm": "ln_f",
        "attention_norm": "h.{}.ln_1",
        "query": "h.{}.attn.c_attn",
        "key": "h.{}.attn.c_attn",
        "value": "h.{}.attn.c_attn",
        "out": "h.{}.attn.c_proj",
        "mlp_norm": "h.{}.ln_2",
        "up": "h.{}.mlp.c_fc",
        "down": "h.{}.mlp.c_proj",
    },
    fused={"query": (0, 3), "key": (1, 3), "value": (2, 3)},
    transposed=True,
    not_weights=r".*\.attn\.(masked_)?bias",
)
_FAMILIES = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "gpt2": _GPT2}


def prefix(config: DecoderConfig) -> str:
    """The prefix of tensor names, as `transformers` writes them."""
    return _FAMILIES[config.family].prefix


def source(config: DecoderConfig, path: Path, shape: tuple[int, ...]) -> Source:
    """Map a parameter to its stored tensor.

    Args:
        path: the path in the decoder's parameters, such as `("layers_3", "query", "weight")`.
        shape: the parameter's shape.
    """
    *outer, module, leaf = path
    if module == "head":
        return Source(HEAD, shape, shape, 0, 1, False)
    names = _FAMILIES[config.family]
    layer = outer[0].removeprefix("layers_") if outer else ""
    part, parts = names.fused.get(module, (0, 1))
    transposed = names.transposed and leaf == "weight" and not module.startswith("embed")
    flat = _flat(shape, module, leaf)
    stored = (flat[0] * parts, *flat[1:])
    name = f"{names.prefix}{names.modules[module].format(layer)}.{leaf}"
    return Source(name, stored[::-1] if transposed else stored, shape, part, parts, transposed)


def is_ignored(config: DecoderConfig, name: str) -> bool:
    """Whether a checkpoint may hold this tensor without a parameter for it: a mask, or the head of a tied model."""
    return (config.tied and name == HEAD) or bool(re.fullmatch(_FAMILIES[config.family].not_weights, name))


def _flat(shape: tuple[int, ...], module: str, leaf: str) -> tuple[int, ...]:
    """A parameter's shape in the checkpoint, before transposition: [out, in] with the heads merged; a bias is [out]."""
    if leaf == "bias":
        return (math.prod(shape),)
    if len(shape) == 1:
        return shape
    if module == "out":
        return (shape[0], math.prod(shape[1:]))
    return (math.prod(shape[:-1]), shape[-1])
