"""k-means: distortion decreases, lists stay short, results are deterministic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.vector_search.data.metrics import scores
from autopar.vector_search.kernels.k_means import Sums, assign_within_capacity, k_means, nearest, split_long_lists, sums
from benchmarks.synthetic_vectors import faiss_synthetic, skewed_clusters


def distortion(vectors: np.ndarray, centroids: jax.Array, lists: jax.Array) -> float:
    return float(((vectors - np.asarray(centroids)[np.asarray(lists)]) ** 2).sum(axis=1).mean())


def test_sums_of_nearest_centroid_cells_ignore_padding() -> None:
    draw = np.random.default_rng(0)
    vectors, centroids = draw.normal(size=(2, 6, 3)).astype("f"), draw.normal(size=(4, 3)).astype("f")
    is_there = np.array([[True] * 6, [True] * 4 + [False] * 2])
    found = sums(jnp.asarray(vectors), jnp.asarray(is_there), jnp.asarray(centroids))
    flat = vectors.reshape(-1, 3)[is_there.reshape(-1)]
    squared = ((flat[:, None] - centroids) ** 2).sum(axis=-1)
    own = squared.argmin(axis=1)
    for each in range(4):
        np.testing.assert_allclose(found.vectors[each], flat[own == each].sum(axis=0), atol=1e-5)
        assert found.counts[each] == (own == each).sum()
        np.testing.assert_allclose(found.squared_distances[each], squared[own == each, each].sum(), atol=1e-5)


@pytest.mark.parametrize("num_lists", [1023, 1024, 1500])
def test_the_nearest_of_many_centroids_is_the_first_of_the_best(num_lists: int) -> None:
    draw = np.random.default_rng(0)
    centroids = draw.normal(size=(num_lists, 3)).astype("f")
    centroids[[700, -1]] = centroids[[4, 0]]  # equally near
    vectors = np.concatenate([draw.normal(size=(500, 3)), centroids[[0, 4, 700, -1]]]).astype("f")
    found, best = nearest(jnp.asarray(vectors), jnp.asarray(centroids))
    every = np.asarray(scores(jnp.asarray(vectors), jnp.asarray(centroids), "l2"))
    np.testing.assert_array_equal(found, every.argmax(axis=1))
    np.testing.assert_array_equal(best, every.max(axis=1))
    assert np.asarray(found)[-4:].tolist() == [0, 4, 4, 0]


def test_an_empty_list_takes_half_of_the_longest() -> None:
    centroids = jnp.array([[0.0, 0.0], [5.0, 5.0], [9.0, 9.0]])
    sums_of_lists = Sums(jnp.zeros((3, 2)), jnp.array([100, 0, 90]), jnp.array([100.0, 0.0, 90.0]))
    cut = np.asarray(split_long_lists(centroids, sums_of_lists, jax.random.key(0)))
    np.testing.assert_allclose((cut[0] + cut[1]) / 2, centroids[0], atol=1e-6)
    assert np.linalg.norm(cut[0] - cut[1]) > 0.05
    np.testing.assert_allclose(cut[2], centroids[2])


def test_lists_of_equal_length_are_left_alone() -> None:
    centroids = jnp.array([[0.0, 0.0], [5.0, 5.0]])
    sums_of_lists = Sums(jnp.zeros((2, 2)), jnp.array([50, 50]), jnp.array([9.0, 9.0]))
    np.testing.assert_array_equal(split_long_lists(centroids, sums_of_lists, jax.random.key(0)), centroids)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunk", [64, 8192])
def test_clusters_are_deterministic_and_iterations_reduce_the_distortion(chunk: int) -> None:
    vectors = faiss_synthetic(16, 0, 2000, 0).corpus
    once, again = (k_means(jnp.asarray(vectors), 20, iterations=8, seed=3, chunk=chunk) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(a, b)
    first = k_means(jnp.asarray(vectors), 20, iterations=1, seed=3, chunk=chunk)
    assert distortion(vectors, once.centroids, once.lists) < 0.95 * distortion(vectors, first.centroids, first.lists)
    np.testing.assert_array_equal(np.bincount(once.lists, minlength=20), once.counts)


def test_list_lengths_are_bounded_and_few_vectors_move() -> None:
    for vectors in (faiss_synthetic(16, 0, 3000, 0).corpus, skewed_clusters(16, 3000, 0, exponent=1.5).corpus):
        found = k_means(jnp.asarray(vectors), 30, most=2.0)
        assert int(found.counts.max()) <= 2 * 3000 / 30
        moved = np.mean(np.asarray(nearest(jnp.asarray(vectors), found.centroids)[0]) != np.asarray(found.lists))
        assert moved < 0.05


def test_training_on_a_sample_assigns_all() -> None:
    vectors = faiss_synthetic(16, 0, 2000, 0).corpus
    found = k_means(jnp.asarray(vectors), 20, sample=400)
    every = k_means(jnp.asarray(vectors), 20)
    assert found.lists.shape == (2000,)
    assert distortion(vectors, found.centroids, found.lists) < 1.15 * distortion(vectors, every.centroids, every.lists)


def test_equal_vectors_are_spread_over_lists() -> None:
    found = k_means(jnp.ones((100, 4)), 10, iterations=3, most=1.2)
    assert int(found.counts.max()) <= 12
    assert int(found.counts.sum()) == 100


def test_full_list_keeps_its_nearest_vectors_and_moves_the_rest() -> None:
    vectors, centroids = jnp.array([[0.0], [1.0], [2.0], [3.0], [10.0]]), jnp.array([[0.0], [10.0], [20.0]])
    np.testing.assert_array_equal(assign_within_capacity(vectors, centroids, 2, chunk=2), [0, 0, 2, 1, 1])
    np.testing.assert_array_equal(assign_within_capacity(vectors, centroids, 5, chunk=2), [0, 0, 0, 0, 1])


def test_one_list_and_as_many_lists_as_vectors() -> None:
    vectors = jnp.asarray(np.random.default_rng(0).normal(size=(12, 4)))
    one = k_means(vectors, 1)
    np.testing.assert_allclose(one.centroids[0], vectors.mean(axis=0), atol=1e-5)
    assert np.asarray(k_means(vectors, 12, most=1.0 + 1e-6).counts).tolist() == [1] * 12


@pytest.mark.slow
def test_int8_vectors_are_clustered_as_numbers() -> None:
    vectors = np.random.default_rng(0).integers(-128, 128, size=(300, 8)).astype(np.int8)
    small, wide = k_means(jnp.asarray(vectors), 6), k_means(jnp.asarray(vectors, jnp.float32), 6)
    np.testing.assert_array_equal(small.lists, wide.lists)


def test_synthetic_data_equals_that_of_faiss() -> None:
    datasets = pytest.importorskip("faiss.contrib.datasets")
    theirs = datasets.SyntheticDataset(24, 50, 100, 20)
    ours = faiss_synthetic(24, 50, 100, 20)
    for mine, other in zip(ours, (theirs.get_train(), theirs.get_database(), theirs.get_queries()), strict=True):
        np.testing.assert_array_equal(mine, other)
