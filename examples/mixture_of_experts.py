"""A mixture of experts (flax.linen, dense dispatch as in GShard): expert parallelism is found, not asked for.

`autopar plan examples/mixture_of_experts.py:target --devices 8 --hardware h100-sxm` plans it for absent GPUs.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight devices where there is no GPU

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import autopar

EXPERTS, WIDTH, HIDDEN, BATCH, SEQ, CAPACITY = 8, 64, 256, 16, 32, 8  # places per expert and sequence


class Experts(nn.Module):
    """Each token goes to the best of its experts that has a place left; the others let it pass."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="router")(x))  # batch, seq, expert
        chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
        place = (jnp.cumsum(chosen, 1) - 1) * chosen
        dispatch = chosen[..., None] * jax.nn.one_hot(place.sum(-1).astype(jnp.int32), CAPACITY)[:, :, None]
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (EXPERTS, WIDTH, HIDDEN))
        down = self.param("down", init, (EXPERTS, HIDDEN, WIDTH))
        sent = jnp.einsum("bsec,bsm->ebcm", dispatch, x)
        made = jnp.einsum("ebch,ehm->ebcm", nn.gelu(jnp.einsum("ebcm,emh->ebch", sent, up)), down)
        balance = EXPERTS * (chosen.mean((0, 1)) * gates.mean((0, 1))).sum()  # 1 where all get the same
        return x + jnp.einsum("ebcm,bsec->bsm", made, dispatch * gates[..., None]), balance


MODEL = Experts()


def create_state(key: jax.Array) -> TrainState:
    params = MODEL.init(key, jnp.zeros((BATCH, SEQ, WIDTH)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=optax.adam(1e-2))


def train_step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> Any:
        y, balance = state.apply_fn({"params": params}, batch["x"])
        error = jnp.mean((y - batch["y"]) ** 2)
        return error + 0.01 * balance, {"error": error, "balance": balance}

    grads, metrics = jax.grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), metrics


def sample_batch(seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((BATCH, SEQ, WIDTH), dtype=np.float32)
    return {"x": x, "y": -x}


def target() -> tuple[Any, ...]:
    """What `autopar plan` asks for: the step and its arguments."""
    return train_step, (jax.eval_shape(create_state, jax.random.key(0)), sample_batch(0))


if __name__ == "__main__":
    step = autopar.parallelize(train_step)
    state = step.init(create_state, jax.random.key(0), batch=sample_batch(0))
    print(step.plan(state, sample_batch(0)).strategy)
    for number in range(20):
        state, metrics = step(state, sample_batch(number))
        if number % 5 == 4:
            print(f"step {number}   error {metrics['error']:.3f}   balance {metrics['balance']:.2f}")
