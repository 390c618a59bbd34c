"""Lists and graphs built from vectors alone: searches find the nearest neighbours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nearest import exact_nearest, recall

from autopar.vector_search.data.metrics import METRICS, Metric
from autopar.vector_search.graph import beam_search as beam
from autopar.vector_search.graph.build import build_graph, near_in_lists
from autopar.vector_search.graph.entry_points import _greedy_cover, add_entry_points
from autopar.vector_search.graph.neighbor_graph import connect
from autopar.vector_search.ivf import search as list_search
from autopar.vector_search.ivf.build import build_lists
from autopar.vector_search.ivf.lists import members
from benchmarks.synthetic_vectors import faiss_synthetic, skewed_clusters

search = jax.jit(list_search.search, static_argnums=(2, 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("metric", METRICS)
def test_recall_of_few_probes_for_each_metric(metric: Metric) -> None:
    data = faiss_synthetic(16, 0, 1500, 50)
    index = build_lists(data.corpus, metric, num_lists=24, iterations=4)
    assert max(len(each) for each in members(index)) <= 2 * 1500 / 24
    found = search(index, jnp.asarray(data.queries), 5, 12)
    assert recall(np.asarray(found.positions), exact_nearest(data.queries, data.corpus, 5, metric)) >= 0.95


@pytest.mark.slow
def test_lists_of_codes_and_with_copies() -> None:
    data = faiss_synthetic(16, 0, 800, 20)
    index = build_lists(data.corpus, "l2", num_lists=12, copies=2, num_parts=8, iterations=2)
    assert index.codebooks is not None
    assert index.copies == 2
    assert sum(len(each) for each in members(index)) > 800
    found = np.asarray(search(index, jnp.asarray(data.queries), 10, 12).positions)
    assert recall(found, exact_nearest(data.queries, data.corpus, 10)) > 0.5
    assert all(len(set(row)) == 10 for row in found.tolist())


def test_index_of_one_vector() -> None:
    index = build_lists(np.ones((1, 4), np.float32), "l2")
    assert np.asarray(search(index, jnp.ones((1, 4)), 2, 3).positions).tolist() == [[0, -1]]


@pytest.mark.slow
def test_candidate_neighbours_are_in_the_order_of_the_vectors() -> None:
    vectors = faiss_synthetic(8, 0, 250, 0).corpus
    index = build_lists(vectors, "l2", num_lists=5, iterations=2)
    near = np.asarray(near_in_lists(index, jnp.asarray(vectors), 3, 5, at_once=100))
    np.testing.assert_array_equal(near, exact_nearest(vectors, vectors, 4))


@pytest.mark.slow
def test_a_graph_built_from_vectors_alone_finds_the_nearest() -> None:
    data = faiss_synthetic(16, 0, 1500, 50)
    graph = build_graph(data.corpus, "l2", degree=16, num_entries=8, iterations=3)
    assert graph.entries.size <= 8  # connected: needs no further entry points
    found = beam.search(graph, jnp.asarray(data.queries), 10, beam=64)
    assert recall(np.asarray(found.positions), exact_nearest(data.queries, data.corpus, 10)) >= 0.95


@pytest.mark.slow
def test_search_reaches_disconnected_clusters() -> None:
    data = skewed_clusters(16, 1500, 50, num_clusters=50, exponent=0.5)
    graph = build_graph(data.corpus, "l2", degree=16, num_entries=8, iterations=3)
    assert 8 < graph.entries.size <= 64
    found = beam.search(graph, jnp.asarray(data.queries), 10, beam=64)
    assert recall(np.asarray(found.positions), exact_nearest(data.queries, data.corpus, 10)) >= 0.95


@pytest.mark.slow
def test_search_reaches_small_disconnected_clusters() -> None:
    draw = np.random.default_rng(0)
    num, small, each = 3000, 20, 4
    far = np.repeat(draw.normal(size=(small, 16)) * 20, each, axis=0)
    vectors = np.concatenate([draw.normal(size=(num - len(far), 16)), far + 0.1 * draw.normal(size=far.shape)])
    near = exact_nearest(vectors, vectors, 17)
    few = connect(jnp.asarray(vectors, jnp.float32), near.astype(np.int32), np.arange(4), "l2", degree=16)
    graph = add_entry_points(few)
    assert 4 < graph.entries.size <= 4 + small  # edges connect some of them
    found = beam.search(graph, graph.vectors[-len(far) :], each, beam=16).positions
    assert recall(np.asarray(found), exact_nearest(vectors[-len(far) :], vectors, each)) == 1


@pytest.mark.slow
def test_entry_points_use_cosine_as_the_edges_do() -> None:
    data = skewed_clusters(16, 600, 40, num_clusters=20, exponent=0.5)
    # same direction, any length: in l2 some are nearer to another cluster
    corpus = data.corpus * np.random.default_rng(0).uniform(0.01, 10, (600, 1)).astype(np.float32)
    near = exact_nearest(corpus, corpus, 17, "cosine")
    few = connect(jnp.asarray(corpus), near.astype(np.int32), np.arange(4), "cosine", degree=16)
    graph = add_entry_points(few, size=10)
    assert set(range(4)) < set(graph.entries.tolist())
    found = beam.search(graph, jnp.asarray(data.queries), 10, beam=10)
    assert recall(np.asarray(found.positions), exact_nearest(data.queries, corpus, 10, "cosine")) >= 0.95


def test_entry_points_are_chosen_greedily() -> None:
    helps = np.zeros((6, 6), bool)
    np.fill_diagonal(helps, True)
    helps[[0, 1, 2], 1] = True
    helps[[2, 3], 3] = True
    helps[[3, 4], 4] = True
    # 3 helps two as well, one of them helped already; 5 helps only itself
    assert _greedy_cover(helps, 8) == [1, 4]
    assert _greedy_cover(helps, 1) == [1]
