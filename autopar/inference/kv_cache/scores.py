"""Define how attention makes weights from the dot products of queries and keys: scale, soft cap, window, ALiBi.

In: the fields of one layer. Out: `Scores`, which every implementation of attention takes, and its parts as functions of arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class Scores:
    """The fields of one layer's attention.

    Args:
        scale: the factor of the dot products; None is 1 / sqrt(head_dim).
        softcap: the bound c of c tanh(score / c), applied to the scaled scores (Gemma 2); None applies none.
        window: the tokens that each token sees, itself included; None is all before it.
        slopes: the factors of the key's position that are added to the dot products of each head before they are scaled
            (ALiBi, Press et al. 2021); None adds nothing.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    slopes: tuple[float, ...] | None = None

    def scale_of(self, head_dim: int) -> float:
        """The factor of the dot products."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def capped(self, scores: jax.Array) -> jax.Array:
        """Bound scaled scores by the soft cap."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def may_see(self, key_positions: jax.Array, query_positions: jax.Array) -> jax.Array:
        """Whether a query may see a key. The arrays are broadcast."""
        seen = key_positions <= query_positions
        return seen if self.window is None else seen & (key_positions > query_positions - self.window)

    def bias(self, length: int, head_dim: int) -> jax.Array | None:
        """The bias that ALiBi adds to scaled scores, f32 `[1, heads, 1, length]`, or None.

        Falcon computes it in bfloat16, so slopes, positions and their products are rounded to it.
        """
        if self.slopes is None:
            return None
        slopes, positions = (_bfloat16(array) for array in (jnp.array(self.slopes), jnp.arange(float(length))))
        return _bfloat16(slopes[:, None] * positions)[None, :, None, :] * self.scale_of(head_dim)


def _bfloat16(array: jax.Array) -> jax.Array:
    """Round float32 to the values of bfloat16. XLA may leave out a conversion to a narrow dtype and back, but not this."""
    return jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)


PLAIN = Scores()
