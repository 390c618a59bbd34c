"""Recall targets: what a sample shows about other queries; duplicates; inner products."""

from __future__ import annotations

import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nearest import exact_nearest, recall

from autopar import vector_search
from autopar.errors import SearchWarning
from autopar.vector_search.build import KINDS, _sample
from autopar.vector_search.data import duplicates
from autopar.vector_search.data.duplicates import Duplicates, distances_between
from autopar.vector_search.data.metrics import Metric
from autopar.vector_search.frame.approximate_index import ApproximateIndex
from autopar.vector_search.frame.recall_tuning import Measured, Recall
from autopar.vector_search.graph import beam_search as beam
from autopar.vector_search.graph.build import build_graph
from autopar.vector_search.graph.index import GRAPH
from autopar.vector_search.ivf.index import IVF, IVF_PQ
from benchmarks.synthetic_vectors import skewed_clusters

MESH_OF_ONE = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
build = partial(vector_search.build, mesh=MESH_OF_ONE, progress=False)
#: Settings of the kinds in memory, for few vectors.
FEW = {IVF: {}, IVF_PQ: {}, GRAPH: {"degree": 4}, "exact": {}}


def found_by_distance(index: Any, queries: np.ndarray, corpus: np.ndarray, metric: Metric = "l2") -> float:
    """The recall of the ten nearest; equal vectors are interchangeable."""
    last = exact_nearest(queries, corpus, 10, metric)[:, -1:]
    far, found = (distances_between(queries, corpus, which, metric) for which in (last, index.search(queries, 10).ids))
    return float(np.mean(found <= far * (1 + 1e-6) if metric == "l2" else found >= far - 1e-6 * abs(far)))


def copied(seed: int, num: int = 4000, distinct: int = 400, copied_most: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Nine in ten vectors are duplicates of a few; and 1000 queries outside the corpus."""
    data = skewed_clusters(32, distinct, 1000, num_clusters=100, seed=seed)
    draw = np.random.default_rng(seed)
    copies = data.corpus[draw.integers(0, copied_most, num - distinct)]
    return draw.permutation(np.concatenate([data.corpus, copies])), data.queries


# -- recall of a sample ----------------------------------------------------------------------


@pytest.mark.parametrize("num", [60, 512])
@pytest.mark.parametrize("share", [0.9, 0.95, 0.99])
def test_recall_bound_fails_once_in_twenty_samples(share: float, num: int) -> None:
    """For queries with recall 0 or 1, where samples vary most, and for queries that miss some neighbours."""
    draw = np.random.default_rng(0)
    for samples in (draw.random((2000, num)) < share, draw.binomial(10, share, (2000, num)) / 10):
        promised = np.array([Recall.of(sample.astype(float)).at_least for sample in samples])
        assert (promised > share).mean() <= 0.06
        assert promised.mean() > share - 5 / num - 2 * np.sqrt(share * (1 - share) / num)


def test_a_larger_sample_than_the_target_needs_has_no_tighter_bound() -> None:
    """So sets of some hundred queries reach the target as often as with a small sample."""
    draw, shares = np.random.default_rng(0), np.random.default_rng(1).binomial(10, 0.953, 4096) / 10
    assert Recall.of(shares).at_least > Recall.of(shares, 512).at_least > Recall.of(shares[:256]).at_least
    assert Recall.of(shares[:100], 512) == Recall.of(shares[:100])
    sample = lambda: draw.binomial(10, 0.95, 4096) / 10  # noqa: E731
    bounds = np.array([Recall.of(sample(), 512).at_least for _ in range(400)])
    sets = draw.binomial(10, 0.95, (400, 500)).mean(axis=1) / 10
    assert (sets >= bounds).mean() > 0.9


def test_small_samples_have_low_bounds() -> None:
    assert Recall.of(np.ones(1)) == (1.0, 0.0)
    assert Recall.of(np.ones(20)).at_least < 0.9
    assert Recall.of(np.zeros(500)) == (0.0, 0.0)


def test_older_file_has_no_target_or_bound() -> None:
    measured = Measured(3, 0.97, {3: 0.97}, 0.95, 0.955)
    assert Measured.loaded(measured.saved()) == measured
    older = {name: value for name, value in measured.saved().items() if name != "at_least"}
    assert Measured.loaded(older).reached is None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [3, 5, 7, 11])
def test_target_holds_for_unseen_queries(seed: int) -> None:
    """A corpus of duplicates: no two sample queries are equal, as equal queries are no independent samples."""
    corpus, unseen = copied(seed)
    index = build(corpus, index=IVF)
    assert index.stats().reached is True
    assert index.stats().details["recall_at_least"] >= 0.95
    assert found_by_distance(index, unseen, corpus) >= 0.94  # within the resolution of 1000 queries


@pytest.mark.slow
def test_recall_target_near_one_takes_a_larger_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    sample_sizes: list[int] = []
    run = ApproximateIndex._run

    def counted(self: Any, queries: Any, *args: Any, **options: Any) -> Any:
        sample_sizes.append(len(queries))
        return run(self, queries, *args, **options)

    monkeypatch.setattr(ApproximateIndex, "_run", counted)
    corpus = skewed_clusters(16, 2000, 1).corpus
    index = build(corpus, index=IVF, recall_target=0.99)
    assert set(sample_sizes) == {800}
    assert index.stats().reached is True


# -- duplicates in a graph -------------------------------------------------------------------


@cache
def graph_of_copies(metric: Metric = "l2") -> tuple[Any, np.ndarray, np.ndarray]:
    corpus, unseen = copied(0, 3000, 300)
    return build(corpus, index=GRAPH, metric=metric, degree=16), corpus, unseen


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_graph_search_is_not_trapped_by_duplicates(metric: Metric) -> None:
    """A narrow beam: the nearest vectors are duplicates of one vector, with edges only among each other."""
    index, corpus, unseen = graph_of_copies(metric)
    assert index.stats().reached is True
    assert index.stats().details["effort"] <= 64
    assert found_by_distance(index, unseen, corpus, metric) >= 0.94


@pytest.mark.slow
def test_duplicates_are_returned_once_and_filtered() -> None:
    index, corpus, _ = graph_of_copies()
    _, which, counts = np.unique(corpus, axis=0, return_index=True, return_counts=True)
    query = corpus[which[np.argmax(counts)]]
    equal = np.flatnonzero((corpus == query).all(axis=1))
    found = index.search(query, len(equal) + 3)
    assert sorted(found.ids[:-3].tolist()) == equal.tolist()
    assert (found.distances[:-3] == 0).all()
    assert (found.distances[-3:] > 0).all()
    allowed = np.ones(len(corpus), bool)
    allowed[equal[::2]] = False
    some = index.search(query, len(equal[1::2]) + 3, filter=allowed)
    assert sorted(some.ids[:-3].tolist()) == equal[1::2].tolist()
    assert allowed[some.ids].all()


@pytest.mark.slow
def test_graph_with_duplicates_is_saved(tmp_path: Path) -> None:
    index, _, unseen = graph_of_copies()
    index.save(tmp_path / "index")
    loaded = vector_search.load(tmp_path / "index", mesh="8", batch=8)
    assert loaded.stats().reached is True
    before, after = index.search(unseen[:8], 10), loaded.search(unseen[:8], 10)
    np.testing.assert_array_equal(before.ids, after.ids)
    np.testing.assert_allclose(before.distances, after.distances, rtol=1e-4, atol=1e-4)


def test_hash_collisions_are_not_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_factors", lambda dim: np.ones(dim, np.uint64))  # 1 2 and 2 1 have the same hash
    vectors = np.array([[1, 2], [2, 1], [1, 2], [2, 1], [3, 3]], np.float32)
    same = Duplicates.of(vectors, "l2")
    assert same.groups[0] == same.groups[2]
    assert len({*same.groups[[0, 1, 4]].tolist()}) == 3


# -- inner products on graphs ----------------------------------------------------------------


@pytest.mark.slow
def test_entry_points_for_inner_products() -> None:
    """Clusters of unequal norms: long vectors of other clusters are better than the entry points."""
    data, draw = skewed_clusters(32, 3000, 300, seed=1), np.random.default_rng(0)
    corpus, queries = (
        (each * draw.lognormal(0, 0.5, (len(each), 1))).astype(np.float32) for each in (data.corpus, data.queries)
    )
    graph = build_graph(corpus, "inner_product", degree=16)
    found = jax.jit(partial(beam.search, k=10, beam=128))(graph, jnp.asarray(queries)).positions
    assert recall(np.asarray(found), exact_nearest(queries, corpus, 10, "inner_product")) >= 0.95


# -- few vectors, few queries ----------------------------------------------------------------


@pytest.mark.slow  # the fast tier has `test_index_of_zero_one_and_five_vectors`
@pytest.mark.parametrize("metric", ["l2", "cosine", "inner_product"])
@pytest.mark.parametrize("kind", KINDS)
def test_few_vectors_are_all_found(kind: str, metric: str, tmp_path: Path) -> None:
    """One, two and ten vectors; duplicates and zeros; integers; k beyond the corpus."""
    few = [np.ones((1, 4)), np.eye(2, 4), np.zeros((3, 4)), np.full((5, 4), 7, np.int16), np.arange(40).reshape(10, 4)]
    for place, corpus in enumerate(few):
        settings = FEW.get(kind, {"path": tmp_path / str(place)})  # other kinds are on disk
        index = build(corpus, index=kind, metric=metric, **settings)
        found = index.search(np.ones((2, 4)), len(corpus) + 2)
        assert np.sort(found.ids, axis=1).tolist() == [[-1, -1, *range(len(corpus))]] * 2
        assert index.stats().reached is not False


@pytest.mark.slow
@pytest.mark.parametrize("kind", [IVF, pytest.param(GRAPH, marks=pytest.mark.slow)])
def test_one_sample_query_warns(kind: str) -> None:
    """One sample query gives no bound: the effort finds all, or the target counts as missed."""
    corpus = skewed_clusters(16, 1000, 1).corpus
    with pytest.warns(SearchWarning, match="`queries` has 1 rows, too few to show a recall of 0.95"):
        index = build(corpus, index=kind, queries=corpus[0])
    near = exact_nearest(corpus[:20], corpus, 10)
    assert recall(index.search(corpus[:20], 10).ids, near) == 1 or index.stats().reached is False


def test_sufficient_sample_does_not_warn() -> None:
    data = skewed_clusters(16, 500, 60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for target in (0.95, 1.0):  # no sample can show a recall of 1, so all vectors are searched
            taken = _sample(data.queries, data.corpus, target)
            assert taken is not None
            assert len(taken) == 60
    with pytest.warns(SearchWarning, match="`queries` has 60 rows"):
        _sample(data.queries, data.corpus, 0.99)
