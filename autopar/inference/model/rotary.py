"""Rotary positions: queries and keys turned by their position, so that their products know how far apart they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Which wavelengths LLaMA 3 stretches: long ones by the whole factor, short ones not, between them by degrees.

    Args:
        low_frequency_factor, high_frequency_factor: `original_max_positions` through these are the wavelengths, in
            tokens, above which all is stretched, and below which nothing is.
    """

    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rotary:
    """How fast each pair of elements turns.

    Args:
        base: theta. factor: positions count as so many times fewer. llama3: only where it says so.
    """

    base: float
    factor: float = 1.0
    llama3: Llama3Scaling | None = None

    def frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Radians per token, [head_dim / 2]."""
        plain = self.base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        stretched = plain / self.factor
        if self.llama3 is not None:
            low, high = self.llama3.low_frequency_factor, self.llama3.high_frequency_factor
            turns = self.llama3.original_max_positions * plain / (2 * math.pi)  # of the first context
            kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
            stretched = kept * plain + (1 - kept) * stretched
        return stretched.astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array, rotary: Rotary) -> jax.Array:
    """Turn element i of each head with element i + head_dim / 2, as Hugging Face lays out the weights.

    Args:
        x: [batch, tokens, heads, head_dim]. positions: int, [batch, tokens].
    """
    angles = positions[:, :, None, None].astype(jnp.float32) * rotary.frequencies(x.shape[-1])
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
