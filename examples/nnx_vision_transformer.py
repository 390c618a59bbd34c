"""A vision transformer in Flax NNX: the step changes model and optimizer in place, and autopar writes the new state back.

`autopar plan examples/nnx_vision_transformer.py:target --devices 8 --hardware h100-sxm` plans it for absent GPUs.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # eight devices where there is no GPU

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import autopar

IMAGE, PATCH, WIDTH, HEADS, LAYERS, CLASSES, BATCH = 32, 8, 128, 4, 2, 10, 32


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class VisionTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, WIDTH, (PATCH, PATCH), (PATCH, PATCH), rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), ((IMAGE // PATCH) ** 2, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images).reshape(len(images), -1, WIDTH) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def create(rngs: nnx.Rngs) -> tuple[VisionTransformer, nnx.Optimizer]:
    model = VisionTransformer(rngs)
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def train_step(model: VisionTransformer, optimizer: nnx.Optimizer, batch: dict[str, Any]) -> jax.Array:
    def loss_fn(model: VisionTransformer) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def sample_batch(seed: int) -> dict[str, np.ndarray]:
    """Random images, brighter the higher their class."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, BATCH)
    noise = rng.standard_normal((BATCH, IMAGE, IMAGE, 3))
    return {"image": (noise + label[:, None, None, None] / 2).astype(np.float32), "label": label.astype(np.int32)}


def target() -> tuple[Any, ...]:
    """What `autopar plan` asks for: the step and its arguments."""
    return train_step, (*create(nnx.Rngs(0)), sample_batch(0))


if __name__ == "__main__":
    step = autopar.parallelize(train_step)
    model, optimizer = step.init(create, nnx.Rngs(0), batch=sample_batch(0))
    print(step.plan(model, optimizer, sample_batch(0)).strategy)
    for number in range(10):
        print(f"step {number}   loss {step(model, optimizer, sample_batch(number)):.3f}")
    print(
        "kernel of the first block:", jnp.shape(model.blocks[0].up.kernel), model.blocks[0].up.kernel[...].sharding.spec
    )
