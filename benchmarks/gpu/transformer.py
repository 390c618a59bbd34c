"""Transformers in plain Flax: GPT-2, BERT, LLaMA, ViT, mixture of experts, scanned layers. In: sizes. Out: `Training`.

Parameters and optimizer are float32, everything else bfloat16; the softmax and the loss are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.expert_layer import Experts
from benchmarks.zoo.training import BF16, F32, Batch, Field, Training, cross_entropy, next_token_loss, training


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model and its batch.

    Args:
        hidden: width of a token.
        feed_forward: width between a layer's last two matmuls.
        kv_heads: number of key-value heads; by default that of query heads.
        tokens: tokens per example.
        causal: whether a token attends only to those before it.
        is_llama: RMSNorm, rotary positions and a gated feed-forward without biases, in place of LayerNorm, learned
            positions and GELU.
        num_experts: experts per layer; 0 for a dense feed-forward.
        rematerialized: whether each layer is rematerialized in the backward pass.
        scanned: whether the layers are in a scan.
        attention: `xla` or `cudnn`, the implementation that the model asks for.
    """

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    vocabulary: int
    tokens: int
    batch: int
    kv_heads: int = 0
    causal: bool = True
    is_llama: bool = False
    dropout: float = 0.0
    num_experts: int = 0
    rematerialized: bool = False
    scanned: bool = False
    attention: Literal["xla", "cudnn"] = "xla"


class _Attention(nn.Module):
    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        sizes, each = self.sizes, self.sizes.hidden // self.sizes.heads

        def heads(name: str, count: int) -> jax.Array:
            made = nn.Dense(count * each, use_bias=not sizes.is_llama, dtype=BF16, name=name)(x)
            return made.reshape(*x.shape[:2], count, each)

        kv_heads = sizes.kv_heads or sizes.heads
        q, k, v = heads("q_proj", sizes.heads), heads("k_proj", kv_heads), heads("v_proj", kv_heads)
        if sizes.is_llama:
            q, k = _rotated(q), _rotated(k)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=sizes.causal, implementation=sizes.attention)
        out = nn.Dense(sizes.hidden, use_bias=not sizes.is_llama, dtype=BF16, name="o_proj")
        return out(mixed.reshape(*x.shape[:2], -1))


def _rotated(x: jax.Array) -> jax.Array:
    """Rotary positions: rotate each pair of a head's elements by an angle in proportion to the position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles).astype(x.dtype)[:, None] for f in (jnp.cos, jnp.sin))
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


class _FeedForward(nn.Module):
    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        sizes = self.sizes
        if not sizes.is_llama:
            h = nn.gelu(nn.Dense(sizes.feed_forward, dtype=BF16, name="fc1")(x))
            return nn.Dense(sizes.hidden, dtype=BF16, name="fc2")(h)
        gate, up = (
            nn.Dense(sizes.feed_forward, use_bias=False, dtype=BF16, name=name)(x) for name in ("gate_proj", "up_proj")
        )
        return nn.Dense(sizes.hidden, use_bias=False, dtype=BF16, name="down_proj")(nn.silu(gate) * up)


class _Layer(nn.Module):
    """A layer; it also adds its experts' load-balancing loss to that of the layers before."""

    sizes: Sizes

    @nn.compact
    def __call__(self, carry: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, balance = carry
        sizes = self.sizes

        def dropped(h: jax.Array) -> jax.Array:
            return nn.Dropout(sizes.dropout, deterministic=False)(h) if sizes.dropout else h

        x = x + dropped(_Attention(sizes, name="attn")(_norm(sizes, "norm_1")(x)))
        normed = _norm(sizes, "norm_2")(x)
        if sizes.num_experts:
            made, unequal = Experts(sizes.num_experts, sizes.feed_forward, BF16, name="experts")(normed)
            return (x + dropped(made), balance + unequal), None
        return (x + dropped(_FeedForward(sizes, name="mlp")(normed)), balance), None


def _norm(sizes: Sizes, name: str) -> nn.Module:
    return (nn.RMSNorm if sizes.is_llama else nn.LayerNorm)(dtype=BF16, name=name)


class _Layers(nn.Module):
    """All layers, and the norm after the last."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        sizes = self.sizes
        layer: Any = nn.remat(_Layer, prevent_cse=not sizes.scanned) if sizes.rematerialized else _Layer
        carry = (x, jnp.zeros((), F32))
        if sizes.scanned:
            rngs: Any = {"params": True, "dropout": True}
            scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs=rngs, length=sizes.layers)
            carry, _ = scanned(sizes, name="layers")(carry)
        else:
            for number in range(sizes.layers):
                carry, _ = layer(sizes, name=f"layer_{number}")(carry)
        return _norm(sizes, "norm")(carry[0]), carry[1]


class _Language(nn.Module):
    """Tokens to logits, and the load-balancing loss."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        sizes = self.sizes
        x = nn.Embed(sizes.vocabulary, sizes.hidden, dtype=BF16, name="embed_tokens")(tokens)
        if not sizes.is_llama:
            x = x + nn.Embed(sizes.tokens, sizes.hidden, dtype=BF16, name="positions")(jnp.arange(tokens.shape[1]))
        x, balance = _Layers(sizes, name="decoder")(x)
        return nn.Dense(sizes.vocabulary, use_bias=False, dtype=BF16, name="lm_head")(x), balance


class _Images(nn.Module):
    """Images to logits of their classes, by patches and a class token."""

    sizes: Sizes
    patch: int
    classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        hidden, step = self.sizes.hidden, (self.patch, self.patch)
        x = nn.Conv(hidden, step, strides=step, padding="VALID", dtype=BF16, name="patches")(images)
        x = x.reshape(x.shape[0], -1, hidden)
        token = self.param("token", nn.initializers.zeros, (1, 1, hidden))
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, hidden)).astype(BF16), x], 1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], hidden)).astype(BF16)
        x, _ = _Layers(self.sizes, name="encoder")(x)
        return nn.Dense(self.classes, dtype=BF16, name="head")(x[:, 0])


def language(sizes: Sizes) -> Training:
    """Next-token prediction; a mixture of experts adds a hundredth of the load-balancing loss."""
    model = _Language(sizes)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        logits, balance = _applied(model, sizes, params, batch["tokens"], rng)
        return next_token_loss(logits, batch["tokens"]) + 0.01 * balance

    return training(_init(model, sizes), loss_of, {"tokens": _tokens(sizes)})


def masked(sizes: Sizes) -> Training:
    """Masked-word prediction; about one word in seven is masked."""
    model = _Language(sizes)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        logits, _ = _applied(model, sizes, params, batch["tokens"], rng)
        is_masked = (batch["draw"] == 0).astype(F32)
        return (cross_entropy(logits, batch["labels"]) * is_masked).sum() / jnp.maximum(is_masked.sum(), 1.0)

    draw = Field((sizes.batch, sizes.tokens), below=7)
    return training(_init(model, sizes), loss_of, {"tokens": _tokens(sizes), "labels": _tokens(sizes), "draw": draw})


def images(sizes: Sizes, size: int, patch: int, classes: int) -> Training:
    """Image classification; images have `size` pixels a side and are cut into patches."""
    model = _Images(sizes, patch, classes)

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        logits = _applied(model, sizes, params, batch["images"], rng)
        return cross_entropy(logits, batch["labels"]).mean()

    shape = (sizes.batch, size, size, 3)

    def init(rng: jax.Array) -> Any:
        return model.init({"params": rng, "dropout": rng}, jnp.zeros((1, *shape[1:]), BF16))["params"]

    return training(init, loss_of, {"images": Field(shape, BF16), "labels": Field((sizes.batch,), below=classes)})


def _applied(model: nn.Module, sizes: Sizes, params: Any, given: jax.Array, rng: jax.Array) -> Any:
    return model.apply({"params": params}, given, rngs={"dropout": rng} if sizes.dropout else None)


def _init(model: nn.Module, sizes: Sizes) -> Callable[[jax.Array], Any]:
    # An expert has at least one place, so there must be as many tokens as experts.
    given = jnp.zeros((1, max(8, sizes.num_experts)), jnp.int32)
    return lambda rng: model.init({"params": rng, "dropout": rng}, given)["params"]


def _tokens(sizes: Sizes) -> Field:
    return Field((sizes.batch, sizes.tokens), below=sizes.vocabulary)
