"""Define training on scikit-learn's digits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parameter_server.convergence import Task


def task() -> Task:
    """A network of one hidden layer, SGD, batches of 32."""
    from sklearn.datasets import load_digits

    data, labels = map(np.asarray, load_digits(return_X_y=True))
    images = data.astype(np.float32) / 16
    rng = np.random.default_rng(0)
    weights = {
        "in": rng.normal(size=(64, 64)).astype(np.float32) / 8,
        "in/bias": np.zeros(64, np.float32),
        "out": rng.normal(size=(64, 10)).astype(np.float32) / 8,
        "out/bias": np.zeros(10, np.float32),
    }

    def batch(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        chosen = rng.integers(0, len(images), size=32)
        return images[chosen], labels[chosen]

    return Task(weights, _loss, batch, (images, labels), optax.identity(), (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6))


def _loss(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ weights["in"] + weights["in/bias"])
    scores = jax.nn.log_softmax(hidden @ weights["out"] + weights["out/bias"])
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))
