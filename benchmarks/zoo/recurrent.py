"""A language model of Flax's own LSTM cells. In: sizes. Out: `Training`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.training import F32, Batch, Field, Training, next_token_loss, training


class Recurrent(nn.Module):
    """An embedding, layers of `nn.OptimizedLSTMCell` under `nn.RNN`, which is a `lax.scan` over time, and a head."""

    vocabulary: int
    width: int
    num_layers: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.num_layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
            x = nn.Dropout(self.dropout, deterministic=False)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


def lstm(
    vocabulary: int, width: int, num_layers: int, batch: int, seq: int, dropout: float = 0.1, dtype: Any = F32
) -> Training:
    """Next-token prediction."""
    model = Recurrent(vocabulary, width, num_layers, dropout, dtype)

    def init(rng: jax.Array) -> Any:
        params, drops = jax.random.split(rng)
        return model.init({"params": params, "dropout": drops}, jnp.zeros((1, 2), jnp.int32))["params"]

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch["tokens"], rngs={"dropout": rng})
        return next_token_loss(logits, batch["tokens"])

    return training(init, loss_of, {"tokens": Field((batch, seq), below=vocabulary)})
