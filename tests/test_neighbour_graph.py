"""Neighbour graph and beam search: pruning, each node scored at most once, recall with few scores."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nearest import exact_nearest, exact_scores, recall

from autopar.vector_search.data.metrics import METRICS, NO_ID, Metric
from autopar.vector_search.graph import beam_search as beam
from autopar.vector_search.graph.build import connected
from autopar.vector_search.graph.neighbor_graph import NeighbourGraph, add_missing_in_edges, connect, pruned, reverse
from benchmarks.synthetic_vectors import faiss_synthetic

NUM, DIM = 800, 16

search = jax.jit(beam.search, static_argnames=("k", "beam", "width", "iterations"))


@cache
def made(metric: Metric = "l2") -> tuple[NeighbourGraph, np.ndarray, np.ndarray]:
    """A graph over exact neighbours, its vectors, and 30 queries."""
    data = faiss_synthetic(DIM, 0, NUM, 30)
    near = exact_nearest(data.corpus, data.corpus, 25, metric).astype(np.int32)
    graph = connect(jnp.asarray(data.corpus), near, np.arange(4), metric, degree=12, alpha=1.2, chunk=300)
    return graph, data.corpus, data.queries


def pruned_by_hand(vectors: np.ndarray, near: list[int], node: int, degree: int, alpha: float) -> list[int]:
    """Robust pruning, node by node: keep an edge unless a kept neighbour is nearer to its target by the factor."""
    kept: list[int] = []
    squared = ((vectors[:, None] - vectors[None]) ** 2).sum(axis=-1)
    for other in sorted(
        dict.fromkeys(each for each in near if each not in (node, NO_ID)), key=lambda v: squared[node, v]
    ):
        if all(alpha * squared[one, other] >= squared[node, other] for one in kept):
            kept.append(other)
    return kept[:degree]


@pytest.mark.parametrize("alpha", [1.0, 1.4])
def test_pruning_equals_pruning_node_by_node(alpha: float) -> None:
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(50, 4)).astype(np.float32)
    near = draw.integers(-1, 50, size=(50, 20)).astype(np.int32)  # with duplicates, missing entries and the node itself
    found = np.asarray(pruned(jnp.asarray(vectors), near, "l2", 6, alpha, chunk=16))
    for node in range(50):
        row = found[node]
        assert row[row != NO_ID].tolist() == pruned_by_hand(vectors, near[node].tolist(), node, 6, alpha)


def test_reverse_edges_are_nearest_first_up_to_capacity() -> None:
    edges = np.array([[1, 2], [2, NO_ID], [0, 1], [1, 2]], np.int32)
    assert reverse(edges, 3).tolist() == [
        [2, NO_ID, NO_ID],
        [0, 3, 2],
        [1, 0, 3],
        [NO_ID, NO_ID, NO_ID],
    ]
    assert reverse(edges, 1)[:, 0].tolist() == [2, 0, 1, NO_ID]


def test_edges_are_distinct_and_no_self_loops() -> None:
    edges = np.asarray(made()[0].edges)
    for node, row in enumerate(edges):
        there = row[row != NO_ID].tolist()
        assert node not in there
        assert len(set(there)) == len(there) > 0


def test_nodes_without_incoming_edge_get_one() -> None:
    edges = np.array([[1, 2], [0, 2], [1, 0], [0, 1], [1, NO_ID]], np.int32)
    # 3 and 4 have no incoming edge. 0 accepts 3 and drops 2, its farthest, as 1 has an edge to 2 too; at the same time
    # 1 accepts 4 and drops 2. Then 0, the next nearest of 2, accepts 2 and drops 1, not 3.
    assert add_missing_in_edges(edges).tolist() == [[2, 3], [0, 4], [1, 0], [0, 1], [1, NO_ID]]


def test_hub_nodes_leave_no_node_without_incoming_edge() -> None:
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(600, 48)).astype(np.float32)  # in so many dims few vectors are near to many
    near = exact_nearest(vectors, vectors, 30).astype(np.int32)
    forward = np.asarray(pruned(jnp.asarray(vectors), near, "l2", 8, 1.2, 300))
    assert len(np.unique(forward)) < 590
    edges = add_missing_in_edges(forward)
    assert set(range(600)) <= set(edges.ravel().tolist())
    assert np.all((edges != forward).sum(axis=1) <= 4 * 4)
    assert all(len(set(row)) == len(row) for row in edges.tolist() if NO_ID not in row)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("metric", METRICS)
def test_beam_search_finds_the_nearest_with_correct_scores(metric: Metric) -> None:
    graph, vectors, queries = made(metric)
    found = search(graph, jnp.asarray(queries), k=5, beam=64)
    positions = np.asarray(found.positions)
    assert recall(positions, exact_nearest(queries, vectors, 5, metric)) >= 0.95
    truth = np.take_along_axis(exact_scores(queries, vectors, metric), positions, axis=1)
    order = np.asarray(found.scores)  # l2 without the query's squared norm
    np.testing.assert_allclose(order - order[:, :1], truth - truth[:, :1], atol=1e-3)


@pytest.mark.parametrize("width", [1, 4])
def test_each_node_is_scored_and_counted_once(width: int) -> None:
    """With a beam of all nodes, every reachable node is scored once."""
    graph, vectors, queries = made()
    found = search(graph, jnp.asarray(queries[:4]), k=NUM, beam=NUM, width=width)
    for row, num in zip(np.asarray(found.positions), np.asarray(found.num_scored), strict=True):
        there = row[row != NO_ID]
        assert len(set(there.tolist())) == len(there) == num
        assert num > 0.98 * len(vectors)


def test_a_wider_beam_finds_more_and_scores_more() -> None:
    graph, vectors, queries = made()
    truth = exact_nearest(queries, vectors, 5)
    small, large = (search(graph, jnp.asarray(queries), k=5, beam=size) for size in (5, 64))
    assert recall(np.asarray(small.positions), truth) < recall(np.asarray(large.positions), truth)
    assert int(small.num_scored.sum()) < int(large.num_scored.sum()) < len(queries) * NUM


def test_results_do_not_depend_on_the_batch() -> None:
    graph, _, queries = made()
    every = search(graph, jnp.asarray(queries), k=5, beam=16)
    alone = search(graph, jnp.asarray(queries[7:8]), k=5, beam=16)
    np.testing.assert_array_equal(alone.positions[0], every.positions[7])
    assert int(alone.num_scored[0]) == int(every.num_scored[7])


@pytest.mark.slow
@pytest.mark.parametrize("num", [803, 3])
def test_all_devices_build_the_same_graph(num: int) -> None:
    """803 vectors on 8 devices: one device has fewer, and computes some again."""
    vectors = faiss_synthetic(DIM, 0, num, 1).corpus
    one, every = (connected(vectors, "l2", 8, 4, at_once=64, chunk=32, devices=jax.devices()[:size]) for size in (1, 8))
    for name in ("edges", "entries", "vectors"):
        np.testing.assert_array_equal(getattr(one, name), getattr(every, name))


@pytest.mark.parametrize("limit", [5, 16, 40])
def test_a_limited_beam_is_a_narrower_beam(limit: int) -> None:
    graph, _, queries = made()
    limited = search(graph, jnp.asarray(queries), k=5, beam=40, width=2, limit=np.int32(limit))
    narrow = search(graph, jnp.asarray(queries), k=5, beam=limit, width=2)
    for one, other in zip(limited, narrow, strict=True):
        np.testing.assert_array_equal(one, other)


def test_fixed_iterations_equal_running_to_the_end_if_sufficient() -> None:
    graph, _, queries = made()
    to_the_end, enough, few = (search(graph, jnp.asarray(queries), k=5, beam=16, iterations=n) for n in (None, 60, 3))
    for one, other in zip(to_the_end, enough, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.all(np.asarray(few.num_scored) <= len(graph.entries) + 3 * graph.degree)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_filter_applies_to_results_not_to_the_path(share: float) -> None:
    graph, vectors, queries = made()
    allowed = np.random.default_rng(1).random(NUM) < share
    found = np.asarray(search(graph, jnp.asarray(queries), k=5, beam=64, allowed=jnp.asarray(allowed)).positions)
    which = np.nonzero(allowed)[0]
    assert set(found[found != NO_ID].tolist()) <= set(which.tolist())
    if len(which):
        assert recall(found, which[exact_nearest(queries, vectors[allowed], 5)]) >= 0.9
    else:
        assert np.all(found == NO_ID)


@pytest.mark.slow
def test_k_beyond_the_corpus_is_marked() -> None:
    vectors = jnp.asarray(np.eye(3, dtype=np.float32))
    near = np.array([[1, 2], [0, 2], [0, 1]], np.int32)
    graph = connect(vectors, near, np.array([0]), "l2", degree=2)
    found = beam.search(graph, vectors, k=5)
    assert np.asarray(found.positions)[:, 0].tolist() == [0, 1, 2]
    assert np.all(np.asarray(found.positions)[:, 3:] == NO_ID)
    assert np.all(np.isneginf(np.asarray(found.scores)[:, 3:]))


@pytest.mark.slow
def test_number_of_scores_at_equal_recall_against_faiss_hnsw() -> None:
    """At most 1.3 times as many, at the same or a better recall."""
    faiss = pytest.importorskip("faiss")
    data = faiss_synthetic(32, 0, 4000, 100)
    truth = exact_nearest(data.queries, data.corpus, 10)
    theirs = faiss.IndexHNSWFlat(32, 16)
    theirs.hnsw.efConstruction = 100
    theirs.add(data.corpus)
    theirs.hnsw.efSearch = 32
    faiss.cvar.hnsw_stats.reset()
    reached = recall(theirs.search(data.queries, 10)[1], truth)
    exact = faiss.IndexFlatL2(32)
    exact.add(data.corpus)
    near = exact.search(data.corpus, 49)[1].astype(np.int32)
    graph = connect(jnp.asarray(data.corpus), near, np.arange(0, 4000, 250), "l2", degree=32)
    for size in (16, 24, 32, 48, 64):
        found = search(graph, jnp.asarray(data.queries), k=10, beam=size)
        if recall(np.asarray(found.positions), truth) >= reached:
            break
    assert recall(np.asarray(found.positions), truth) >= reached
    assert int(found.num_scored.sum()) <= 1.3 * faiss.cvar.hnsw_stats.ndis
