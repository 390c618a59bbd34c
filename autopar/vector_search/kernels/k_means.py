"""k-means: centroids of vectors, and the list of each vector, of which none is much longer than the mean.

In: vectors. Out: `Clusters`. Every round is one pure step that can be compiled and planned: vectors stream by in chunks,
are compared with all centroids by one product, and are added up by another (a one-hot matrix times the chunk, so that
the sums are the same in every run, and split like any product).

Between rounds, lists that are too long are cut in two, and the emptiest take one of the halves each: an empty list is
one of these. Cells stay nearest-centroid cells, so that a search which probes the nearest loses nothing to balance.
Only after the last round are vectors moved to other lists, where a list would still be too long (`within_room`): of
equal vectors for example, which no centroid tells apart.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.data.metrics import NO_ID, scores

#: Lists longer than this many means are cut between rounds, if there is one shorter than the other figure. Cutting more
#: of them costs recall (docs/decisions/0020-vector-search.md).
_LONG, _SHORT = 2.0, 0.5

#: Halves start this far apart, in parts of the distance of a list's vectors from their centroid.
_APART = 0.05


class Clusters(NamedTuple):
    """centroids: f32 `[num_lists, d]`. lists: int32 `[n]`, of each vector. counts: int32 `[num_lists]`."""

    centroids: jax.Array
    lists: jax.Array
    counts: jax.Array


class Sums(NamedTuple):
    """Of each list: vectors added up `[num_lists, d]`, how many, and their squared distances from the centroid."""

    vectors: jax.Array
    counts: jax.Array
    squared_distances: jax.Array


def k_means(
    vectors: jax.Array,
    num_lists: int,
    rounds: int = 10,
    seed: int = 0,
    sample: int | None = None,
    most: float = 2.0,
    chunk: int = 8192,
) -> Clusters:
    """Centroids and the list of each vector, the same for the same seed.

    Args:
        vectors: `[n, d]`, of any number type; l2 is what is made small. Give unit vectors for cosines.
        num_lists: at most n.
        sample: train on this many of the vectors; on at most 256 a list, where it is not given.
        most: how many times the mean length a list may be: above 1.
        chunk: vectors compared at once.
    """
    num_vectors = vectors.shape[0]
    order = jax.random.permutation(jax.random.key(seed), num_vectors)
    num_sampled = min(num_vectors, max(num_lists, 256 * num_lists if sample is None else sample))
    sampled = vectors if num_sampled == num_vectors else vectors[order[:num_sampled]]
    centroids = train(sampled, vectors[order[:num_lists]], rounds, jax.random.key(seed), chunk)
    # All lists together must hold all vectors.
    room = max(math.ceil(num_vectors / num_lists), math.floor(most * num_vectors / num_lists))
    lists = within_room(vectors, centroids, room, chunk)
    return Clusters(centroids, lists, jnp.zeros(num_lists, jnp.int32).at[lists].add(1))


@partial(jax.jit, static_argnames=("rounds", "chunk"))
def train(vectors: jax.Array, start: jax.Array, rounds: int, key: jax.Array, chunk: int = 8192) -> jax.Array:
    """Centroids, f32 `[num_lists, d]`, by rounds of `step` from `start`; lists are cut in all rounds but the last."""
    chunks, is_there = _in_chunks(vectors, chunk)
    keys = jax.random.split(key, rounds)

    def one_round(centroids: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        return step(chunks, is_there, centroids, key), None

    trained = lax.scan(one_round, start.astype(jnp.float32), keys[1:])[0]
    return means(sums(chunks, is_there, trained), trained)


def step(chunks: jax.Array, is_there: jax.Array, centroids: jax.Array, key: jax.Array) -> jax.Array:
    """One round: the means of the cells of `centroids`, the longest lists cut.

    Args:
        chunks: `[num_chunks, chunk, d]`. is_there: bool `[num_chunks, chunk]`, False of padding.
    """
    found = sums(chunks, is_there, centroids)
    return cut_long_lists(means(found, centroids), found, key)


def sums(chunks: jax.Array, is_there: jax.Array, centroids: jax.Array) -> Sums:
    """What the cells of `centroids` hold."""
    num_lists, dim = centroids.shape

    def add(total: Sums, these: tuple[jax.Array, jax.Array]) -> tuple[Sums, None]:
        part, counted = these
        part = part.astype(jnp.float32)
        found, best = nearest(part, centroids)
        squared = jnp.maximum(jnp.sum(part * part, axis=1) - best, 0)
        is_member = (found[:, None] == jnp.arange(num_lists)) & counted[:, None]
        one_hot = is_member.astype(jnp.float32)
        added = Sums(
            lax.dot(one_hot.T, part, precision=lax.Precision.HIGHEST),
            jnp.sum(is_member, axis=0, dtype=jnp.int32),
            squared @ one_hot,
        )
        return jax.tree.map(jnp.add, total, added), None

    nothing = Sums(jnp.zeros((num_lists, dim)), jnp.zeros(num_lists, jnp.int32), jnp.zeros(num_lists))
    return lax.scan(add, nothing, (chunks, is_there))[0]


def means(found: Sums, centroids: jax.Array) -> jax.Array:
    """Of each list; of an empty one the centroid it had."""
    counts = found.counts[:, None]
    return jnp.where(counts > 0, found.vectors / jnp.maximum(counts, 1), centroids)


def cut_long_lists(centroids: jax.Array, found: Sums, key: jax.Array) -> jax.Array:
    """The longest lists cut in two through their means, across a random direction; the emptiest take the halves."""
    num_lists, dim = centroids.shape
    by_length = jnp.argsort(found.counts)
    mean = jnp.sum(found.counts) / num_lists
    short, long = by_length, by_length[::-1]
    radius = jnp.sqrt(found.squared_distances[long] / jnp.maximum(found.counts[long], 1))
    direction = jax.random.normal(key, (num_lists, dim))
    direction = direction / jnp.linalg.norm(direction, axis=1, keepdims=True)
    away = _APART * radius[:, None] * direction
    is_cut = (found.counts[long] > _LONG * mean) & (found.counts[short] < _SHORT * mean)
    is_cut = is_cut | ((found.counts[short] == 0) & (found.counts[long] > 1))
    nowhere = num_lists
    taken = centroids.at[jnp.where(is_cut, short, nowhere)].set(centroids[long] + away, mode="drop")
    return taken.at[jnp.where(is_cut, long, nowhere)].set(centroids[long] - away, mode="drop")


def nearest(vectors: jax.Array, centroids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The list, int32 `[n]`, whose centroid is nearest to each vector, and its score."""
    found = scores(vectors, centroids, "l2")
    best = jnp.max(found, axis=1)
    return jnp.argmax(found, axis=1).astype(jnp.int32), best


@partial(jax.jit, static_argnames=("room", "chunk"))
def within_room(vectors: jax.Array, centroids: jax.Array, room: int, chunk: int = 8192) -> jax.Array:
    """The nearest list of each vector, int32 `[n]`, where no list may have more than `room`: a list keeps the vectors
    nearest to it, the others go to their nearest list that is not full, until all have one.

    Args:
        room: `room * num_lists` is at least n.
    """
    num_vectors, num_lists = vectors.shape[0], centroids.shape[0]
    assert room * num_lists >= num_vectors, (room, num_lists, num_vectors)
    chunks, _ = _in_chunks(vectors, chunk)
    index = jnp.arange(num_vectors, dtype=jnp.int32)

    def place(lists: jax.Array) -> jax.Array:
        held = jnp.zeros(num_lists, jnp.int32).at[jnp.where(lists == NO_ID, num_lists, lists)].add(1, mode="drop")

        def wanted(part: jax.Array) -> tuple[jax.Array, jax.Array]:
            part = part.astype(jnp.float32)
            found = scores(part, centroids, "l2") - jnp.sum(part * part, axis=1)[:, None]
            found = jnp.where(held < room, found, -jnp.inf)
            return jnp.argmax(found, axis=1).astype(jnp.int32), jnp.max(found, axis=1)

        want, score = (each.reshape(-1)[:num_vectors] for each in lax.map(wanted, chunks))
        want = jnp.where(lists == NO_ID, want, num_lists)
        want_sorted, _, who = lax.sort((want, -score, index), num_keys=2)
        first = jnp.searchsorted(want_sorted, jnp.arange(num_lists + 1, dtype=jnp.int32)).astype(jnp.int32)
        rank = index - first[want_sorted]
        fits = (want_sorted < num_lists) & (rank < (room - held)[jnp.minimum(want_sorted, num_lists - 1)])
        return lists.at[jnp.where(fits, who, num_vectors)].set(want_sorted, mode="drop")

    none = jnp.full(num_vectors, NO_ID, jnp.int32)
    return lax.while_loop(lambda lists: jnp.any(lists == NO_ID), place, none)


def _in_chunks(vectors: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """`[num_chunks, chunk, d]`, padded with zeros, and which of them are vectors."""
    num_vectors, dim = vectors.shape
    chunk = min(chunk, num_vectors)
    num_chunks = -(-num_vectors // chunk)
    padded = jnp.pad(vectors, ((0, num_chunks * chunk - num_vectors), (0, 0)))
    is_there = jnp.arange(num_chunks * chunk) < num_vectors
    return padded.reshape(num_chunks, chunk, dim), is_there.reshape(num_chunks, chunk)
