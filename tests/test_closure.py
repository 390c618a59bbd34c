"""Closure assignment: the additional lists of a vector, and recall with few probes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nearest import exact_nearest, recall

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.ivf import search as list_search
from autopar.vector_search.ivf.closure import closure
from autopar.vector_search.ivf.lists import fill
from autopar.vector_search.kernels.k_means import k_means
from autopar.vector_search.kernels.robust_prune import robust_prune, squared_distances
from benchmarks.synthetic_vectors import faiss_synthetic

search = jax.jit(list_search.search, static_argnums=(2, 3))


def test_border_vector_is_in_both_lists_and_inner_vector_in_one() -> None:
    centroids = jnp.array([[0.0, 0.0], [10.0, 0.0], [10.0, 0.5]])
    vectors = jnp.array([[4.9, 0.0], [1.0, 0.0], [5.1, 0.0]])
    found = closure(vectors, centroids, jnp.array([0, 0, 1]), copies=3, reach=1.15)
    # the third list is in the direction of the second: a vector needs only one of them
    assert found.tolist() == [[0, 1, NO_ID], [0, NO_ID, NO_ID], [1, 0, NO_ID]]
    assert closure(vectors, centroids, jnp.array([0, 0, 1]), copies=1).tolist() == [[0], [0], [1]]
    assert closure(vectors, centroids, jnp.array([0, 0, 1]), copies=2, chunk=2).tolist() == found[:, :2].tolist()


def test_vector_keeps_its_assigned_list() -> None:
    centroids = jnp.array([[0.0], [10.0]])
    assert closure(jnp.array([[0.5]]), centroids, jnp.array([1]), copies=2).tolist() == [[1, 0]]


def test_pruning_goes_nearest_first() -> None:
    middle, near = np.zeros((1, 1, 2), "f"), np.array([[[1, 0], [1.2, 0.1], [0, 1.3], [-2, 0]]], "f")
    far = squared_distances(jnp.asarray(middle), jnp.asarray(near))[:, 0]
    apart = squared_distances(jnp.asarray(near), jnp.asarray(near))
    np.testing.assert_allclose(apart[0], ((near[0][:, None] - near[0][None]) ** 2).sum(-1), atol=1e-5)
    there = jnp.ones((1, 4), bool)
    assert robust_prune(far, apart, there, 1.0).tolist() == [[True, False, True, True]]
    assert robust_prune(far, apart, there.at[0, 0].set(False), 1.0).tolist() == [[False, True, True, True]]
    assert robust_prune(far, apart, there, 100.0).tolist() == [[True, True, True, True]]


@pytest.mark.slow
def test_closure_raises_recall_without_duplicates() -> None:
    data = faiss_synthetic(16, 0, 2000, 100)
    vectors = jnp.asarray(data.corpus)
    clusters = k_means(vectors, 40, iterations=4)
    centroids, lists = np.asarray(clusters.centroids), np.asarray(clusters.lists)
    several = np.asarray(closure(vectors, clusters.centroids, clusters.lists, copies=3))
    assert 1.1 < np.mean((several != NO_ID).sum(axis=1)) < 3
    truth = exact_nearest(data.queries, data.corpus, 10)
    queries = jnp.asarray(data.queries)
    found = [
        np.asarray(search(fill(data.corpus, centroids, each, "l2"), queries, 10, 4).positions)
        for each in (lists, several)
    ]
    assert recall(found[1], truth) > recall(found[0], truth) + 0.02
    assert all(len(set(row)) == 10 for row in found[1].tolist())
