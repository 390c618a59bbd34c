"""Encode vectors with product quantization: one byte per subvector, the nearest of 256 centroids.

In: vectors, or residuals from the centroids of their lists. Out: `Codebooks`, codes, and decoded vectors. The
asymmetric distance of a query to a code equals the distance to the decoded vector, so no lookup tables are needed: the
search decodes a list once for all queries that probe it, and then scores it like a list of vectors (`ivf.search`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass
from numpy.typing import NDArray

from autopar.vector_search.kernels.k_means import nearest, train

#: Centroids per codebook: as many as a byte can index.
NUM_CODES = 256

#: Bytes of the distances between subvectors and codes that `encoded` computes at a time.
_DISTANCE_BYTES = 2**24


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
    vectors: jax.Array,
    num_parts: int,
    iterations: int = 10,
    seed: int = 0,
    num_codes: int = NUM_CODES,
    sample: int = 65536,
) -> Codebooks:
    """Train one k-means codebook per subvector.

    Args:
        vectors: `[n, d]`; at most `sample` of them are used.
        num_parts: number of subvectors, a divisor of d.
        num_codes: centroids per codebook, at most n and 256.
    """
    order = jax.random.permutation(jax.random.key(seed), vectors.shape[0])[:sample]
    parts = _parts(vectors[order], num_parts)
    keys = jax.random.split(jax.random.key(seed), num_parts)
    one = partial(train, iterations=iterations, chunk=1024)
    return Codebooks(jax.vmap(lambda part, key: one(part, part[:num_codes], key=key))(parts, keys))


@jax.jit
def encode(codebooks: Codebooks, vectors: jax.Array) -> jax.Array:
    """uint8 `[n, num_parts]`: for each subvector of `vectors`, `[n, d]`, its nearest centroid."""
    code, _ = jax.vmap(nearest)(_parts(vectors, codebooks.num_parts), codebooks.centroids)
    return code.T.astype(jnp.uint8)


def encoded(codebooks: Codebooks, vectors: NDArray[np.float32]) -> NDArray[np.uint8]:
    """As `encode`, by one program for any number of vectors, and within `_DISTANCE_BYTES` of temporary memory."""
    num_parts, num_codes, _ = codebooks.centroids.shape
    rows = max(1, _DISTANCE_BYTES // (4 * num_parts * num_codes))
    codes = np.empty((len(vectors), num_parts), np.uint8)
    for start in range(0, len(vectors), rows):
        part = vectors[start : start + rows]
        padded = np.zeros((rows, codebooks.dim), np.float32)
        padded[: len(part)] = part
        codes[start : start + rows] = np.asarray(_encode(codebooks, padded))[: len(part)]
    return codes


_encode = jax.jit(encode)


def decode(codebooks: Codebooks, codes: jax.Array) -> jax.Array:
    """f32 `[.., d]`: the vectors of codes, `[.., num_parts]`."""
    num_parts, num_codes, width = codebooks.centroids.shape
    rows = codes.astype(jnp.int32) + jnp.arange(num_parts, dtype=jnp.int32) * num_codes
    flat = codebooks.centroids.reshape(num_parts * num_codes, width)
    found = flat.at[rows].get(mode="promise_in_bounds")
    return found.reshape(*codes.shape[:-1], codebooks.dim)


def _parts(vectors: jax.Array, num_parts: int) -> jax.Array:
    """Subvectors, f32 `[num_parts, n, d / num_parts]`."""
    num, dim = vectors.shape
    return jnp.moveaxis(vectors.astype(jnp.float32).reshape(num, num_parts, dim // num_parts), 1, 0)
