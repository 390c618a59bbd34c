"""Hugging Face's Flax language models. In: their configs and sizes. Out: `Training`."""

from __future__ import annotations

import os
from typing import Any

# Set before transformers is imported: no torch, no network access.
os.environ.setdefault("USE_TORCH", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import jax.numpy as jnp
from flax import linen as nn
from transformers import (
    BartConfig,
    BertConfig,
    FlaxBartForConditionalGeneration,
    FlaxBertForPreTraining,
    FlaxGPT2LMHeadModel,
    FlaxGPTJForCausalLM,
    FlaxLlamaForCausalLM,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
)
from transformers.models.llama.modeling_flax_llama import FlaxLlamaDecoderLayer, FlaxLlamaRMSNorm

from benchmarks.zoo.training import F32, Batch, Field, Training, cross_entropy, next_token_loss, training


def gpt2(config: GPT2Config, batch: int, seq: int, dtype: Any = F32) -> Training:
    """Unrolled layers, fused QKV, tied embeddings, dropout."""
    return causal(FlaxGPT2LMHeadModel(config, _do_init=False, dtype=dtype), batch, seq)


def gptj(config: GPTJConfig, batch: int, seq: int, dtype: Any = F32) -> Training:
    """Attention and feed-forward in parallel, rotary positions, an untied head."""
    return causal(FlaxGPTJForCausalLM(config, _do_init=False, dtype=dtype), batch, seq)


def llama(config: LlamaConfig, batch: int, seq: int, dtype: Any = F32) -> Training:
    """RMS norms, gated feed-forward, rotary positions; no dropout."""
    return causal(FlaxLlamaForCausalLM(config, _do_init=False, dtype=dtype), batch, seq, drops_out=False)


def llama_scanned(config: LlamaConfig, batch: int, seq: int, dtype: Any = F32) -> Training:
    """The same with its layers stacked: an `nn.scan` over Hugging Face's layer, with rematerialization."""
    module = _ScannedLlama(config, dtype)

    def init(rng: jax.Array) -> Any:
        return module.init(rng, jnp.zeros((1, 1), jnp.int32))["params"]

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        logits: Any = module.apply({"params": params}, batch["tokens"])
        return next_token_loss(logits, batch["tokens"])

    return training(init, loss_of, {"tokens": Field((batch, seq), below=config.vocab_size)})


class _ScannedLlama(nn.Module):
    """Hugging Face's LLaMA with a scan over its layers."""

    config: LlamaConfig
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, positions = self.config, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = jnp.ones_like(tokens)
        hidden = nn.Embed(config.vocab_size, config.hidden_size, dtype=self.dtype, name="embed_tokens")(tokens)
        same_for_all: Any = nn.broadcast
        layers = nn.scan(
            nn.remat(_ScannedLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=same_for_all,
            length=config.num_hidden_layers,
        )(config, self.dtype, name="layers")
        hidden, _ = layers(hidden, (mask, positions))
        hidden = FlaxLlamaRMSNorm(config, dtype=self.dtype, name="norm")(hidden)
        return nn.Dense(config.vocab_size, use_bias=False, dtype=self.dtype, name="lm_head")(hidden)


class _ScannedLayer(nn.Module):
    config: LlamaConfig
    dtype: Any

    @nn.compact
    def __call__(self, hidden: jax.Array, places: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        layer = FlaxLlamaDecoderLayer(self.config, dtype=self.dtype, name="layer")
        return layer(hidden, *places)[0], None


def causal(model: Any, batch: int, seq: int, drops_out: bool = True) -> Training:
    """A model from tokens to the logits of the next tokens."""

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        dropout = {"dropout_rng": rng} if drops_out else {}
        logits = model(batch["tokens"], params=params, train=True, **dropout).logits
        return next_token_loss(logits, batch["tokens"])

    return training(initialiser(model), loss_of, {"tokens": Field((batch, seq), below=model.config.vocab_size)})


def bert(config: BertConfig, batch: int, seq: int, dtype: Any = F32) -> Training:
    """Pre-training: masked words, and the next sentence by the pooler."""
    model: Any = FlaxBertForPreTraining(config, _do_init=False, dtype=dtype)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        out = model(batch["tokens"], batch["mask"], batch["segments"], params=params, dropout_rng=rng, train=True)
        words = cross_entropy(out.prediction_logits, batch["labels"])
        masked = jnp.where(batch["labels"] > 0, words, 0).sum() / jnp.maximum((batch["labels"] > 0).sum(), 1)
        return masked + cross_entropy(out.seq_relationship_logits, batch["next"]).mean()

    tokens, bits = Field((batch, seq), below=config.vocab_size), Field((batch, seq))
    fields = {"tokens": tokens, "mask": bits, "segments": bits, "labels": tokens, "next": Field((batch,))}
    return training(initialiser(model), loss_of, fields)


def bart(config: BartConfig, batch: int, seq: int, dtype: Any = F32) -> Training:
    """Encoder and decoder with equal lengths; one embedding for both and for the head."""
    model: Any = FlaxBartForConditionalGeneration(config, _do_init=False, dtype=dtype)
    return sequence_to_sequence(model, batch, seq)


def sequence_to_sequence(model: Any, batch: int, seq: int) -> Training:
    """A model from tokens and the shifted labels to the labels' logits."""

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        out = model(
            batch["tokens"],
            batch["mask"],
            decoder_input_ids=batch["shifted"],
            params=params,
            dropout_rng=rng,
            train=True,
        )
        return cross_entropy(out.logits, batch["labels"]).mean()

    tokens = Field((batch, seq), below=model.config.vocab_size)
    fields = {"tokens": tokens, "mask": Field((batch, seq)), "shifted": tokens, "labels": tokens}
    return training(initialiser(model), loss_of, fields)


def initialiser(model: Any) -> Any:
    """A function from a key to a Hugging Face model's variables."""
    return lambda rng: model.init_weights(rng, model.input_shape)
