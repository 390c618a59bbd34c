"""Build drawn models from their libraries: Hugging Face's Flax classes, and `zoo.experts`.

In: a configuration. Out: `Training`, with bf16 compute, f32 parameters and AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.held_out.sizes import Convolutions, Patches, Sizes, Text
from benchmarks.zoo import experts, language, vision
from benchmarks.zoo.training import BF16, Training

# isort: split
from transformers import (
    BartConfig,
    FlaxGemmaForCausalLM,
    FlaxGPTNeoForCausalLM,
    FlaxMBartForConditionalGeneration,
    FlaxMistralForCausalLM,
    FlaxT5ForConditionalGeneration,
    GemmaConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MBartConfig,
    MistralConfig,
    ResNetConfig,
    T5Config,
    ViTConfig,
)


def training(sizes: Sizes) -> Training:
    """The train step of a configuration."""
    match sizes:
        case Text():
            return _TEXT[sizes.architecture](sizes)
        case Patches():
            return _vit(sizes)
        case Convolutions():
            return _resnet(sizes)


# -- decoders ------------------------------------------------------------------------------------


def _gpt2(sizes: Text) -> Training:
    body = sizes.body
    config = GPT2Config(
        vocab_size=sizes.vocab,
        n_positions=sizes.seq,
        n_embd=body.width,
        n_layer=body.layers,
        n_head=body.heads,
        n_inner=body.hidden,
        activation_function=body.activation,
        resid_pdrop=body.dropout,
        embd_pdrop=body.dropout,
        attn_pdrop=body.dropout,
        tie_word_embeddings=sizes.tied,
    )
    return language.gpt2(config, sizes.batch, sizes.seq, BF16)


def _gpt_neo(sizes: Text) -> Training:
    """Layers of global and of local attention in turn."""
    body = sizes.body
    kinds = [[["global", "local"], body.layers // 2], [["global"], body.layers % 2]]
    config = GPTNeoConfig(
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.seq,
        hidden_size=body.width,
        num_layers=body.layers,
        attention_types=kinds,
        num_heads=body.heads,
        intermediate_size=body.hidden,
        activation_function=body.activation,
        resid_dropout=body.dropout,
        embed_dropout=body.dropout,
        attention_dropout=body.dropout,
        tie_word_embeddings=sizes.tied,
    )
    return language.causal(FlaxGPTNeoForCausalLM(config, _do_init=False, dtype=BF16), sizes.batch, sizes.seq)


def _llama(sizes: Text) -> Training:
    return language.llama(LlamaConfig(**_grouped(sizes)), sizes.batch, sizes.seq, BF16)


def _mistral(sizes: Text) -> Training:
    model = FlaxMistralForCausalLM(MistralConfig(**_grouped(sizes)), _do_init=False, dtype=BF16)
    return language.causal(model, sizes.batch, sizes.seq, drops_out=False)


def _gemma(sizes: Text) -> Training:
    config = GemmaConfig(
        **_grouped(sizes),
        head_dim=sizes.body.head_dim,
        hidden_activation=sizes.body.activation,
        tie_word_embeddings=sizes.tied,
    )
    model = FlaxGemmaForCausalLM(config, _do_init=False, dtype=BF16)
    return language.causal(model, sizes.batch, sizes.seq, drops_out=False)


def _experts(sizes: Text) -> Training:
    return experts.mixture(LlamaConfig(**_grouped(sizes)), sizes.experts, sizes.batch, sizes.seq, BF16)


def _grouped(sizes: Text) -> dict[str, Any]:
    """The sizes that LLaMA and its descendants have in common."""
    return {
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.seq,
        "hidden_size": sizes.body.width,
        "intermediate_size": sizes.body.hidden,
        "num_hidden_layers": sizes.body.layers,
        "num_attention_heads": sizes.body.heads,
        "num_key_value_heads": sizes.body.kv_heads,
        "hidden_act": sizes.body.activation,
    }


# -- encoder-decoders ----------------------------------------------------------------------------


def _bart(sizes: Text) -> Training:
    return language.bart(BartConfig(**_both_stacks(sizes)), sizes.batch, sizes.seq, BF16)


def _mbart(sizes: Text) -> Training:
    """BART with its norms before attention and feed-forward."""
    model = FlaxMBartForConditionalGeneration(MBartConfig(**_both_stacks(sizes)), _do_init=False, dtype=BF16)
    return language.sequence_to_sequence(model, sizes.batch, sizes.seq)


def _both_stacks(sizes: Text) -> dict[str, Any]:
    """An encoder and a decoder of the same sizes."""
    body = sizes.body
    stacks = {
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in (("layers", body.layers), ("attention_heads", body.heads), ("ffn_dim", body.hidden))
    }
    return stacks | {
        "vocab_size": sizes.vocab,
        "max_position_embeddings": sizes.seq,
        "d_model": body.width,
        "activation_function": body.activation,
        "dropout": body.dropout,
        "attention_dropout": body.dropout,
        "tie_word_embeddings": sizes.tied,
    }


def _t5(sizes: Text) -> Training:
    """Relative positions, RMS norms. `transformers` calls `jnp.clip` by an argument's old name, which JAX dropped."""
    body = sizes.body
    config = T5Config(
        vocab_size=sizes.vocab,
        d_model=body.width,
        d_kv=body.head_dim,
        d_ff=body.hidden,
        num_layers=body.layers,
        num_heads=body.heads,
        dropout_rate=body.dropout,
        feed_forward_proj="gated-gelu" if body.gated else body.activation,
        tie_word_embeddings=sizes.tied,
    )
    with _clip_by_old_names():
        model = FlaxT5ForConditionalGeneration(config, _do_init=False, dtype=BF16)
    made = language.sequence_to_sequence(model, sizes.batch, sizes.seq)

    def patched(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*args: Any) -> Any:
            with _clip_by_old_names():
                return function(*args)

        return called

    return replace(made, step=patched(made.step), create_state=patched(made.create_state))


@contextmanager
def _clip_by_old_names() -> Iterator[None]:
    """A context in which `jnp.clip` takes `a_max`."""
    clip = jnp.clip

    def with_old_names(x: jax.Array, *limits: Any, a_max: Any = None, **named: Any) -> jax.Array:
        return clip(x, *limits, **(named if a_max is None else {"max": a_max}))

    with mock.patch.object(jnp, "clip", with_old_names):
        yield


#: By architecture.
_TEXT: dict[str, Callable[[Text], Training]] = {
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "llama": _llama,
    "mistral": _mistral,
    "gemma": _gemma,
    "llama with experts": _experts,
    "bart": _bart,
    "mbart": _mbart,
    "t5": _t5,
    "t5_v1_1": _t5,
}


# -- images --------------------------------------------------------------------------------------


def _vit(sizes: Patches) -> Training:
    body = sizes.body
    config = ViTConfig(
        image_size=sizes.size,
        patch_size=sizes.patch,
        hidden_size=body.width,
        num_hidden_layers=body.layers,
        num_attention_heads=body.heads,
        intermediate_size=body.hidden,
        hidden_act=body.activation,
        hidden_dropout_prob=body.dropout,
        attention_probs_dropout_prob=body.dropout,
        num_labels=sizes.labels,
    )
    return vision.vit(config, sizes.batch, BF16)


def _resnet(sizes: Convolutions) -> Training:
    config = ResNetConfig(
        embedding_size=sizes.stem,
        hidden_sizes=list(sizes.channels),
        depths=list(sizes.depths),
        layer_type="bottleneck" if sizes.is_bottleneck else "basic",
        hidden_act=sizes.activation,
        num_labels=sizes.labels,
    )
    return vision.resnet(config, sizes.batch, sizes.size, BF16)
