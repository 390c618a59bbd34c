"""Closure assignment, as SPANN's: a vector near the border of its list is put into its neighbours' lists too.

In: vectors, centroids, and the list of each vector. Out: its lists. A query then finds in few lists what it would miss
just beyond their borders, for more memory. A further list is taken when its centroid is not much farther than the
nearest, and lies in another direction than those taken already (`diverse`): two lists side by side would be probed
together anyway.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.data.metrics import NO_ID, scores
from autopar.vector_search.kernels.robust_prune import diverse, squared_distances

#: Nearest lists that are looked at, for each that may be taken.
_LOOKED_AT = 4


@partial(jax.jit, static_argnames=("copies", "reach", "alpha", "chunk"))
def closure(
    vectors: jax.Array,
    centroids: jax.Array,
    lists: jax.Array,
    copies: int = 4,
    reach: float = 1.15,
    alpha: float = 2.0,
    chunk: int = 4096,
) -> jax.Array:
    """int32 `[n, copies]`: the lists of each vector, first that of `lists`; `NO_ID` where it has fewer.

    Args:
        vectors: `[n, d]`. centroids: `[num_lists, d]`. lists: int32 `[n]`.
        copies: in how many lists a vector may be, at most.
        reach: how many times as far as the nearest centroid another may be.
        alpha: as of `diverse`: more takes more lists in the same direction.
    """
    num_vectors, dim = vectors.shape
    chunk = min(chunk, num_vectors)
    num_chunks = -(-num_vectors // chunk)
    padding = num_chunks * chunk - num_vectors
    found = lax.map(
        lambda part: _of_chunk(part[0], centroids, part[1], copies, reach, alpha),
        (
            jnp.pad(vectors, ((0, padding), (0, 0))).reshape(num_chunks, chunk, dim),
            jnp.pad(lists, (0, padding)).reshape(num_chunks, chunk),
        ),
    )
    return found.reshape(num_chunks * chunk, -1)[:num_vectors]


def _of_chunk(
    part: jax.Array, centroids: jax.Array, own: jax.Array, copies: int, reach: float, alpha: float
) -> jax.Array:
    part = part.astype(jnp.float32)
    looked_at = min(_LOOKED_AT * copies, centroids.shape[0])
    near = lax.top_k(scores(part, centroids, "l2"), looked_at)[1].astype(jnp.int32)
    # the list that it has comes first, whether or not it is the nearest
    near = jnp.concatenate([own[:, None].astype(jnp.int32), near], axis=1)
    held = centroids[near]
    far = squared_distances(part[:, None], held)[:, 0]
    nearest = jnp.min(far, axis=1, keepdims=True)
    is_there = (far <= reach**2 * nearest) & (near != own[:, None])
    is_there = is_there.at[:, 0].set(True)
    is_kept = diverse(far, squared_distances(held, held), is_there, alpha)
    width = near.shape[1]
    order, place = lax.top_k(jnp.where(is_kept, -jnp.arange(width), -width), min(copies, width))
    taken = jnp.where(order == -width, NO_ID, jnp.take_along_axis(near, place, axis=1))
    return jnp.pad(taken, ((0, 0), (0, copies - taken.shape[1])), constant_values=NO_ID)
