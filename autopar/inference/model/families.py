"""List the families of decoders: how each one's `config.json` is read, and how its tensors are named.

In: the fields of a `config.json`. Out: `FAMILIES`; a family is an entry. `fields` returns those of `DecoderConfig`, where each
default is that of `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.errors import ModelError
from autopar.inference.model import tensor_names as names
from autopar.inference.model.config_fields import Fields
from autopar.inference.model.layer_kinds import Experts, layers_of
from autopar.inference.model.tensor_names import Names


@dataclass(frozen=True, slots=True)
class Family:
    """A family of decoders.

    Args:
        fields: the fields of `DecoderConfig`, without `family` and `dtype`, from those of a `config.json`.
        names: the tensor names, by the configuration.
    """

    fields: Callable[[Fields], dict[str, Any]]
    names: Callable[[Any], Names]


def _like_llama(
    fields: Fields,
    *,
    max_positions: int,
    qkv_bias: bool = False,
    out_bias: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    base: float = 10_000.0,
    share: float = 1.0,
    epsilon: float = 1e-6,
    tied: bool = False,
    window: int | None = None,
    has_window: tuple[bool, ...] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The fields of the LLaMA family and its successors.

    Args:
        activation: the field of the activation function, and its default.
        base, share: as for `Fields.rotary`. epsilon, tied: the defaults of these fields.
        window, has_window: as for `layers_of`.
        changes: other fields.
    """
    hidden, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    num_layers = fields.take("num_hidden_layers", int)
    found = {
        "vocab_size": fields.take("vocab_size", int),
        "hidden_size": hidden,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": fields.take("num_key_value_heads", int, kv_heads or heads),
        "head_dim": fields.take("head_dim", int, head_dim or hidden // heads),
        "mlp_size": fields.take("intermediate_size", int),
        "max_positions": fields.take("max_position_embeddings", int, max_positions),
        "norm": "rms",
        "norm_epsilon": fields.take("rms_norm_eps", float, epsilon),
        "activation": fields.activation(*activation),
        "gated": True,
        "tied": fields.take("tie_word_embeddings", bool, tied),
        "qkv_bias": qkv_bias,
        "out_bias": out_bias,
        "mlp_bias": False,
    }
    if "layers" not in changes:
        rotary = fields.rotary(base, share=share)
        found["layers"] = layers_of(num_layers, rotary=rotary, window=window, has_window=has_window)
    return found | changes


def _attention_bias(fields: Fields) -> dict[str, Any]:
    """One field for the biases of all four projections."""
    bias = fields.take("attention_bias", bool, False)
    return {"qkv_bias": bias, "out_bias": bias}


def _llama(fields: Fields) -> dict[str, Any]:
    bias = _attention_bias(fields)
    return _like_llama(fields, **bias, mlp_bias=fields.take("mlp_bias", bool, False), max_positions=2048)


def _mistral(fields: Fields) -> dict[str, Any]:
    window = fields.take("sliding_window", int, None) if "sliding_window" in fields.fields else 4096
    return _like_llama(fields, kv_heads=8, max_positions=131072, window=window)


def _mixtral(fields: Fields) -> dict[str, Any]:
    experts = Experts(
        num=fields.take("num_local_experts", int, 8),
        per_token=fields.take("num_experts_per_tok", int, 2),
        size=fields.take("intermediate_size", int),
        is_normalized=True,
    )
    num_layers, window = fields.take("num_hidden_layers", int), fields.take("sliding_window", int, None)
    layers = layers_of(num_layers, rotary=fields.rotary(1e6), window=window, experts=experts)
    return _like_llama(fields, kv_heads=8, max_positions=131072, epsilon=1e-5, layers=layers)


def _qwen_window(fields: Fields) -> dict[str, Any]:
    """Qwen's windows: `use_sliding_window` switches them on, for the layers from `max_window_layers` on."""
    if not fields.take("use_sliding_window", bool, False):
        fields.layer_types(num_layers := fields.take("num_hidden_layers", int), [False] * num_layers)
        return {}
    num_layers, first = fields.take("num_hidden_layers", int), fields.take("max_window_layers", int, 28)
    has_window = fields.layer_types(num_layers, [layer >= first for layer in range(num_layers)])
    return {"window": fields.take("sliding_window", int, 4096), "has_window": has_window}


def _qwen2(fields: Fields) -> dict[str, Any]:
    return _like_llama(fields, qkv_bias=True, max_positions=32768, **_qwen_window(fields))


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias, window = _attention_bias(fields), _qwen_window(fields)
    return _like_llama(fields, **bias, qk_norm="head", head_dim=128, max_positions=32768, **window)


def _sparse_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers of a Qwen MoE have experts."""
    step, dense = fields.take("decoder_sparse_step", int, 1), fields.take("mlp_only_layers", list, [])
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    num_layers = fields.take("num_hidden_layers", int)
    experts = Experts(
        num=fields.take("num_experts", int, 60),
        per_token=fields.take("num_experts_per_tok", int, 4),
        size=fields.take("moe_intermediate_size", int, 1408),
        is_normalized=fields.take("norm_topk_prob", bool, False),
        shared_size=fields.take("shared_expert_intermediate_size", int, 5632),
    )
    is_on, first = fields.take("use_sliding_window", bool, False), fields.take("max_window_layers", int, 28)
    default = [is_on and layer % 2 == 0 and layer < first for layer in range(num_layers)]
    layers = layers_of(
        num_layers,
        rotary=fields.rotary(10_000.0),
        window=fields.take("sliding_window", int, 4096) if is_on else None,
        has_window=fields.layer_types(num_layers, default),
        experts=experts,
        has_experts=_sparse_layers(fields, num_layers),
    )
    bias = fields.take("qkv_bias", bool, True)
    return _like_llama(fields, qkv_bias=bias, kv_heads=16, max_positions=32768, layers=layers)


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    num_layers = fields.take("num_hidden_layers", int)
    experts = Experts(
        num=fields.take("num_experts", int, 128),
        per_token=fields.take("num_experts_per_tok", int, 8),
        size=fields.take("moe_intermediate_size", int, 768),
        is_normalized=fields.take("norm_topk_prob", bool, False),
    )
    is_on = fields.take("use_sliding_window", bool, False)
    layers = layers_of(
        num_layers,
        rotary=fields.rotary(10_000.0),
        window=fields.take("sliding_window", int, 4096) if is_on else None,
        experts=experts,
        has_experts=_sparse_layers(fields, num_layers),
    )
    return _like_llama(
        fields, **_attention_bias(fields), qk_norm="head", kv_heads=4, max_positions=32768, layers=layers
    )


def _like_gemma(fields: Fields, activation: str, **changes: Any) -> dict[str, Any]:
    """What the Gemma families share: norms whose factor is one plus the weight, and scaled embeddings."""
    fields.refuse("use_bidirectional_attention", False)
    hidden = fields.take("hidden_size", int)
    found = _like_llama(
        fields,
        **_attention_bias(fields),
        head_dim=256,
        activation=(activation, "gelu_pytorch_tanh"),
        norm="rms_one",
        embedding_scale=math.sqrt(hidden),
        **{"max_positions": 8192, "tied": True, **changes},
    )
    # "gelu" in the first checkpoints stands for its approximation by tanh.
    return found | {"activation": "gelu_tanh" if found["activation"] == "gelu" else found["activation"]}


def _gemma(fields: Fields) -> dict[str, Any]:
    is_new = fields.fields.get("hidden_activation") is not None
    return _like_gemma(fields, "hidden_activation" if is_new else "hidden_act", kv_heads=16)


def _gemma_scores(fields: Fields) -> dict[str, Any]:
    return {
        "attention_scale": fields.take("query_pre_attn_scalar", float, 256.0) ** -0.5,
        "post_norm": True,
        "kv_heads": 4,
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    num_layers = fields.take("num_hidden_layers", int)
    has_window = fields.layer_types(num_layers, [layer % 2 == 0 for layer in range(num_layers)])
    caps = {
        name: fields.take(field, float, None) if field in fields.fields else default
        for name, field, default in (
            ("attention_softcap", "attn_logit_softcapping", 50.0),
            ("logit_softcap", "final_logit_softcapping", 30.0),
        )
    }
    window = fields.take("sliding_window", int, 4096)
    return _like_gemma(
        fields, "hidden_activation", window=window, has_window=has_window, **_gemma_scores(fields), **caps
    )


def _gemma3(fields: Fields) -> dict[str, Any]:
    """Layers with a window have a rotary embedding of their own."""
    num_layers, every = fields.take("num_hidden_layers", int), fields.take("sliding_window_pattern", int, 6)
    has_window = fields.layer_types(num_layers, [(layer + 1) % every != 0 for layer in range(num_layers)])
    both = fields.take("rope_parameters", dict, None)
    if both is None:
        local = Fields({"rope_theta": fields.take("rope_local_base_freq", float, 10_000.0)}, fields.source).rotary(1e4)
        whole = fields.rotary(1e6)
    else:
        parts = Fields(both, f"{fields.source}, rope_parameters")
        local, whole = (
            Fields({**fields.fields, "rope_parameters": parts.take(name, dict, {}), "rope_theta": None}, fields.source)
            for name in ("sliding_attention", "full_attention")
        )
        local, whole = local.rotary(1e4), whole.rotary(1e6)
    layers = layers_of(
        num_layers,
        rotary=[local if windowed else whole for windowed in has_window],
        window=fields.take("sliding_window", int, 4096),
        has_window=has_window,
    )
    return _like_gemma(
        fields,
        "hidden_activation",
        **_gemma_scores(fields),
        attention_softcap=fields.take("attn_logit_softcapping", float, None),
        logit_softcap=fields.take("final_logit_softcapping", float, None),
        qk_norm="head",
        max_positions=131072,
        layers=layers,
    )


def _phi3(fields: Fields) -> dict[str, Any]:
    scaling = fields.take("rope_parameters", dict, None) or fields.take("rope_scaling", dict, None) or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "yarn":  # the first checkpoints name LongRoPE so
        renamed = {**scaling, "rope_type": "longrope"}
        fields = Fields({**fields.fields, "rope_parameters": renamed, "rope_scaling": None}, fields.source)
    window = fields.take("sliding_window", int, None)
    return _like_llama(fields, max_positions=4096, epsilon=1e-5, window=window)


def _olmo2(fields: Fields) -> dict[str, Any]:
    bias = _attention_bias(fields)
    return _like_llama(fields, **bias, max_positions=2048, epsilon=1e-5, pre_norm=False, post_norm=True, qk_norm="all")


def _smollm3(fields: Fields) -> dict[str, Any]:
    """Some layers have no rotary embedding, and only those may have a window."""
    num_layers, every = fields.take("num_hidden_layers", int), fields.take("no_rope_layer_interval", int, 4)
    rotates = fields.take("no_rope_layers", list, [int((layer + 1) % every != 0) for layer in range(num_layers)])
    if len(rotates) < num_layers:
        raise fields.refused("no_rope_layers", f"and must have a number for each of {num_layers} layers")
    window = fields.take("sliding_window", int, None) if fields.take("use_sliding_window", bool, False) else None
    default = [window is not None and not rotates[layer] for layer in range(num_layers)]
    rotary = fields.rotary(2e6)
    layers = layers_of(
        num_layers,
        rotary=[rotary if rotates[layer] else None for layer in range(num_layers)],
        window=window,
        has_window=fields.layer_types(num_layers, default),
    )
    mlp_bias = fields.take("mlp_bias", bool, False)
    return _like_llama(
        fields,
        **_attention_bias(fields),
        mlp_bias=mlp_bias,
        kv_heads=4,
        max_positions=32768,
        tied=True,
        layers=layers,
    )


def _granite(fields: Fields) -> dict[str, Any]:
    return _like_llama(
        fields,
        **_attention_bias(fields),
        mlp_bias=fields.take("mlp_bias", bool, False),
        max_positions=2048,
        embedding_scale=fields.take("embedding_multiplier", float, 1.0),
        residual_scale=fields.take("residual_multiplier", float, 1.0),
        attention_scale=fields.take("attention_multiplier", float, 1.0),
        logit_scale=1 / fields.take("logits_scaling", float, 1.0),
    )


def _glm(fields: Fields, **changes: Any) -> dict[str, Any]:
    num_layers, rotary = fields.take("num_hidden_layers", int), fields.rotary(10_000.0, share=0.5)
    return _like_llama(
        fields,
        qkv_bias=fields.take("attention_bias", bool, True),
        kv_heads=2,
        head_dim=128,
        max_positions=131072,
        epsilon=1.5625e-7,
        layers=layers_of(num_layers, rotary=rotary.changed(pairs_adjacent=True)),
        **changes,
    )


def _gpt2(fields: Fields) -> dict[str, Any]:
    fields.refuse("scale_attn_weights", True)
    fields.refuse("scale_attn_by_inverse_layer_idx", False)
    fields.refuse("add_cross_attention", False)
    hidden, heads = fields.take("n_embd", int), fields.take("n_head", int)
    if hidden % heads:
        raise ModelError(f"{fields.source}: `n_embd` is {hidden}, and must be a multiple of `n_head`, {heads}")
    return {
        "vocab_size": fields.take("vocab_size", int),
        "hidden_size": hidden,
        "num_layers": fields.take("n_layer", int),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "mlp_size": fields.take("n_inner", int, 4 * hidden),
        "max_positions": fields.take("n_positions", int),
        "layers": layers_of(fields.take("n_layer", int)),
        "norm": "layer",
        "norm_epsilon": fields.take("layer_norm_epsilon", float, 1e-5),
        "activation": fields.activation("activation_function", "gelu_new"),
        "gated": False,
        "learned_positions": True,
        "tied": fields.take("tie_word_embeddings", bool, True),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }


def _gpt_neox(fields: Fields) -> dict[str, Any]:
    hidden, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    bias = fields.take("attention_bias", bool, True)
    return {
        "vocab_size": fields.take("vocab_size", int),
        "hidden_size": hidden,
        "num_layers": fields.take("num_hidden_layers", int),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "mlp_size": fields.take("intermediate_size", int),
        "max_positions": fields.take("max_position_embeddings", int, 2048),
        "layers": layers_of(
            fields.take("num_hidden_layers", int),
            rotary=fields.rotary(10_000.0, share=0.25, names=("rotary_emb_base", "rotary_pct")),
        ),
        "norm": "layer",
        "norm_epsilon": fields.take("layer_norm_eps", float, 1e-5),
        "activation": fields.activation("hidden_act", "gelu"),
        "gated": False,
        "parallel": fields.take("use_parallel_residual", bool, True),
        "tied": fields.take("tie_word_embeddings", bool, False),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
    }


def _falcon(fields: Fields) -> dict[str, Any]:
    """The first architecture has one head of keys and values (7B), or as many as queries; the second has groups (40B)."""
    hidden, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    is_new, is_parallel = (
        fields.take(name, bool, default)
        for name, default in (("new_decoder_architecture", False), ("parallel_attn", True))
    )
    if is_new and not is_parallel:
        raise fields.refused("parallel_attn", "which is not supported with `new_decoder_architecture`")
    bias, num_layers = fields.take("bias", bool, False), fields.take("num_hidden_layers", int)
    num_norms = fields.take("num_ln_in_parallel_attn", int, 2 if is_new else 1)
    if num_norms > 2 or (num_norms == 2 and not is_new):
        raise fields.refused("num_ln_in_parallel_attn", "which is not supported without `new_decoder_architecture`")
    has_slopes = fields.take("alibi", bool, False)
    own_keys = heads if not fields.take("multi_query", bool, True) else 1
    return {
        "vocab_size": fields.take("vocab_size", int),
        "hidden_size": hidden,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": fields.take("num_kv_heads", int, heads) if is_new else own_keys,
        "head_dim": hidden // heads,
        "mlp_size": fields.take("ffn_hidden_size", int, 4 * hidden),
        "max_positions": fields.take("max_position_embeddings", int, 2048),
        "layers": layers_of(num_layers, rotary=None if has_slopes else fields.rotary(10_000.0)),
        "slopes": alibi_slopes(heads) if has_slopes else None,
        "norm": "layer",
        "norm_epsilon": fields.take("layer_norm_epsilon", float, 1e-5),
        "activation": fields.activation("activation", "gelu"),
        "gated": False,
        "parallel": is_parallel,
        "shared_norm": is_parallel and num_norms == 1,
        "tied": fields.take("tie_word_embeddings", bool, True),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
    }


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slope of each head (Press et al. 2021): powers of two, and for other numbers of heads every second one between.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    between = [2 ** (-4 * head / power) for head in range(1, 2 * (num_heads - power) + 1, 2)]
    return (*slopes, *between)


def _falcon_names(config: Any) -> Names:
    return names.FALCON_TWO_NORMS if config.parallel and not config.shared_norm else names.FALCON


FAMILIES: dict[str, Family] = {
    "falcon": Family(_falcon, _falcon_names),
    "gemma": Family(_gemma, lambda _: names.LLAMA),
    "gemma2": Family(_gemma2, lambda _: names.GEMMA2),
    "gemma3_text": Family(_gemma3, lambda _: names.GEMMA2),
    "glm": Family(_glm, lambda _: names.GLM),
    "glm4": Family(lambda fields: _glm(fields, post_norm=True), lambda _: names.GLM4),
    "gpt2": Family(_gpt2, lambda _: names.GPT2),
    "gpt_neox": Family(_gpt_neox, lambda _: names.GPT_NEOX),
    "granite": Family(_granite, lambda _: names.LLAMA),
    "llama": Family(_llama, lambda _: names.LLAMA),
    "mistral": Family(_mistral, lambda _: names.LLAMA),
    "mixtral": Family(_mixtral, lambda _: names.MIXTRAL),
    "olmo2": Family(_olmo2, lambda _: names.OLMO2),
    "phi3": Family(_phi3, lambda _: names.PHI3),
    "qwen2": Family(_qwen2, lambda _: names.LLAMA),
    "qwen2_moe": Family(_qwen2_moe, lambda _: names.LLAMA),
    "qwen3": Family(_qwen3, lambda _: names.LLAMA),
    "qwen3_moe": Family(_qwen3_moe, lambda _: names.LLAMA),
    "smollm3": Family(_smollm3, lambda _: names.LLAMA),
}
