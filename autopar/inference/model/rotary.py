"""Apply rotary position embeddings (RoPE), with linear, LLaMA 3, YaRN or LongRoPE scaling.

In: queries or keys, and positions. Out: the rotated arrays, whose dot products depend on relative positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

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

    def kept(self, plain: NDArray[np.float64], base: float) -> NDArray[np.float64]:
        """The share of each frequency that is not stretched, [frequencies]."""
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns = self.original_max_positions * plain / (2 * math.pi)  # in the original context
        return np.clip((turns - low) / (high - low), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's scaling (Peng et al. 2023): the first dims are not stretched, the last ones are, others are interpolated.

    Args:
        original_max_positions: the context length before scaling.
        beta_fast, beta_slow: dims with more turns than `beta_fast` in the original context are unchanged; those with fewer
            than `beta_slow` are stretched by the whole factor.
        whole_dims: whether the borders between them are rounded to whole dims.
    """

    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    whole_dims: bool = True

    def kept(self, plain: NDArray[np.float64], base: float) -> NDArray[np.float64]:
        """The share of each frequency that is not stretched, [frequencies]."""
        dim = 2 * plain.size

        def border(turns: float) -> float:
            return dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = border(self.beta_fast), border(self.beta_slow)
        if self.whole_dims:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0
        return 1 - np.clip((np.arange(plain.size, dtype=np.float64) - low) / (high - low), 0.0, 1.0)

    @staticmethod
    def magnitude(factor: float, scale: float | None = None, scale_all_dims: float | None = None) -> float:
        """The factor of rotated queries and keys."""

        def of(scale: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

        return of(scale) / of(scale_all_dims) if scale and scale_all_dims else of(1.0)


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE's scaling (Ding et al. 2024): a divisor for each frequency.

    Args:
        short, long: the divisors for sequences of at most, and of more than, `original_max_positions` tokens.
        original_max_positions: the context length before scaling.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int

    def magnitude(self, factor: float) -> float:
        """The factor of rotated queries and keys."""
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self.original_max_positions))


@dataclass(frozen=True, slots=True)
class Rotary:
    """The parameters of a rotary embedding.

    Args:
        base: theta.
        factor: the divisor of frequencies, by which wavelengths are stretched.
        llama3, yarn: the choice of the wavelengths to stretch; by default all are.
        share: the share of each head's elements that are rotated, the first ones.
        long: divisors of each frequency.
        magnitude: the factor of rotated queries and keys.
        pairs_adjacent: whether element 2i is rotated with 2i + 1 (GLM), and not i with i + half of the elements.
        longest: the tokens of the longest sequence, which decides between the divisors of `long`.
    """

    base: float
    factor: float = 1.0
    llama3: Llama3Scaling | None = None
    share: float = 1.0
    yarn: Yarn | None = None
    long: LongScaling | None = None
    magnitude: float = 1.0
    pairs_adjacent: bool = False
    longest: int = 0

    def changed(self, **fields: Any) -> Rotary:
        """The same with other fields."""
        return replace(self, **fields)

    def num_rotated(self, head_dim: int) -> int:
        """The number of elements of a head that are rotated."""
        return int(head_dim * self.share)

    def frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """The rotation of each pair of elements in radians per token, [rotated elements / 2]."""
        dim = self.num_rotated(head_dim)
        plain = self.base ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.long is not None:
            is_long = self.longest > self.long.original_max_positions
            return (plain / np.array(self.long.long if is_long else self.long.short)).astype(np.float32)
        stretched, chosen = plain / self.factor, self.llama3 or self.yarn
        if chosen is not None:
            share = chosen.kept(plain, self.base)
            stretched = share * plain + (1 - share) * stretched
        return stretched.astype(np.float32)


def rotate(x: jax.Array, positions: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotate element i of each head with element i + half, the pairing of Hugging Face's checkpoints, or with i + 1.

    Args:
        x: [batch, tokens, heads, head_dim]. positions: int, [batch, tokens].
    """
    angles = positions[:, :, None, None].astype(jnp.float32) * rotary.frequencies(x.shape[-1])
    cos, sin = jnp.cos(angles) * rotary.magnitude, jnp.sin(angles) * rotary.magnitude
    dim = rotary.num_rotated(x.shape[-1])
    turned = x[..., :dim].astype(jnp.float32)
    if rotary.pairs_adjacent:
        pairs = turned.reshape(*turned.shape[:-1], dim // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(turned.shape)
    else:
        first, second = jnp.split(turned, 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    return rotated if dim == x.shape[-1] else jnp.concatenate([rotated, x[..., dim:]], axis=-1)
