"""Train a small decoder on text by an asynchronous pipeline: `python examples/async_pipeline.py`.

Two stages on two CPU devices each; PipeDream-2BW, so batches follow each other without waiting for updates, and each
gradient is one update late. The text is this repository's documentation, character by character. The same step trains synchronously,
for comparison (docs/asynchronous-pipelines.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

BATCH, LENGTH, WIDTH, HEADS, LAYERS, STEPS = 32, 64, 64, 4, 2, 200
TEXT = "".join(
    page.read_text(encoding="utf-8") for page in sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
)
LETTERS = sorted(set(TEXT))
DATA = np.searchsorted(LETTERS, np.array(list(TEXT))).astype(np.int32)
optimizer = optax.chain(optax.clip_by_block_rms(1.0), optax.adam(1e-3))


def create_state(key: jax.Array) -> Any:
    """The parameters of the decoder, with embedding and output apart, and Adam's moments."""
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(key, 3 + LAYERS * len(shapes)))

    def matrix(shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    parameters = {
        "embedding": 0.1 * jax.random.normal(next(keys), (len(LETTERS), WIDTH)),
        "positions": 0.1 * jax.random.normal(next(keys), (LENGTH, WIDTH)),
        "layers": [{name: matrix(shape) for name, shape in shapes.items()} for _ in range(LAYERS)],
        "output": matrix((WIDTH, len(LETTERS))),
    }
    return parameters, optimizer.init(parameters)


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def logits(parameters: Any, tokens: jax.Array) -> jax.Array:
    """float[batch, length, letters]."""
    x = parameters["embedding"][tokens] + parameters["positions"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for layer in parameters["layers"]:
        h = normalized(x)
        q, k, v = (jnp.reshape(h @ layer[name], (*h.shape[:2], HEADS, -1)) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        x = x + jnp.reshape(jnp.einsum("bhqk,bkhd->bqhd", weights, v), h.shape) @ layer["o"]
        x = x + jax.nn.gelu(normalized(x) @ layer["up"]) @ layer["down"]
    return normalized(x) @ parameters["output"]


def train_step(state: Any, batch: dict[str, jax.Array]) -> Any:
    parameters, moments = state

    def loss_of(parameters: Any) -> jax.Array:
        found = logits(parameters, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(found, batch["next"]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    updates, moments = optimizer.update(gradients, moments, parameters)
    return (optax.apply_updates(parameters, updates), moments), loss


def batches(count: int) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        starts = rng.integers(0, len(DATA) - LENGTH - 1, BATCH)
        rows = np.stack([DATA[start : start + LENGTH + 1] for start in starts])
        yield {"tokens": rows[:, :-1], "next": rows[:, 1:]}


def main() -> None:
    asynchronous = autopar.parallelize(train_step, stages=2, num_microbatches=4, consistency="2bw")
    losses = [float(loss) for loss in asynchronous.stream(create_state(jax.random.key(0)), batches(STEPS))]
    asynchronous.drain()
    print(asynchronous.plans[-1].strategy)
    print(f"asynchronous: loss {losses[0]:.3f} -> loss {np.mean(losses[-10:]):.3f}")
    synchronous = autopar.parallelize(train_step, stages=2, num_microbatches=4, schedule="1f1b")
    state, losses = create_state(jax.random.key(0)), []
    for batch in batches(STEPS):
        state, loss = synchronous(state, batch)
        losses.append(float(loss))
    print(f"synchronous: loss {losses[0]:.3f} -> loss {np.mean(losses[-10:]):.3f}")


if __name__ == "__main__":
    main()
