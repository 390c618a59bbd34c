"""Product quantisation: a vector as one byte for each of its parts, the nearest of 256 centroids of that part.

In: vectors, or what they differ by from the centroids of their lists. Out: `Codebooks`, codes, and vectors again from
codes. The distance of a query from the vector that a code stands for is the sum of its tables' entries, the asymmetric
distance; here it is computed as a product with the vectors decoded, which reads no tables: lists are decoded once for
all queries that probe them, and the rest is that of lists of vectors (`list_search`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

from autopar.vector_search.kernels.k_means import nearest, train

#: Centroids of a part: as many as a byte can name.
NUM_CODES = 256


@partial(register_dataclass, data_fields=["centroids"], meta_fields=[])
@dataclass(frozen=True, slots=True)
class Codebooks:
    """centroids: f32 `[num_parts, num_codes, d / num_parts]`."""

    centroids: jax.Array

    @property
    def num_parts(self) -> int:
        return self.centroids.shape[0]

    @property
    def dim(self) -> int:
        return self.num_parts * self.centroids.shape[2]


def train_codebooks(
    vectors: jax.Array, num_parts: int, rounds: int = 10, seed: int = 0, num_codes: int = NUM_CODES, sample: int = 65536
) -> Codebooks:
    """Codebooks by k-means of each part by itself.

    Args:
        vectors: `[n, d]`, of which at most `sample` are looked at. num_parts: divides d.
        num_codes: at most n, and at most 256.
    """
    order = jax.random.permutation(jax.random.key(seed), vectors.shape[0])[:sample]
    parts = _parts(vectors[order], num_parts)
    keys = jax.random.split(jax.random.key(seed), num_parts)
    one = partial(train, rounds=rounds, chunk=1024)
    return Codebooks(jax.vmap(lambda part, key: one(part, part[:num_codes], key=key))(parts, keys))


@jax.jit
def encode(codebooks: Codebooks, vectors: jax.Array) -> jax.Array:
    """uint8 `[n, num_parts]`: of each part of `vectors`, `[n, d]`, the nearest centroid."""
    code, _ = jax.vmap(nearest)(_parts(vectors, codebooks.num_parts), codebooks.centroids)
    return code.T.astype(jnp.uint8)


def decode(codebooks: Codebooks, codes: jax.Array) -> jax.Array:
    """f32 `[.., d]`: what codes, `[.., num_parts]`, stand for."""
    num_parts, num_codes, width = codebooks.centroids.shape
    rows = codes.astype(jnp.int32) + jnp.arange(num_parts, dtype=jnp.int32) * num_codes
    flat = codebooks.centroids.reshape(num_parts * num_codes, width)
    found = flat.at[rows].get(mode="promise_in_bounds")
    return found.reshape(*codes.shape[:-1], codebooks.dim)


def _parts(vectors: jax.Array, num_parts: int) -> jax.Array:
    """f32 `[num_parts, n, d / num_parts]`."""
    num, dim = vectors.shape
    return jnp.moveaxis(vectors.astype(jnp.float32).reshape(num, num_parts, dim // num_parts), 1, 0)
