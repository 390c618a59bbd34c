"""Apply rotary position embeddings (RoPE), with linear or LLaMA 3 scaling.

In: queries or keys, and positions. Out: the rotated arrays, whose dot products depend on relative positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """LLaMA 3's frequency-dependent scaling: long wavelengths are stretched, short ones are not, others are interpolated.

    Args:
        low_frequency_factor: wavelengths above `original_max_positions / low_frequency_factor` tokens are stretched by the
            whole factor.
        high_frequency_factor: wavelengths below `original_max_positions / high_frequency_factor` tokens are unchanged.
        original_max_positions: the context length before scaling.
    """

    low_frequency_factor: float
    high_frequency_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rotary:
    """The parameters of a rotary embedding.

    Args:
        base: theta.
        factor: the divisor of frequencies, by which wavelengths are stretched.
        llama3: the choice of the wavelengths to stretch; None stretches all.
    """

    base: float
    factor: float = 1.0
    llama3: Llama3Scaling | None = None

    def frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """The rotation of each pair of elements in radians per token, [head_dim / 2]."""
        plain = self.base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        stretched = plain / self.factor
        if self.llama3 is not None:
            low, high = self.llama3.low_frequency_factor, self.llama3.high_frequency_factor
            turns = self.llama3.original_max_positions * plain / (2 * math.pi)  # in the original context
            share = np.clip((turns - low) / (high - low), 0.0, 1.0)
            stretched = share * plain + (1 - share) * stretched
        return stretched.astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotate element i of each head with element i + head_dim / 2, the pairing of Hugging Face's checkpoints.

    Args:
        x: [batch, tokens, heads, head_dim]. positions: int, [batch, tokens].
    """
    angles = positions[:, :, None, None].astype(jnp.float32) * rotary.frequencies(x.shape[-1])
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
