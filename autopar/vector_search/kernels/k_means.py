"""Train k-means centroids and assign vectors to lists of bounded length.

In: vectors. Out: `Clusters`. An iteration is a pure step that can be compiled and planned. It streams the vectors in
chunks, scores a chunk against all centroids with one matmul, and sums the members with another (one-hot matrix times
chunk), so that sums are deterministic and shard like any matmul. A CPU adds members one by one, which is deterministic
there, and costs as much for any number of lists.

Between iterations, the longest lists are split in two, and the shortest or empty lists take one half each. Cells stay
nearest-centroid cells, so balancing costs no recall. After the last iteration, lists that would exceed the capacity
move vectors to other lists (`assign_within_capacity`); an example is many equal vectors, which no centroid separates.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID, scores

#: Lists longer than _LONG means are split between iterations, if a list is shorter than _SHORT means. Splitting more of
#: them costs recall (docs/decisions/0020-vector-search.md).
_LONG, _SHORT = 2.0, 0.5

#: Lists from which on the nearest is found in blocks of so many, and the block.
_BLOCKS_FROM, _BLOCK = 1024, 64

#: Vectors scored at a time by `k_means_on_host`.
_HOST_ROWS = 4096

#: Offset of the two halves, as a fraction of the rms distance of a list's vectors from their centroid.
_SPLIT_OFFSET = 0.05


class Clusters(NamedTuple):
    """centroids: f32 `[num_lists, d]`. lists: int32 `[n]`, list of each vector. counts: int32 `[num_lists]`."""

    centroids: jax.Array
    lists: jax.Array
    counts: jax.Array


class Sums(NamedTuple):
    """For each list: sum of the vectors, `[num_lists, d]`, their number, and sum of their squared distances from the
    centroid."""

    vectors: jax.Array
    counts: jax.Array
    squared_distances: jax.Array


def k_means(
    vectors: jax.Array,
    num_lists: int,
    iterations: int = 10,
    seed: int = 0,
    sample: int | None = None,
    most: float = 2.0,
    chunk: int = 8192,
) -> Clusters:
    """Cluster vectors; deterministic for a seed.

    Args:
        vectors: `[n, d]`, of any number type. The objective is l2; pass unit vectors for cosine.
        num_lists: at most n.
        sample: number of training vectors; by default at most 256 per list.
        most: upper bound of a list's length in mean lengths, above 1.
        chunk: vectors scored at a time.
    """
    num_vectors = vectors.shape[0]
    order = jax.random.permutation(jax.random.key(seed), num_vectors)
    num_sampled = min(num_vectors, max(num_lists, 256 * num_lists if sample is None else sample))
    sampled = vectors if num_sampled == num_vectors else vectors[order[:num_sampled]]
    centroids = train(sampled, vectors[order[:num_lists]], iterations, jax.random.key(seed), chunk)
    capacity = max(math.ceil(num_vectors / num_lists), math.floor(most * num_vectors / num_lists))
    lists = assign_within_capacity(vectors, centroids, capacity, chunk)
    return Clusters(centroids, lists, jnp.zeros(num_lists, jnp.int32).at[lists].add(1))


def k_means_on_host(vectors: NDArray[np.float32], num: int, iterations: int, seed: int) -> NDArray[np.float32]:
    """f32 `[num, d]`, or fewer: the centroids of few vectors, `[n, d]`, for which a program takes longer to compile than
    to run."""
    centroids = vectors[np.random.default_rng(seed).permutation(len(vectors))[:num]].astype(np.float32)
    for _ in range(iterations):
        counts, totals = np.zeros(len(centroids), np.int64), np.zeros_like(centroids)
        for start in range(0, len(vectors), _HOST_ROWS):
            part = vectors[start : start + _HOST_ROWS]
            owner = np.argmax(2 * part @ centroids.T - (centroids**2).sum(axis=1), axis=1)
            counts += np.bincount(owner, minlength=len(centroids))
            np.add.at(totals, owner, part)
        centroids[counts > 0] = totals[counts > 0] / counts[counts > 0, None]
    return centroids


@partial(jax.jit, static_argnames=("iterations", "chunk"))
def train(vectors: jax.Array, start: jax.Array, iterations: int, key: jax.Array, chunk: int = 8192) -> jax.Array:
    """Train centroids, f32 `[num_lists, d]`, from `start`; every iteration but the last splits long lists."""
    chunks, is_vector = _in_chunks(vectors, chunk)
    keys = jnp.roll(
        jax.random.split(key, iterations), -1, axis=0
    )  # the first key is of the last iteration, and not used
    is_last = jnp.arange(iterations) == iterations - 1

    def one_iteration(centroids: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        key, is_last = of
        found = sums(chunks, is_vector, centroids)
        mean = means(found, centroids)
        return jnp.where(is_last, mean, split_long_lists(mean, found, key)), None

    return lax.scan(one_iteration, start.astype(jnp.float32), (keys, is_last))[0]


def sums(chunks: jax.Array, is_vector: jax.Array, centroids: jax.Array) -> Sums:
    """Sums over the nearest-centroid cells."""
    num_lists, dim = centroids.shape

    def add(total: Sums, these: tuple[jax.Array, jax.Array]) -> tuple[Sums, None]:
        part, counted = these
        part = part.astype(jnp.float32)
        found, best = nearest(part, centroids)
        squared = jnp.maximum(jnp.sum(part * part, axis=1) - best, 0)
        lists = jnp.where(counted, found, num_lists)
        added = lax.platform_dependent(part, squared, lists, cpu=in_order, default=by_matmul)
        return jax.tree.map(jnp.add, total, added), None

    def by_matmul(part: jax.Array, squared: jax.Array, lists: jax.Array) -> Sums:
        is_member = lists[:, None] == jnp.arange(num_lists)
        one_hot = is_member.astype(jnp.float32)
        members = lax.dot(one_hot.T, part, precision=lax.Precision.HIGHEST)
        return Sums(members, jnp.sum(is_member, axis=0, dtype=jnp.int32), squared @ one_hot)

    def in_order(part: jax.Array, squared: jax.Array, lists: jax.Array) -> Sums:
        return Sums(
            jnp.zeros((num_lists, dim)).at[lists].add(part, mode="drop"),
            jnp.zeros(num_lists, jnp.int32).at[lists].add(1, mode="drop"),
            jnp.zeros(num_lists).at[lists].add(squared, mode="drop"),
        )

    nothing = Sums(jnp.zeros((num_lists, dim)), jnp.zeros(num_lists, jnp.int32), jnp.zeros(num_lists))
    return lax.scan(add, nothing, (chunks, is_vector))[0]


def means(found: Sums, centroids: jax.Array) -> jax.Array:
    """The mean of each list; an empty list keeps its centroid."""
    counts = found.counts[:, None]
    return jnp.where(counts > 0, found.vectors / jnp.maximum(counts, 1), centroids)


def split_long_lists(centroids: jax.Array, found: Sums, key: jax.Array) -> jax.Array:
    """Split the longest lists at their means along a random direction; the shortest lists take one half each."""
    num_lists, dim = centroids.shape
    by_length = jnp.argsort(found.counts)
    mean = jnp.sum(found.counts) / num_lists
    short, long = by_length, by_length[::-1]
    radius = jnp.sqrt(found.squared_distances[long] / jnp.maximum(found.counts[long], 1))
    direction = jax.random.normal(key, (num_lists, dim))
    direction = direction / jnp.linalg.norm(direction, axis=1, keepdims=True)
    offset = _SPLIT_OFFSET * radius[:, None] * direction
    is_split = (found.counts[long] > _LONG * mean) & (found.counts[short] < _SHORT * mean)
    is_split = is_split | ((found.counts[short] == 0) & (found.counts[long] > 1))
    nowhere = num_lists
    moved = centroids.at[jnp.where(is_split, short, nowhere)].set(centroids[long] + offset, mode="drop")
    return moved.at[jnp.where(is_split, long, nowhere)].set(centroids[long] - offset, mode="drop")


def nearest(vectors: jax.Array, centroids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The list of the nearest centroid of each vector, int32 `[n]`, and its score.

    Of many lists, first the best block: XLA's CPU backend takes as long for the place of a maximum as for the scores, and
    a twentieth of that for the maximum.
    """
    num_lists = len(centroids)
    if num_lists < _BLOCKS_FROM:
        found = scores(vectors, centroids, "l2")
        return jnp.argmax(found, axis=1).astype(jnp.int32), jnp.max(found, axis=1)
    # the first list again fills the last block: of equal scores, the first list counts
    filling = jnp.broadcast_to(centroids[:1], (-num_lists % _BLOCK, centroids.shape[1]))
    found = scores(vectors, jnp.concatenate([centroids, filling]), "l2").reshape(len(vectors), -1, _BLOCK)
    best = jnp.max(found, axis=2)
    block = jnp.argmax(best, axis=1)
    within = jnp.argmax(jnp.take_along_axis(found, block[:, None, None], axis=1)[:, 0], axis=1)
    return (block * _BLOCK + within).astype(jnp.int32), jnp.max(best, axis=1)


@partial(jax.jit, static_argnames=("capacity", "chunk"))
def assign_within_capacity(vectors: jax.Array, centroids: jax.Array, capacity: int, chunk: int = 8192) -> jax.Array:
    """Assign each vector to the nearest list with free capacity, int32 `[n]`.

    A full list keeps the vectors nearest to it; the others go to their nearest list that is not full, until all are
    assigned.

    Args:
        capacity: maximum length of a list; `capacity * num_lists` is at least n.
    """
    num_vectors, num_lists = vectors.shape[0], centroids.shape[0]
    assert capacity * num_lists >= num_vectors, (capacity, num_lists, num_vectors)
    chunks, _ = _in_chunks(vectors, chunk)
    index = jnp.arange(num_vectors, dtype=jnp.int32)

    def place(lists: jax.Array) -> jax.Array:
        lengths = jnp.zeros(num_lists, jnp.int32).at[jnp.where(lists == NO_ID, num_lists, lists)].add(1, mode="drop")

        def choose(part: jax.Array) -> tuple[jax.Array, jax.Array]:
            part = part.astype(jnp.float32)
            found = scores(part, centroids, "l2") - jnp.sum(part * part, axis=1)[:, None]
            found = jnp.where(lengths < capacity, found, -jnp.inf)
            return jnp.argmax(found, axis=1).astype(jnp.int32), jnp.max(found, axis=1)

        choice, score = (each.reshape(-1)[:num_vectors] for each in lax.map(choose, chunks))
        choice = jnp.where(lists == NO_ID, choice, num_lists)
        sorted_lists, _, who = lax.sort((choice, -score, index), num_keys=2)
        first = jnp.searchsorted(sorted_lists, jnp.arange(num_lists + 1, dtype=jnp.int32)).astype(jnp.int32)
        rank = index - first[sorted_lists]
        fits = (sorted_lists < num_lists) & (rank < (capacity - lengths)[jnp.minimum(sorted_lists, num_lists - 1)])
        return lists.at[jnp.where(fits, who, num_vectors)].set(sorted_lists, mode="drop")

    none = jnp.full(num_vectors, NO_ID, jnp.int32)
    return lax.while_loop(lambda lists: jnp.any(lists == NO_ID), place, none)


def _in_chunks(vectors: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Vectors as `[num_chunks, chunk, d]`, padded with zeros, and the mask of real vectors."""
    num_vectors, dim = vectors.shape
    chunk = min(chunk, num_vectors)
    num_chunks = -(-num_vectors // chunk)
    padded = jnp.pad(vectors, ((0, num_chunks * chunk - num_vectors), (0, 0)))
    is_vector = jnp.arange(num_chunks * chunk) < num_vectors
    return padded.reshape(num_chunks, chunk, dim), is_vector.reshape(num_chunks, chunk)
