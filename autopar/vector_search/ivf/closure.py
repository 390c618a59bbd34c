"""Assign vectors near a list's border to neighbouring lists too: the closure assignment of SPANN.

In: vectors, centroids, and the list of each vector. Out: up to `copies` lists of each vector. A query then needs fewer
probes, for more memory. A further list is taken if its centroid is not much farther than the nearest one, and lies in
another direction than the lists already taken (`robust_prune`): lists in the same direction are probed together anyway.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.data.metrics import NO_ID, scores
from autopar.vector_search.kernels.robust_prune import robust_prune, squared_distances

#: Candidate lists per copy.
_CANDIDATES_PER_COPY = 4


@partial(jax.jit, static_argnames=("copies", "reach", "alpha", "chunk"))
def closure(
    vectors: jax.Array,
    centroids: jax.Array,
    lists: jax.Array | None = None,
    copies: int = 4,
    reach: float = 1.15,
    alpha: float = 2.0,
    chunk: int = 4096,
) -> jax.Array:
    """int32 `[n, copies]`: the lists of each vector, first that of `lists`; `NO_ID` for fewer lists.

    Args:
        vectors: `[n, d]`.
        centroids: `[num_lists, d]`.
        lists: int32 `[n]`; None: the nearest.
        copies: maximum number of lists per vector.
        reach: maximum distance of a further centroid, relative to the nearest one.
        alpha: as in `robust_prune`; larger takes more lists in the same direction.
    """
    num_vectors, dim = vectors.shape
    chunk = min(chunk, num_vectors)
    num_chunks = -(-num_vectors // chunk)
    padding = num_chunks * chunk - num_vectors
    parts = jnp.pad(vectors, ((0, padding), (0, 0))).reshape(num_chunks, chunk, dim)
    own = None if lists is None else jnp.pad(lists, (0, padding)).reshape(num_chunks, chunk)
    found = lax.map(lambda part: _close_chunk(part[0], centroids, part[1], copies, reach, alpha), (parts, own))
    return found.reshape(num_chunks * chunk, -1)[:num_vectors]


def _close_chunk(
    part: jax.Array, centroids: jax.Array, own: jax.Array | None, copies: int, reach: float, alpha: float
) -> jax.Array:
    part = part.astype(jnp.float32)
    near = lax.top_k(scores(part, centroids, "l2"), num_candidates(copies, len(centroids)))[1].astype(jnp.int32)
    # without the barrier, XLA takes the first column of a sort of all scores, which costs 17 times as much as `top_k`
    near = lax.optimization_barrier(near)
    return _kept_among(part, centroids, near[:, 0] if own is None else own, near, copies, reach, alpha)


def num_candidates(copies: int, num_lists: int) -> int:
    """The number of near lists that `closure` considers for a vector."""
    return min(_CANDIDATES_PER_COPY * copies, num_lists)


@partial(jax.jit, static_argnames=("copies", "reach", "alpha"))
def closure_among(
    vectors: jax.Array, centroids: jax.Array, near: jax.Array, copies: int, reach: float, alpha: float = 2.0
) -> jax.Array:
    """`closure` of vectors whose near lists are known: int32 `[n, m]`, nearest first."""
    return _kept_among(vectors.astype(jnp.float32), centroids, near[:, 0], near, copies, reach, alpha)


def _kept_among(
    part: jax.Array,
    centroids: jax.Array,
    own: jax.Array,
    near: jax.Array,
    copies: int,
    reach: float,
    alpha: float,
) -> jax.Array:
    # the assigned list comes first, even if it is not the nearest
    near = jnp.concatenate([own[:, None].astype(jnp.int32), near], axis=1)
    near_centroids = centroids[near]
    distances = squared_distances(part[:, None], near_centroids)[:, 0]
    nearest = jnp.min(distances, axis=1, keepdims=True)
    is_candidate = (distances <= reach**2 * nearest) & (near != own[:, None])
    is_candidate = is_candidate.at[:, 0].set(True)
    is_kept = robust_prune(distances, squared_distances(near_centroids, near_centroids), is_candidate, alpha)
    width = near.shape[1]
    order, place = lax.top_k(jnp.where(is_kept, -jnp.arange(width), -width), min(copies, width))
    taken = jnp.where(order == -width, NO_ID, jnp.take_along_axis(near, place, axis=1))
    return jnp.pad(taken, ((0, 0), (0, copies - taken.shape[1])), constant_values=NO_ID)
