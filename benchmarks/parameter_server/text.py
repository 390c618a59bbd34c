"""Define training of a small decoder on real text: the Python reference that comes with Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from benchmarks.parameter_server.convergence import Task

LETTERS, TOKENS, WIDTH, HEADS, LAYERS, BATCH = 128, 32, 48, 4, 2, 8


class Decoder(nn.Module):
    """A decoder of bytes, with normalization before attention and MLP."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(LETTERS, WIDTH)(tokens) + self.param("positions", nn.initializers.normal(0.02), (TOKENS, WIDTH))
        mask = nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x += nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(LETTERS)(nn.LayerNorm()(x))


def reference() -> np.ndarray:
    """The text as bytes; letters beyond ASCII are question marks."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8)


def task() -> Task:
    """Batches of 8 sequences of 32 bytes; every tenth part of the text is held out."""
    text = reference()
    cut = len(text) * 9 // 10
    model = Decoder()
    params: Any = model.init(jax.random.key(0), np.zeros((1, TOKENS), np.int32))["params"]
    weights = {key: np.asarray(array) for key, array in flatten_dict(params, sep="/").items()}

    def sequences(rng: np.random.Generator, first: int, last: int, count: int) -> tuple[np.ndarray]:
        starts = rng.integers(first, last - TOKENS - 1, size=count)
        return (np.stack([text[start : start + TOKENS + 1] for start in starts]).astype(np.int32),)

    def loss(weights: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
        scores: Any = model.apply({"params": unflatten_dict(dict(weights), sep="/")}, tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]))

    return Task(
        weights,
        loss,
        lambda rng: sequences(rng, 0, cut, BATCH),
        sequences(np.random.default_rng(2), cut, len(text), 128),
        optax.scale_by_adam(),
        (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
    )
