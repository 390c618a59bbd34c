"""Compute logits of a decoder-only transformer, over whole sequences or over new tokens with a KV cache.

In: tokens, positions, and an `Attend` with its cache (`attention.py`). Out: logits, and the cache. One module covers every
family of `DecoderConfig`. Weights are [out, in] as in the checkpoint, so a slice of a weight is a contiguous read of a
slice of the file. The module fixes no sharding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from autopar.inference.model.attention import Attend, attend_causally
from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.experts import MixtureOfExperts
from autopar.inference.model.modules import ACTIVATIONS, Embedding, Linear, Norm
from autopar.inference.model.quantization import Quantization
from autopar.inference.model.rotary import rotate


class Decoder(nn.Module):
    """A decoder-only language model. It computes in the dtype of its weights, but norms, softmax and logits in float32."""

    config: DecoderConfig

    def setup(self) -> None:
        config = self.config
        self.embed = Embedding(config.vocab_size, config.hidden_size, config.quantization_of("embed"))
        if config.learned_positions:
            self.embed_positions = Embedding(config.max_positions, config.hidden_size)
        self.layers = [Layer(config, layer) for layer in range(config.num_layers)]
        self.norm = norm_of(config)
        if not config.tied:
            self.head = Embedding(config.vocab_size, config.hidden_size, config.quantization_of("head"))

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        attend: Attend = attend_causally,
        cache: Any = None,
        only: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Compute the logits of the next token after each token.

        Args:
            tokens: int, [batch, tokens].
            positions: int, the shape of `tokens`; by default 0, 1, 2, … Learned positions are clipped to the last one, so
                the caller must refuse those from `max_positions` on.
            attend, cache: the attention and its KV cache; by default causal attention within `tokens`, without a cache.
            only: int, [batch, n], the indices in `tokens` to compute logits for; by default all.

        Returns:
            float32 logits [batch, tokens or n, vocabulary]; and the cache.
        """
        hidden, cache = self.states(tokens, positions, attend, cache, only)
        return self.logits(hidden), cache

    def states(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        attend: Attend = attend_causally,
        cache: Any = None,
        only: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Compute the last hidden states, normalized, [batch, tokens or n, hidden]; and the cache. Arguments as above."""
        config = self.config
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = scaled(self.embed(tokens), config.embedding_scale)
        if config.learned_positions:
            hidden = hidden + self.embed_positions(positions)
        for layer in self.layers:
            hidden, cache = layer(hidden, positions, attend, cache)
        if only is not None:
            hidden = jnp.take_along_axis(hidden, only[:, :, None], axis=1)
        return self.norm(hidden), cache

    def logits(self, states: jax.Array) -> jax.Array:
        """Compute float32 logits from the last hidden states."""
        head, cap = self.embed if self.config.tied else self.head, self.config.logit_softcap
        logits = scaled(head.logits(states), self.config.logit_scale)
        return logits if cap is None else cap * jnp.tanh(logits / cap)


class Layer(nn.Module):
    """Attention and a feed-forward network, with norms before or after each, and residual connections."""

    config: DecoderConfig
    index: int

    def setup(self) -> None:
        config, kind = self.config, self.config.layers[self.index]
        if config.pre_norm:
            self.attention_norm = norm_of(config)
            if not config.shared_norm:
                self.mlp_norm = norm_of(config)
        if config.post_norm:
            self.attention_post_norm, self.mlp_post_norm = norm_of(config), norm_of(config)
        heads, kv_heads = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)

        def how(module: str) -> Quantization | None:
            return None if module in kind.plain else config.quantization

        self.query = Linear((config.hidden_size,), heads, config.qkv_bias, how("query"))
        self.key = Linear((config.hidden_size,), kv_heads, config.qkv_bias, how("key"))
        self.value = Linear((config.hidden_size,), kv_heads, config.qkv_bias, how("value"))
        self.out = Linear(heads, (config.hidden_size,), config.out_bias, how("out"))
        if config.qk_norm:
            shapes = (heads, kv_heads) if config.qk_norm == "all" else 2 * ((config.head_dim,),)
            self.query_norm, self.key_norm = (norm_of(config, shape) for shape in shapes)
        if kind.experts is not None:
            self.experts = MixtureOfExperts(
                kind.experts, config.hidden_size, config.activation, config.quantization, kind.plain
            )
            return
        if config.gated:
            self.gate = Linear((config.hidden_size,), (config.mlp_size,), config.mlp_bias, how("gate"))
        self.up = Linear((config.hidden_size,), (config.mlp_size,), config.mlp_bias, how("up"))
        self.down = Linear((config.mlp_size,), (config.hidden_size,), config.mlp_bias, how("down"))

    def __call__(self, hidden: jax.Array, positions: jax.Array, attend: Attend, cache: Any) -> tuple[jax.Array, Any]:
        """Return the hidden states, [batch, tokens, hidden] like `hidden`, and the cache."""
        config = self.config
        x = self.attention_norm(hidden) if config.pre_norm else hidden
        attended, cache = self.attention(x, positions, attend, cache)
        if config.post_norm:
            attended = self.attention_post_norm(attended)
        after = hidden + scaled(attended, config.residual_scale)
        if not config.shared_norm:
            x = hidden if config.parallel else after
            x = self.mlp_norm(x) if config.pre_norm else x
        x = self.mlp(x)
        if config.post_norm:
            x = self.mlp_post_norm(x)
        return after + scaled(x, config.residual_scale), cache

    def attention(self, x: jax.Array, positions: jax.Array, attend: Attend, cache: Any) -> tuple[jax.Array, Any]:
        """Attention with its projections; and the cache."""
        queries, keys, values = self.query(x), self.key(x), self.value(x)
        if self.config.qk_norm:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        rotary = self.config.layers[self.index].rotary
        if rotary is not None:
            queries, keys = rotate(queries, positions, rotary), rotate(keys, positions, rotary)
        scores = self.config.scores(self.index)
        attended, cache = attend(cache, self.index, queries, keys, values, scores)
        return self.out(attended), cache

    def mlp(self, x: jax.Array) -> jax.Array:
        """The feed-forward network: SwiGLU, two projections with an activation between them, or a mixture of experts."""
        if self.config.layers[self.index].experts is not None:
            return self.experts(x)
        activation = ACTIVATIONS[self.config.activation]
        activated = activation(self.gate(x)) * self.up(x) if self.config.gated else activation(self.up(x))
        return self.down(activated)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Multiply with a factor that is rounded to the dtype of `x`; one changes nothing."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def norm_of(config: DecoderConfig, shape: tuple[int, ...] | None = None) -> Norm:
    """A norm of the configured kind over dims of `shape`; by default over the hidden size."""
    return Norm(config.norm, shape or (config.hidden_size,), config.norm_epsilon)
