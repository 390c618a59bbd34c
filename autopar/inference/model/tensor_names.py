"""Define how a family names and lays out its tensors in a checkpoint.

Out: `Names`, a part of each entry of the table of families, and the rows of fused tensors that belong to each module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rows(NamedTuple):
    """The rows of a stored tensor that are a parameter: those of the parts `first` to `last` of each group.

    Args:
        groups: the number of groups. parts: the parts of each. size: the rows of each part.
        first, last: the first part, and the one after the last.
    """

    groups: int
    parts: int
    size: int
    first: int
    last: int

    @property
    def num_stored(self) -> int:
        """The rows of the stored tensor."""
        return self.groups * self.parts * self.size

    @property
    def numbers(self) -> NDArray[np.intp]:
        """The numbers of the rows, in order, `[groups, parts, size]`."""
        every = np.arange(self.num_stored).reshape(self.groups, self.parts, self.size)
        return every[:, self.first : self.last]


#: The rows of a module's tensor, by the decoder's configuration.
Fused = Mapping[str, Callable[[Any], Rows]]


@dataclass(frozen=True, slots=True)
class Names:
    """The tensor names in the checkpoints of a model family.

    Args:
        prefix: the prefix of all tensors but the head; checkpoints of the bare model lack it.
        modules: the tensor name of each decoder module, with `{}` for the layer's number and `{e}` for the expert's.
        fused: the rows of a module whose weight is a part of a fused tensor, such as QKV.
        transposed: whether linear weights are [in, out].
        not_weights: a pattern of other tensors that some checkpoints hold, such as attention masks.
        head: the name of the head's tensor.
    """

    prefix: str
    modules: Mapping[str, str]
    fused: Fused = field(default_factory=lambda: MappingProxyType({}))
    transposed: bool = False
    not_weights: str = r".*rotary_emb\.inv_freq"
    head: str = "lm_head.weight"

    def changed(self, modules: Mapping[str, str], fused: Fused = MappingProxyType({})) -> Names:
        """The same with other modules and fused tensors."""
        return replace(self, modules={**self.modules, **modules}, fused={**self.fused, **fused})


def heads_in_thirds() -> Fused:
    """All queries, then all keys, then all values."""

    def rows(config: Any, first: int, last: int) -> Rows:
        return Rows(1, config.num_heads + 2 * config.num_kv_heads, config.head_dim, first, last)

    return {
        "query": lambda config: rows(config, 0, config.num_heads),
        "key": lambda config: rows(config, config.num_heads, config.num_heads + config.num_kv_heads),
        "value": lambda config: rows(
            config, config.num_heads + config.num_kv_heads, config.num_heads + 2 * config.num_kv_heads
        ),
    }


def heads_in_groups() -> Fused:
    """For each head of keys and values: its queries, its key, its value."""

    def rows(config: Any, first: int, num: int) -> Rows:
        group = config.num_heads // config.num_kv_heads
        first = first % (group + 2)
        return Rows(config.num_kv_heads, group + 2, config.head_dim, first, first + (num or group))

    return {
        "query": lambda config: rows(config, 0, 0),
        "key": lambda config: rows(config, -2, 1),
        "value": lambda config: rows(config, -1, 1),
    }


def gate_and_up() -> Fused:
    """The gate, then the other projection."""
    return {
        "gate": lambda config: Rows(1, 2, config.mlp_size, 0, 1),
        "up": lambda config: Rows(1, 2, config.mlp_size, 1, 2),
    }


LLAMA = Names(
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
        "experts/router": "layers.{}.mlp.gate",
        "experts/gate": "layers.{}.mlp.experts.{e}.gate_proj",
        "experts/up": "layers.{}.mlp.experts.{e}.up_proj",
        "experts/down": "layers.{}.mlp.experts.{e}.down_proj",
        "experts/shared_gate": "layers.{}.mlp.shared_expert.gate_proj",
        "experts/shared_up": "layers.{}.mlp.shared_expert.up_proj",
        "experts/shared_down": "layers.{}.mlp.shared_expert.down_proj",
        "experts/shared_router": "layers.{}.mlp.shared_expert_gate",
    },
)
MIXTRAL = LLAMA.changed(
    {
        "experts/router": "layers.{}.block_sparse_moe.gate",
        "experts/gate": "layers.{}.block_sparse_moe.experts.{e}.w1",
        "experts/up": "layers.{}.block_sparse_moe.experts.{e}.w3",
        "experts/down": "layers.{}.block_sparse_moe.experts.{e}.w2",
    }
)
OLMO2 = LLAMA.changed(
    {
        "attention_post_norm": "layers.{}.post_attention_layernorm",
        "mlp_post_norm": "layers.{}.post_feedforward_layernorm",
    }
)
GEMMA2 = OLMO2.changed({"mlp_norm": "layers.{}.pre_feedforward_layernorm"})
GLM = LLAMA.changed(dict.fromkeys(("gate", "up"), "layers.{}.mlp.gate_up_proj"), gate_and_up())
GLM4 = GLM.changed(
    {
        "attention_post_norm": "layers.{}.post_self_attn_layernorm",
        "mlp_post_norm": "layers.{}.post_mlp_layernorm",
    }
)
PHI3 = GLM.changed(dict.fromkeys(("query", "key", "value"), "layers.{}.self_attn.qkv_proj"), heads_in_thirds())
GPT2 = Names(
    prefix="transformer.",
    modules={
        "embed": "wte",
        "embed_positions": "wpe",
        "norm": "ln_f",
        "attention_norm": "h.{}.ln_1",
        **dict.fromkeys(("query", "key", "value"), "h.{}.attn.c_attn"),
        "out": "h.{}.attn.c_proj",
        "mlp_norm": "h.{}.ln_2",
        "up": "h.{}.mlp.c_fc",
        "down": "h.{}.mlp.c_proj",
    },
    fused=heads_in_thirds(),
    transposed=True,
    not_weights=r".*\.attn\.(masked_)?bias",
)
GPT_NEOX = Names(
    prefix="gpt_neox.",
    modules={
        "embed": "embed_in",
        "norm": "final_layer_norm",
        "attention_norm": "layers.{}.input_layernorm",
        **dict.fromkeys(("query", "key", "value"), "layers.{}.attention.query_key_value"),
        "out": "layers.{}.attention.dense",
        "mlp_norm": "layers.{}.post_attention_layernorm",
        "up": "layers.{}.mlp.dense_h_to_4h",
        "down": "layers.{}.mlp.dense_4h_to_h",
    },
    fused=heads_in_groups(),
    not_weights=r".*\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
    head="embed_out.weight",
)
FALCON = Names(
    prefix="transformer.",
    modules={
        "embed": "word_embeddings",
        "norm": "ln_f",
        "attention_norm": "h.{}.input_layernorm",
        **dict.fromkeys(("query", "key", "value"), "h.{}.self_attention.query_key_value"),
        "out": "h.{}.self_attention.dense",
        "mlp_norm": "h.{}.post_attention_layernorm",
        "up": "h.{}.mlp.dense_h_to_4h",
        "down": "h.{}.mlp.dense_4h_to_h",
    },
    fused=heads_in_groups(),
    not_weights=r".*\.rotary_emb\.inv_freq",
)
FALCON_TWO_NORMS = FALCON.changed({"attention_norm": "h.{}.ln_attn", "mlp_norm": "h.{}.ln_mlp"})
