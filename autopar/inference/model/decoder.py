"""The decoder: tokens to logits.

One module for every family that `DecoderConfig` covers, run over whole sequences or over some tokens against a cache
(`attention.py`). Weights have the checkpoint's own order, [out, in]: a slice of an array is a slice of the file, and is read
as it lies. Nothing here says how anything is split.
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
    """A decoder-only language model. It computes in the dtype of its weights; norms, softmax and logits in float32."""

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
        """Logits of what follows each token.

        Args:
            tokens: int, [batch, tokens]. positions: of these, the same shape; by default 0, 1, 2, … Where they are
                learned, those from `max_positions` on are taken for the last: to be refused before.
            attend, cache: where keys and values go; by default nowhere, and each token sees those before it in `tokens`.
            only: int, [batch, n]: of which tokens logits are wanted, by their index in `tokens`; by default of all.

        Returns:
            float32 [batch, tokens or n, vocabulary]; and the cache.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = self.embed(tokens)
        if self.config.rotary is None:
            hidden = hidden + self.embed_positions(positions)
        for layer in self.layers:
            hidden, cache = layer(hidden, positions, attend, cache)
        if only is not None:
            hidden = jnp.take_along_axis(hidden, only[:, :, None], axis=1)
        head = self.embed if self.config.tied else self.head
        return head.logits(self.norm(hidden)), cache


class Layer(nn.Module):
    """Attention and a feed-forward network, each after a norm and beside a residual."""

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
        """`hidden`: [batch, tokens, hidden], as it comes back beside the cache."""
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
        """SwiGLU, or two projections with an activation between them."""
        activation = _ACTIVATIONS[self.config.activation]
        between = activation(self.gate(x)) * self.up(x) if self.config.gated else activation(self.up(x))
        return self.down(between)


class Linear(nn.Module):
    """A product over the last dims of its input, `ins`; in their place come `outs`. Its weight is [*outs, *ins]."""

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    bias: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = parameter(self, "weight", nn.initializers.normal(0.02), (*self.outs, *self.ins))
        given, read = range(x.ndim - len(self.ins), x.ndim), range(len(self.outs), weight.ndim)
        y = jax.lax.dot_general(x, weight, ((tuple(given), tuple(read)), ((), ())))
        return y + parameter(self, "bias", nn.initializers.zeros, self.outs) if self.bias else y


class Embedding(nn.Module):
    """A vector for each of `count`; read by index, or as the head of a model."""

    count: int
    size: int

    def setup(self) -> None:
        self.weight = parameter(self, "weight", nn.initializers.normal(0.02), (self.count, self.size))

    def __call__(self, indices: jax.Array) -> jax.Array:
        """The vectors of `indices`."""
        return jnp.take(self.weight, indices, axis=0, mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Products with all vectors, float32."""
        contracted = ((hidden.ndim - 1,), (1,))
        return jax.lax.dot_general(hidden, self.weight, (contracted, ((), ())), preferred_element_type=jnp.float32)


class Norm(nn.Module):
    """RMS norm, or layer norm with a bias, over the last dim, in float32."""

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
    """A norm of a decoder's kind, over `size` elements; by default over the hidden ones."""
    return Norm(config.norm, size or config.hidden_size, config.norm_epsilon)


def parameter(module: nn.Module, name: str, init: Any, shape: tuple[int, ...]) -> Any:
    """A parameter of a module: made, or the one that it was given.

    As `module.param`, which traces the initializer of each one given to compare shapes, and so doubles the time that a
    program takes to trace.

    Raises:
        ScopeParamShapeError: the one given has another shape.
    """
    if module.is_initializing():
        return module.param(name, init, shape)
    given = module.get_variable("params", name)
    if given is None or given.shape != shape:
        return module.param(name, init, shape)  # which says what is wrong
    return given
