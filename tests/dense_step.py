"""A train step of equal dense layers with biases, and its arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

WIDTH, LAYERS, BATCH = 16, 4, 64


def step(params: list[Any], batch: tuple[jax.Array, jax.Array]) -> tuple[list[Any], jax.Array]:
    def loss(params: list[Any]) -> jax.Array:
        x = batch[0]
        for layer in params:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean((x - batch[1]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments(width: int = WIDTH, batch: int = BATCH) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    params = [{"kernel": jax.random.normal(key, (width, width)) / 4, "bias": jnp.zeros(width)} for key in keys[2:]]
    return params, (jax.random.normal(keys[0], (batch, width)), jax.random.normal(keys[1], (batch, width)))
