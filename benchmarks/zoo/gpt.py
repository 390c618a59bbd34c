"""A textbook GPT in plain Flax. In: its sizes. Out: `Training` in mixed precision.

Pre-norm blocks, one matmul for queries, keys and values, learned positions, a separate head; no dropout. Everything but
the loss is computed in fp16, with fp16 parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.zoo.mixed_precision import mixed_precision
from benchmarks.zoo.training import Batch, Field, Training, next_token_loss


@dataclass(frozen=True, slots=True)
class GptSizes:
    """Sizes of a model and its batch."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    tokens: int
    batch: int

    @property
    def num_parameters(self) -> float:
        """Number of parameters in weight matrices and embeddings."""
        return 12 * self.layers * self.hidden**2 + (2 * self.vocabulary + self.tokens) * self.hidden

    @property
    def model_flops(self) -> float:
        """FLOPs of one step: the forward pass's matmuls, and twice as many for the backward pass, without savings by
        the causal mask and without rematerialization."""
        blocks = self.layers * (24 * self.hidden**2 + 4 * self.tokens * self.hidden)
        return 3 * self.batch * self.tokens * (blocks + 2 * self.hidden * self.vocabulary)


class _Block(nn.Module):
    hidden: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        half = jnp.float16
        tokens, each = x.shape[1], self.hidden // self.heads
        h = nn.LayerNorm(dtype=half, name="norm_1")(x)
        qkv = nn.Dense(3 * self.hidden, dtype=half, name="qkv")(h)
        q, k, v = (part.reshape(*x.shape[:2], self.heads, each) for part in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * each**-0.5, k)
        places = jnp.arange(tokens)
        scores = jnp.where(places[:, None] >= places, scores, jnp.finfo(half).min)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + nn.Dense(self.hidden, dtype=half, name="out")(mixed)
        h = nn.LayerNorm(dtype=half, name="norm_2")(x)
        h = nn.gelu(nn.Dense(4 * self.hidden, dtype=half, name="up")(h))
        return x + nn.Dense(self.hidden, dtype=half, name="down")(h)


class _Gpt(nn.Module):
    sizes: GptSizes

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        sizes, half = self.sizes, jnp.float16
        x = nn.Embed(sizes.vocabulary, sizes.hidden, dtype=half, name="words")(tokens)
        x = x + nn.Embed(sizes.tokens, sizes.hidden, dtype=half, name="places")(jnp.arange(tokens.shape[1]))
        for number in range(sizes.layers):
            x = _Block(sizes.hidden, sizes.heads, name=f"block_{number}")(x)
        x = nn.LayerNorm(dtype=half, name="norm")(x)
        return nn.Dense(sizes.vocabulary, use_bias=False, dtype=half, name="head")(x)


def gpt(sizes: GptSizes) -> Training:
    """Its train step."""
    model = _Gpt(sizes)

    def init(rng: jax.Array) -> Any:
        return model.init(rng, jnp.zeros((1, sizes.tokens), jnp.int32))["params"]

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch["tokens"])
        return next_token_loss(logits, batch["tokens"])

    fields = {"tokens": Field((sizes.batch, sizes.tokens), below=sizes.vocabulary)}
    return mixed_precision(init, loss_of, fields)
