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
from autopar.inference.model.rotary import rotate

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": lambda x: jax.nn.gelu(x, approximate=False), "gelu_tanh": jax.nn.gelu}


class Decoder(nn.Module):
    """A decoder-only language model. It computes in the dtype of its weights, but norms, softmax and logits in float32."""

    config: DecoderConfig

    def setup(self) -> None:
        config = self.config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        if config.rotary is None:
            self.embed_positions = Embedding(config.max_positions, config.hidden_size)
        self.layers = [Layer(config, layer) for layer in range(config.num_layers)]
        self.norm = norm_of(config)
        if not config.tied:
            self.head = Embedding(config.vocab_size, config.hidden_size)

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
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = self.embed(tokens)
        if self.config.rotary is None:
            hidden = hidden + self.embed_positions(positions)
        for layer in self.layers:
            hidden, cache = layer(hidden, positions, attend, cache)
        if only is not None:
            hidden = jnp.take_along_axis(hidden, only[:, :, None], axis=1)
        return self.norm(hidden), cache

    def logits(self, states: jax.Array) -> jax.Array:
        """Compute float32 logits from the last hidden states."""
        head = self.embed if self.config.tied else self.head
        return head.logits(states)


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a residual connection."""

    config: DecoderConfig
    index: int

    def setup(self) -> None:
        config = self.config
        self.attention_norm, self.mlp_norm = norm_of(config), norm_of(config)
        heads, kv_heads = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
        self.query = Linear((config.hidden_size,), heads, config.qkv_bias)
        self.key = Linear((config.hidden_size,), kv_heads, config.qkv_bias)
        self.value = Linear((config.hidden_size,), kv_heads, config.qkv_bias)
        self.out = Linear(heads, (config.hidden_size,), config.out_bias)
        if config.qk_norm:
            self.query_norm, self.key_norm = (norm_of(config, config.head_dim) for _ in range(2))
        if config.gated:
            self.gate = Linear((config.hidden_size,), (config.mlp_size,), config.mlp_bias)
        self.up = Linear((config.hidden_size,), (config.mlp_size,), config.mlp_bias)
        self.down = Linear((config.mlp_size,), (config.hidden_size,), config.mlp_bias)

    def __call__(self, hidden: jax.Array, positions: jax.Array, attend: Attend, cache: Any) -> tuple[jax.Array, Any]:
        """Return the hidden states, [batch, tokens, hidden] like `hidden`, and the cache."""
        x = self.attention_norm(hidden)
        queries, keys, values = self.query(x), self.key(x), self.value(x)
        if self.config.qk_norm:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if self.config.rotary is not None:
            queries = rotate(queries, positions, self.config.rotary)
            keys = rotate(keys, positions, self.config.rotary)
        attended, cache = attend(cache, self.index, queries, keys, values)
        hidden = hidden + self.out(attended)
        return hidden + self.mlp(self.mlp_norm(hidden)), cache

    def mlp(self, x: jax.Array) -> jax.Array:
        """The feed-forward network: SwiGLU, or two projections with an activation between them."""
        activation = _ACTIVATIONS[self.config.activation]
        activated = activation(self.gate(x)) * self.up(x) if self.config.gated else activation(self.up(x))
        return self.down(activated)


class Linear(nn.Module):
    """A matmul that contracts the last dims of its input, `ins`, and appends the dims `outs`. Its weight is [*outs, *ins]."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    bias: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = parameter(self, "weight", nn.initializers.normal(0.02), (*self.outs, *self.ins))
        x_dims, weight_dims = range(x.ndim - len(self.ins), x.ndim), range(len(self.outs), weight.ndim)
        y = jax.lax.dot_general(x, weight, ((tuple(x_dims), tuple(weight_dims)), ((), ())))
        return y + parameter(self, "bias", nn.initializers.zeros, self.outs) if self.bias else y


class Embedding(nn.Module):
    """A table of `count` vectors of `size` elements: an embedding, or the head of a model."""

    count: int
    size: int

    def setup(self) -> None:
        self.weight = parameter(self, "weight", nn.initializers.normal(0.02), (self.count, self.size))

    def __call__(self, indices: jax.Array) -> jax.Array:
        """Look up the vectors of `indices`."""
        return jnp.take(self.weight, indices, axis=0, mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Multiply hidden states with all vectors; float32."""
        contracted = ((hidden.ndim - 1,), (1,))
        return jax.lax.dot_general(hidden, self.weight, (contracted, ((), ())), preferred_element_type=jnp.float32)


class Norm(nn.Module):
    """RMS norm, or layer norm with a bias, over the last dim; computed in float32."""

    kind: str
    size: int
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        weight = parameter(self, "weight", nn.initializers.ones, (self.size,))
        if self.kind == "rms":
            return wide.astype(x.dtype) * weight
        bias = parameter(self, "bias", nn.initializers.zeros, (self.size,))
        return (wide * weight + bias).astype(x.dtype)


def norm_of(config: DecoderConfig, size: int | None = None) -> Norm:
    """A norm of the configured kind over `size` elements; by default over the hidden size."""
    return Norm(config.norm, size or config.hidden_size, config.norm_epsilon)


def parameter(module: nn.Module, name: str, init: Any, shape: tuple[int, ...]) -> Any:
    """Return a parameter of a module, or initialize it.

    This replaces `module.param`, which traces the initializer of every existing parameter to compare shapes and so doubles
    the time to trace a program.

    Raises:
        ScopeParamShapeError: the existing parameter has another shape.
    """
    if module.is_initializing():
        return module.param(name, init, shape)
    value = module.get_variable("params", name)
    if value is None or value.shape != shape:
        return module.param(name, init, shape)  # raises the error
    return value
