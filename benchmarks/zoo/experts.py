"""A decoder with a mixture of experts in each layer: Hugging Face's LLaMA attention, and GShard's experts.

In: sizes. Out: `Training`. The experts are those of `expert_layer`.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.expert_layer import Experts
from benchmarks.zoo.language import next_token_loss
from benchmarks.zoo.training import BF16, F32, Batch, Field, Training, training

# isort: split
from transformers import LlamaConfig
from transformers.models.llama.modeling_flax_llama import FlaxLlamaAttention, FlaxLlamaRMSNorm


class MixtureLayer(nn.Module):
    """Attention, then experts, each after a norm."""

    config: LlamaConfig
    num_experts: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        normed = FlaxLlamaRMSNorm(config, dtype=self.dtype, name="input_layernorm")(x)
        x += FlaxLlamaAttention(config, dtype=self.dtype, name="self_attn")(normed, mask, positions)[0]
        normed = FlaxLlamaRMSNorm(config, dtype=self.dtype, name="post_attention_layernorm")(x)
        made, balance = Experts(self.num_experts, config.intermediate_size, self.dtype, name="experts")(normed)
        return x + made, balance


class Mixture(nn.Module):
    """Tokens to logits, and the load-balancing loss of all layers."""

    config: LlamaConfig
    num_experts: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        config, positions = self.config, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = nn.Embed(config.vocab_size, config.hidden_size, dtype=self.dtype, name="embed_tokens")(tokens)
        total = jnp.zeros((), F32)
        for n in range(config.num_hidden_layers):
            layer = MixtureLayer(config, self.num_experts, self.dtype, name=f"layer_{n}")
            x, balance = layer(x, jnp.ones_like(tokens), positions)
            total += balance
        x = FlaxLlamaRMSNorm(config, dtype=self.dtype, name="norm")(x)
        return nn.Dense(config.vocab_size, use_bias=False, dtype=self.dtype, name="lm_head")(x), total


def mixture(config: LlamaConfig, num_experts: int, batch: int, seq: int, dtype: Any = F32) -> Training:
    """Next-token prediction, plus a hundredth of the load-balancing loss."""
    model = Mixture(config, num_experts, dtype)

    def init(rng: jax.Array) -> Any:
        return model.init(rng, jnp.zeros((1, num_experts), jnp.int32))["params"]

    def loss_of(params: Any, batch: Batch, _: jax.Array) -> jax.Array:
        made: Any = model.apply({"params": params}, batch["tokens"])
        logits, balance = made
        return next_token_loss(logits, batch["tokens"]) + 0.01 * balance

    return training(init, loss_of, {"tokens": Field((batch, seq), below=config.vocab_size)})


def mixture_1b(batch: int) -> Training:
    """8 layers of 8 experts, d 1,024: 1.0 billion parameters, of which a token uses a third."""
    config = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16)
    return mixture(config, 8, batch, 2048, BF16)
