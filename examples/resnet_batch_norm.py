"""A ResNet (flax.linen): batch statistics are part of the state; training and evaluation share one layout of it."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight devices where there is no GPU

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import autopar

IMAGE, CLASSES, BATCH = 16, 10, 64


class TrainState(train_state.TrainState):
    batch_stats: Any


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        def norm(x: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)

        x = nn.relu(norm(nn.Conv(16, (3, 3), use_bias=False)(x)))
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            y = nn.relu(norm(nn.Conv(width, (3, 3), stride, use_bias=False)(x)))
            y = norm(nn.Conv(width, (3, 3), use_bias=False)(y))
            x = nn.relu(y + (x if x.shape == y.shape else norm(nn.Conv(width, (1, 1), stride, use_bias=False)(x))))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


MODEL = ResNet()


def create_state(key: jax.Array) -> TrainState:
    made = MODEL.init(key, jnp.zeros((1, IMAGE, IMAGE, 3)), train=False)
    tx = optax.sgd(optax.cosine_decay_schedule(0.03, 100), momentum=0.9, nesterov=True)
    return TrainState.create(apply_fn=MODEL.apply, params=made["params"], batch_stats=made["batch_stats"], tx=tx)


@autopar.parallelize
def train_step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), changed

    (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"]), loss


@autopar.parallelize(like=train_step)
def eval_step(state: TrainState, batch: dict[str, Any]) -> jax.Array:
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, batch["image"], train=False)
    return (logits.argmax(-1) == batch["label"]).mean()


def sample_batch(seed: int) -> dict[str, np.ndarray]:
    """Random images, brighter the higher their class."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, BATCH)
    noise = rng.standard_normal((BATCH, IMAGE, IMAGE, 3))
    return {"image": (noise + label[:, None, None, None] / 2).astype(np.float32), "label": label.astype(np.int32)}


if __name__ == "__main__":
    state = train_step.init(create_state, jax.random.key(0), batch=sample_batch(0))
    print(train_step.plan(state, sample_batch(0)).strategy)
    for number in range(10):
        state, loss = train_step(state, sample_batch(number))
        if number % 5 == 4:
            print(f"step {number}   loss {loss:.3f}   accuracy {eval_step(state, sample_batch(100)):.2f}")
