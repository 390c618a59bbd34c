"""The HNSW reference: layers, recall, number of distances."""

from __future__ import annotations

import numpy as np
import pytest
from hnsw_reference import Hnsw
from nearest import exact_nearest, recall

from autopar.vector_search.data.metrics import METRICS, Metric
from benchmarks.synthetic_vectors import faiss_synthetic


@pytest.mark.parametrize("metric", METRICS)
def test_recall_with_few_distances(metric: Metric) -> None:
    data = faiss_synthetic(12, 0, 600, 20)
    index = Hnsw(12, metric, degree=8, beam=40)
    index.add(data.corpus[:300])
    index.add(data.corpus[300:])
    before = index.num_scored
    found = np.array([index.search(query, 5, beam=40) for query in data.queries])
    assert recall(found, exact_nearest(data.queries, data.corpus, 5, metric)) >= 0.95
    assert index.num_scored - before < 0.7 * 20 * 600


def test_layers_shrink_are_nested_and_respect_the_degree() -> None:
    index = Hnsw(4, degree=4, beam=20)
    index.add(np.random.default_rng(0).normal(size=(400, 4)))
    sizes = [len(layer) for layer in index.layers]
    assert sizes[0] == 400
    assert len(sizes) > 2
    for layer, (upper, lower) in enumerate(zip(index.layers[1:], index.layers[:-1], strict=True)):
        assert set(upper) < set(lower)
        assert all(len(edges) <= (4 if layer else 8) for edges in lower.values())
    assert all(other in layer for layer in index.layers for edges in layer.values() for other in edges)


def test_empty_and_small_graphs_return_all_nodes() -> None:
    index = Hnsw(3)
    assert index.search(np.zeros(3), 5) == []
    index.add(np.eye(3))
    assert index.search(np.array([0.0, 1.0, 0.1]), 5) == [1, 2, 0]


def test_number_of_distances_is_close_to_faiss() -> None:
    faiss = pytest.importorskip("faiss")
    data = faiss_synthetic(16, 0, 1000, 30)
    theirs = faiss.IndexHNSWFlat(16, 8)
    theirs.hnsw.efConstruction = 40
    theirs.add(data.corpus)
    theirs.hnsw.efSearch = 32
    faiss.cvar.hnsw_stats.reset()
    truth = exact_nearest(data.queries, data.corpus, 10)
    reached = recall(theirs.search(data.queries, 10)[1], truth)
    index = Hnsw(16, degree=8, beam=40)
    index.add(data.corpus)
    before = index.num_scored
    found = np.array([index.search(query, 10, beam=32) for query in data.queries])
    assert abs(recall(found, truth) - reached) < 0.03
    assert 0.7 < (index.num_scored - before) / faiss.cvar.hnsw_stats.ndis < 1.3
