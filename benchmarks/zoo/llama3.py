"""LLaMA-3 8B in Flax linen: scanned layers, rematerialized, `jax.nn.dot_product_attention`. Nothing here knows autopar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from benchmarks.zoo.training import Target

WIDTH, NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM, HIDDEN, VOCABULARY, NUM_LAYERS = 4096, 32, 8, 128, 14336, 128_256, 32
BF16 = jnp.bfloat16


def rotated(x: jax.Array, theta: float = 500_000.0) -> jax.Array:
    """Rotary positions, `[batch, tokens, heads, features]`."""
    tokens, dim = x.shape[1], x.shape[-1]
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequency
    cosine, sine = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1).astype(x.dtype)


def _dense(features: Any, name: str, axis: Any = -1) -> Callable[[Any], Any]:
    return nn.DenseGeneral(features, axis=axis, use_bias=False, dtype=BF16, name=name)


class Block(nn.Module):
    """One layer; the second argument is that of a scan."""

    @nn.compact
    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        y = nn.RMSNorm(dtype=BF16)(x)
        query = _dense((NUM_HEADS, HEAD_DIM), "query")(y)
        key, value = (_dense((NUM_KEY_HEADS, HEAD_DIM), name)(y) for name in ("key", "value"))
        mixed = jax.nn.dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + _dense(WIDTH, "out", axis=(-2, -1))(mixed)
        y = nn.RMSNorm(dtype=BF16)(x)
        return x + _dense(WIDTH, "down")(nn.silu(_dense(HIDDEN, "gate")(y)) * _dense(HIDDEN, "up")(y)), None


class Llama3(nn.Module):
    """Logits of tokens."""

    num_layers: int = NUM_LAYERS

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH, dtype=BF16)(tokens)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )
        x, _ = layers(name="layers")(x, None)
        return _dense(VOCABULARY, "head")(nn.RMSNorm(dtype=BF16)(x))


def llama3_8b(batch: int, tokens: int, num_layers: int = NUM_LAYERS) -> Target:
    """A train step: AdamW, float32 parameters, bfloat16 compute."""
    model = Llama3(num_layers)

    def create_state() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-4))

    def train_step(state: TrainState, tokens: Any) -> tuple[TrainState, Any]:
        def loss(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, tokens).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return train_step, (jax.eval_shape(create_state), jax.ShapeDtypeStruct((batch, tokens), jnp.int32))
