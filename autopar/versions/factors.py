"""Sufficient factors: the gradient of a matrix as the factors of a product of low rank.

In: the inputs of a layer and the gradients of its outputs. Out: fewer bytes than the gradient, if there are few examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class SufficientFactors:
    """An update of a matrix as `left.T @ right`, which a layer's gradient is: the sum of one outer product per example.

    For `y = x @ kernel`, `left` is x and `right` the gradient of y (Xie et al. 2016). A push sends the factors where they
    have fewer bytes than the matrix, else the matrix.

    Args:
        left: of shape `(K, M)`.
        right: of shape `(K, N)`; the matrix is `(M, N)`.
    """

    left: jax.Array
    right: jax.Array

    @property
    def num_bytes(self) -> int:
        return self.left.nbytes + self.right.nbytes

    def product(self) -> jax.Array:
        """The matrix."""
        return _product(self.left, self.right)


@jax.jit
def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left.T, right, precision=jax.lax.Precision.HIGHEST)
