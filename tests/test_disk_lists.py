"""Which lists on disk a query reads: learned rules, long lists, many centroids."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from nearest import exact_nearest, recall

from autopar import vector_search
from autopar.errors import IndexFileError
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.graph import nearest_points
from autopar.vector_search.on_disk.hit_model import Lists, first_hits, fitted
from autopar.vector_search.on_disk.hit_rule import tuned_rule
from autopar.vector_search.on_disk.long_lists import LONGEST
from autopar.vector_search.on_disk.page_file import PageFileWriter, open_page_file
from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES
from autopar.vector_search.on_disk.probing import Nearest
from benchmarks.synthetic_vectors import faiss_synthetic

NUM, DIM, NUM_LISTS = 1500, 16, 40
DATA = faiss_synthetic(DIM, 0, NUM, 60)
build_on_disk = partial(vector_search.build_on_disk, progress=False, num_lists=NUM_LISTS, reader="mmap")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> vector_search.DiskIndex:
    return build_on_disk(DATA.corpus, tmp_path_factory.mktemp("lists") / "index")


def sample(num_queries: int, seed: int) -> tuple[Nearest, Lists, np.ndarray]:
    """Queries that find a neighbour in list r with a probability that falls with r and with its distance."""
    draw = np.random.default_rng(seed)
    distances = np.sort(draw.uniform(1, 3, (num_queries, 20)).astype(np.float32), axis=1)
    near = draw.permuted(np.tile(np.arange(50), (num_queries, 1)), axis=1)[:, :20]
    likely = np.exp(-4 * (distances / distances[:, :1] - 1))
    likely /= likely.sum(axis=1, keepdims=True)
    ranks = (draw.random((num_queries, 10, 1)) > np.cumsum(likely, axis=1)[:, None]).sum(axis=2)
    lists = Lists(draw.normal(size=(50, 4)).astype(np.float32), draw.integers(20, 90, 50), np.ones(50, np.float32))
    return Nearest(near, distances / distances[:, :1], distances), lists, ranks.astype(np.int32)


def test_model_predicts_the_hits_of_other_queries() -> None:
    nearest, lists, ranks = sample(2000, 0)
    model, expected = fitted(nearest, lists, first_hits(ranks, 20))
    assert expected.sum() == pytest.approx(first_hits(ranks, 20).sum(), rel=0.03)
    other, _, other_ranks = sample(2000, 1)
    predicted, counted = model.hits(other, lists), first_hits(other_ranks, 20)
    assert predicted.sum() == pytest.approx(counted.sum(), rel=0.03)
    np.testing.assert_allclose(predicted.mean(axis=0), counted.mean(axis=0), atol=0.1)
    top, low = predicted > 1, predicted < 0.3
    assert counted[top].mean() > 4 * counted[low].mean()


def test_recall_of_a_small_sample_is_that_of_other_queries() -> None:
    """The model knows its sample by heart: a bound that reads the least from it would promise too much."""
    lacking = []
    for seed in range(8):
        nearest, lists, ranks = sample(200, seed)
        found = tuned_rule(nearest, ranks[:, :, None], lists, PAYLOAD_BYTES // 10, 0.9)
        assert found is not None
        rule, reached, _ = found
        other, _, other_ranks = sample(2000, seed + 100)
        probed = rule.is_probed(other, lists.centroids, lists.counts, PAYLOAD_BYTES // 10)
        lacking.append(reached.found - np.take_along_axis(probed, other_ranks, axis=1).mean())
    assert np.mean(lacking) < 0.003, lacking


def test_rule_reaches_the_target_with_fewer_pages_than_a_number_of_lists() -> None:
    nearest, lists, ranks = sample(4000, 0)
    lists = lists._replace(counts=np.full(50, 30))
    entry_bytes = PAYLOAD_BYTES // 10  # three pages each
    found = tuned_rule(nearest, ranks[:, :, None], lists, entry_bytes, 0.9)
    assert found is not None
    rule, reached, cost = found
    assert reached.at_least >= 0.9
    other, _, other_ranks = sample(4000, 1)
    probed = rule.is_probed(other, lists.centroids, lists.counts, entry_bytes)
    share = np.take_along_axis(probed, other_ranks, axis=1).mean()
    assert share >= 0.89
    effort = int((np.cumsum(first_hits(ranks, 20).mean(axis=0)) < 9).sum()) + 1
    assert cost < 3 * effort and 3 * probed.sum(axis=1).mean() == pytest.approx(cost, rel=0.06)
    assert tuned_rule(nearest, np.full((4000, 10, 1), 20, np.int32), lists, entry_bytes, 0.9) is None


def test_a_file_without_a_rule_and_with_a_hostile_one(index: vector_search.DiskIndex, tmp_path: Path) -> None:
    pages = open_page_file(index.path)

    def rewritten(settings: dict, arrays: dict) -> Path:
        with PageFileWriter(tmp_path / "other") as writer:
            stream = np.frombuffer(index.path.read_bytes(), np.uint8).reshape(-1, 4096)[1 : 1 + pages.num_data_pages]
            writer.append(np.ascontiguousarray(stream[:, :PAYLOAD_BYTES]).reshape(-1))
            writer.finish(pages.kind, {**pages.settings, **settings}, {**pages.arrays, **arrays})
        return tmp_path / "other"

    with vector_search.load(rewritten({"rule": None}, {}), reader="mmap") as plain:  # pyright: ignore[reportGeneralTypeIssues]
        assert recall(plain.search(DATA.queries, 10).ids, exact_nearest(DATA.queries, DATA.corpus, 10)) >= 0.9
    for settings, arrays, text in (
        ({"rule": {"width": 10**6, "least": 0.1}}, {}, "its rule considers"),
        ({"rule": {"width": 8}}, {}, "settings are invalid"),
        ({}, {"radii": pages.arrays["radii"][1:]}, "`radii` is"),
        ({}, {"hit_edges": pages.arrays["hit_edges"][1:]}, "`hit_edges` is"),
        ({}, {"hit_factors": pages.arrays["hit_factors"] * np.float32("nan")}, "are not numbers"),
    ):
        with pytest.raises(IndexFileError, match=text):
            vector_search.load(rewritten(settings, arrays), reader="mmap")


@pytest.mark.slow
def test_long_lists_are_cut(tmp_path: Path) -> None:
    corpus = np.concatenate([np.ones((NUM, DIM), np.float32), DATA.corpus])
    with build_on_disk(corpus, tmp_path / "index", num_lists=60) as made:
        counts = made.lists.counts
        assert counts.max() <= 1.5 * LONGEST * counts.sum() / 60
        assert len(counts) > 60
        assert (np.sort(made.search(DATA.queries[:1], 2 * NUM).ids) == np.arange(2 * NUM)).all()
        assert set(made.search(np.ones(DIM), 20).ids.tolist()) <= set(range(NUM))


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["l2", "cosine", "inner_product"])
def test_many_centroids_have_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str) -> None:
    monkeypatch.setattr(nearest_points, "GRAPH_FROM", 100)
    monkeypatch.setattr(nearest_points, "_LEAST_BEAM", 4)
    monkeypatch.setattr(nearest_points, "_DEGREE", 8)
    with build_on_disk(DATA.corpus, tmp_path / "index", num_lists=200, metric=metric) as made:
        assert made.stats().reached
        truth = exact_nearest(DATA.queries, DATA.corpus, 10, metric)
        assert recall(made.search(DATA.queries, 10).ids, truth) >= 0.92
        assert recall(made.search(DATA.queries, 10, effort=200).ids, truth) == 1
    arrays = dict(open_page_file(tmp_path / "index").arrays)
    assert arrays["centroid_edges"].shape == (200, 8)
    found, _ = nearest_points.NearestPoints(arrays["centroids"], "l2", None).nearest(DATA.queries, 5)
    graph = nearest_points.PointGraph(arrays["centroid_edges"], arrays["centroid_entries"])
    near, _ = nearest_points.NearestPoints(arrays["centroids"], "l2", graph).nearest(DATA.queries, 5)
    assert recall(near, found) >= 0.9


def test_more_results_than_the_considered_lists_hold(index: vector_search.DiskIndex) -> None:
    rule = index.lists.rule
    assert rule is not None and rule.width < NUM_LISTS
    found = index.search(DATA.queries[:3], NUM // 2)
    assert (found.ids != NO_ID).all()
