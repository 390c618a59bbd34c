"""An equinox module as a step's argument: its functions and settings are static, its arrays are planned."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight devices where there is no GPU

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def create(key: jax.Array) -> tuple[eqx.nn.MLP, Any]:
    model = eqx.nn.MLP(64, 1, width_size=512, depth=3, activation=jax.nn.gelu, key=key)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


@autopar.parallelize
def train_step(model: eqx.nn.MLP, opt_state: Any, batch: dict[str, Any]) -> tuple[eqx.nn.MLP, Any, jax.Array]:
    def loss_fn(model: eqx.nn.MLP) -> jax.Array:
        return jnp.mean((jax.vmap(model)(batch["x"])[:, 0] - batch["y"]) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def sample_batch(seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((256, 64), dtype=np.float32)
    return {"x": x, "y": np.sin(x[:, 0]) + x[:, 1]}


if __name__ == "__main__":
    model, opt_state = train_step.init(create, jax.random.key(0), batch=sample_batch(0))
    print(train_step.plan(model, opt_state, sample_batch(0)).strategy)
    for number in range(20):
        model, opt_state, loss = train_step(model, opt_state, sample_batch(number))
        if number % 5 == 4:
            print(f"step {number}   loss {loss:.3f}")
    print("still a module:", type(model).__name__, model.activation.__name__)
