"""Approximate indexes reach their recall target; filters, index files, devices, invalid arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nearest import exact_nearest, exact_scores, recall

from autopar import vector_search
from autopar.errors import IndexFileError, SearchError, SearchWarning
from autopar.vector_search.build import _place
from autopar.vector_search.choose_index import choose
from autopar.vector_search.data.duplicates import Duplicates, distances_between
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.frame.approximate_index import ApproximateIndex
from autopar.vector_search.frame.recall_tuning import Recall, least_effort, recall_per_query
from autopar.vector_search.graph import beam_search as beam
from autopar.vector_search.graph.index import GRAPH
from autopar.vector_search.graph.neighbor_graph import connect
from autopar.vector_search.ivf.index import IVF, IVF_PQ
from autopar.vector_search.kernels.top_k_merge import LeftOut
from benchmarks.synthetic_vectors import faiss_synthetic

NUM, DIM = 1000, 16
DATA = faiss_synthetic(DIM, 0, NUM, 400)
MESH_OF_ONE = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
SETTINGS: dict[str, dict[str, Any]] = {
    IVF: {"num_lists": 24},
    IVF_PQ: {"num_lists": 24, "code_bytes": 8},
    GRAPH: {"degree": 16},
}
build = partial(vector_search.build, mesh=MESH_OF_ONE, progress=False)

CASES = [
    (IVF, "l2", "float32"),
    (IVF, "cosine", "bfloat16"),
    (IVF_PQ, "l2", "float32"),
    (IVF_PQ, "inner_product", "uint8"),
    (GRAPH, "l2", "float32"),
    (GRAPH, "cosine", "int8"),
]


@cache
def data(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Vectors, and 40 queries that are not among them."""
    scale, offset = (100 if dtype in ("int8", "uint8") else 1), (100 if dtype == "uint8" else 0)
    corpus, queries = ((scale * each + offset).astype(getattr(jnp, dtype)) for each in (DATA.corpus, DATA.queries[:40]))
    return corpus, queries


@cache
def made(kind: str, metric: str = "l2", dtype: str = "float32") -> ApproximateIndex:
    index = build(data(dtype)[0], index=kind, metric=metric, ids=OWN_IDS, **SETTINGS[kind])
    assert isinstance(index, ApproximateIndex)
    return index


#: Beyond 32 bits, and in another order than the vectors.
OWN_IDS = np.arange(NUM)[::-1] * 3 + 2**40


def positions(found: vector_search.Found) -> np.ndarray:
    """Positions of the results, in the order given to `build`."""
    return np.where(found.ids == NO_ID, NO_ID, NUM - 1 - (found.ids - 2**40) // 3)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "metric", "dtype"), CASES)
def test_search_reaches_the_recall_target(kind: str, metric: str, dtype: str) -> None:
    """For queries that are not in the corpus; distances equal those of exact search."""
    corpus, queries = data(dtype)
    index = made(kind, metric, dtype)
    found = index.search(queries, 10)
    which = positions(found)
    # 0.95 within the resolution of 400 neighbours
    assert recall(which, exact_nearest(queries, corpus, 10, metric)) >= 0.92
    truth = exact_scores(queries, corpus, metric)
    if metric == "cosine":
        truth /= np.linalg.norm(queries.astype(np.float64), axis=1)[:, None]
    own = (-1 if metric == "l2" else 1) * np.take_along_axis(truth, which, axis=1)
    np.testing.assert_allclose(found.distances, own, rtol=1e-4, atol=1e-4)
    stats = index.stats()
    assert (stats.kind, stats.metric, stats.dtype, stats.num_vectors, stats.dim) == (kind, metric, dtype, NUM, DIM)
    assert stats.details["recall"] >= 0.95
    assert stats.details["recall_by_effort"][stats.details["effort"]] == stats.details["recall"]
    one = index.search(queries[0], 10)
    np.testing.assert_array_equal(one.ids, found.ids[0])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("share", [0.01, 0.2, 0.6])
def test_filter_returns_the_nearest_allowed_vectors(kind: str, share: float) -> None:
    """V11."""
    corpus, queries = data()
    allowed = np.random.default_rng(0).random(NUM) < share
    found = positions(made(kind).search(queries, 10, filter=allowed))
    which = np.flatnonzero(allowed)
    truth = which[exact_nearest(queries, corpus[allowed], 10)]
    assert (found[:, : truth.shape[1]] >= 0).all()
    assert (found[:, truth.shape[1] :] == NO_ID).all()
    assert allowed[found[found != NO_ID]].all()
    assert recall(found, truth) >= 0.9


@pytest.mark.parametrize("kind", SETTINGS)
def test_filter_of_far_vectors_only(kind: str) -> None:
    corpus, queries = data()
    far = np.argsort(((corpus - queries[0]) ** 2).sum(axis=1))[NUM // 2 :]
    allowed = np.isin(np.arange(NUM), far)
    found = positions(made(kind).search(queries[0], 10, filter=allowed))
    assert recall(found[None], far[None, :10]) >= 0.9
    none = made(kind).search(queries[:3], 4, filter=np.zeros(NUM, bool))
    assert (none.ids == NO_ID).all()
    assert np.isposinf(none.distances).all()


@pytest.mark.sampled(3)
@pytest.mark.contract
@pytest.mark.parametrize("kind", SETTINGS)
def test_k_up_to_the_corpus_size(kind: str) -> None:
    corpus, queries = data()
    found = positions(made(kind).search(queries[:3], 400))
    assert (np.sort(found, axis=1)[:, 1:] != np.sort(found, axis=1)[:, :-1]).all()
    assert (found >= 0).all()
    assert recall(found, exact_nearest(queries[:3], corpus, 400)) >= 0.9
    every = positions(made(kind).search(queries[:3], NUM + 5))
    assert np.sort(every[:, :NUM], axis=1).tolist() == [list(range(NUM))] * 3
    assert (every[:, NUM:] == NO_ID).all()


def test_probing_all_lists_is_exact_and_few_is_not() -> None:
    corpus, queries = data()
    truth = exact_nearest(queries, corpus, 10)
    index = made(IVF)
    np.testing.assert_array_equal(positions(index.search(queries, 10, effort=10**6)), truth)
    assert recall(positions(index.search(queries, 10, effort=1)), truth) < index.stats().details["recall"] - 0.05


@pytest.mark.slow
def test_large_batches_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    index, (_, queries) = made(IVF), data()
    whole = index.search(queries, 10)
    monkeypatch.setattr(index, "_at_once", 20)
    np.testing.assert_array_equal(index.search(queries, 10).ids, whole.ids)
    assert index.search(queries[:0], 3).ids.shape == (0, 3)


@pytest.mark.slow
def test_vector_in_two_lists_is_returned_once() -> None:
    corpus, queries = data()
    found = build(corpus, index=IVF, num_lists=24, copies=3).search(queries, 10).ids
    assert all(len(set(row)) == 10 for row in found.tolist())
    assert recall(found, exact_nearest(queries, corpus, 10)) >= 0.92


@pytest.mark.slow
def test_missed_recall_target_warns() -> None:
    corpus, _ = data()
    with pytest.warns(SearchWarning, match=r"'ivfpq' has a recall of 0\.\d+ .* `recall_target` is 0.99"):
        index = build(corpus, index=IVF_PQ, num_lists=4, code_bytes=1, refined=1, recall_target=0.99)
    assert index.stats().reached is False
    assert made(IVF).stats().reached is True
    stats = index.stats().details
    assert stats["recall"] < 0.9
    assert stats["recall"] == max(stats["recall_by_effort"].values())


# -- files and devices -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.contract
@pytest.mark.parametrize(("kind", "budget"), [(IVF, 2e5), (IVF_PQ, None), (GRAPH, 1e5)])
def test_index_loaded_onto_other_devices_gives_equal_results(tmp_path: Path, kind: str, budget: float | None) -> None:
    """V14; lists and graphs with a memory budget that forces sharding."""
    index, (_, queries) = made(kind), data()
    index.save(tmp_path / "index")
    loaded = vector_search.load(tmp_path / "index", mesh="8", memory_budget_bytes=budget, batch=8)
    before, after = index.search(queries[:8], 10), loaded.search(queries[:8], 10)
    np.testing.assert_array_equal(before.ids, after.ids)
    np.testing.assert_allclose(before.distances, after.distances, rtol=1e-4, atol=1e-4)
    assert loaded.stats().details == index.stats().details
    if budget is not None:
        assert loaded.stats().device_bytes < index.stats().device_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("kind", SETTINGS)
def test_damaged_file_is_rejected(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "index"
    made(kind).save(path)
    whole = path.read_bytes()
    for place in np.linspace(0, len(whole) - 1, 20).astype(int):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        for damaged in (bytes(flipped), whole[:place]):
            path.write_bytes(damaged)
            with pytest.raises(IndexFileError, match=str(path)):
                vector_search.load(path, mesh=MESH_OF_ONE)


def test_interrupted_save_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index"
    path.write_bytes(b"before")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(IVF).save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["index"]
    assert path.read_bytes() == b"before"


@pytest.mark.slow
def test_index_copies_the_users_array() -> None:
    corpus, queries = data()
    mine = corpus.copy()
    index = build(mine, index=IVF, num_lists=24)
    few = np.arange(NUM) < 20  # searches the vectors themselves
    before = index.search(queries, 5, filter=few).ids
    mine[:] = 0
    np.testing.assert_array_equal(index.search(queries, 5, filter=few).ids, before)


def test_build_reports_progress_and_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[str, float]] = []

    @contextmanager
    def bar(show: bool | None) -> Iterator[Any]:
        yield lambda *each: reports.append(each)

    def interrupted(*of: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("autopar.vector_search.build"), "progress_bar", bar)
    monkeypatch.setattr(ApproximateIndex, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(data()[0], index=IVF, **SETTINGS[IVF])
    assert "assign 1,000 vectors to 24 lists" in dict(reports)
    assert [share for _, share in reports] == sorted(share for _, share in reports)


# -- few vectors -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exact", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SETTINGS)])
def test_index_of_zero_one_and_five_vectors(kind: str) -> None:
    none = build(np.zeros((0, 4), np.float32), index=kind, **SETTINGS.get(kind, {}))
    assert (none.search(np.zeros((2, 4)), 3).ids == NO_ID).all()
    if kind != IVF_PQ:  # as of lists
        one = build(np.ones((1, 4)), index=kind, ids=[7])
        assert one.search(np.zeros(4), 2).ids.tolist() == [7, NO_ID]
    five = build(np.eye(5, 4), index=kind).search(np.eye(5, 4), 3)
    assert five.ids[:4, 0].tolist() == [0, 1, 2, 3]
    assert (five.ids >= 0).all()


@pytest.mark.slow
def test_equal_vectors_are_interchangeable() -> None:
    """Any ten equal vectors are the ten nearest."""
    index = build(np.ones((200, 4), np.int8), index=IVF, num_lists=4)
    assert index.stats().details["recall"] == 1
    assert len(set(index.search(np.ones(4, np.int8), 10).ids.tolist()) - {NO_ID}) == 10


# -- efforts ---------------------------------------------------------------------------------


def test_recall_counts_ties_with_the_last_neighbour() -> None:
    truth = (np.array([[1.0, 2.0, 2.0]]), np.array([[4, 5, 6]]))
    assert recall_per_query((np.array([[1.0, 2.0, 2.0]]), np.array([[4, 7, 8]])), truth, "l2").tolist() == [1]
    assert recall_per_query((np.array([[1.0, 2.5, 2.5]]), np.array([[4, 7, 8]])), truth, "l2").tolist() == [1 / 3]
    assert recall_per_query(
        (np.array([[1.0, np.inf, np.inf]]), np.array([[4, NO_ID, NO_ID]])), truth, "l2"
    ).tolist() == [1 / 3]


def test_best_effort_is_kept_if_none_reaches_the_target() -> None:
    measured = least_effort((1, 2, 4), 0.9, lambda effort: Recall(effort / 8, effort / 9))
    assert (measured.effort, measured.recall) == (4, 0.5)


def test_recall_plateau_does_not_end_the_tuning() -> None:
    """A recall plateau, as in lists with many duplicates, does not end the search for an effort."""
    measured = least_effort((1, 2, 4, 8, 16, 32, 64), 0.9, lambda effort: Recall(*[0.5 if effort < 16 else 0.95] * 2))
    assert (measured.effort, measured.reached) == (16, True)
    flat = least_effort((1, 2, 4, 8, 16), 0.9, lambda effort: Recall(0.5, 0.4))
    assert (flat.effort, flat.reached, sorted(flat.tried)) == (1, False, [1, 2, 16])


@pytest.mark.slow
def test_recall_is_measured_with_the_users_queries() -> None:
    """Queries of another distribution need more lists."""
    corpus, _ = data()
    own = 3 * np.random.default_rng(5).normal(size=(600, DIM)).astype(np.float32)
    index = build(corpus, index=IVF, num_lists=24, queries=own[:200])
    assert index.stats().reached is True
    assert index.stats().details["effort"] > made(IVF).measured.effort
    truth = exact_nearest(own[200:], corpus, 10)
    found = recall(index.search(own[200:], 10).ids, truth)
    assert found >= 0.94
    assert recall(positions(made(IVF).search(own[200:], 10)), truth) < found  # tuned with corpus vectors
    with pytest.raises(SearchError, match="`queries` is empty"):
        build(corpus, index=IVF, num_lists=24, queries=own[:0])
    with pytest.raises(SearchError, match="num_queries, 16"):
        build(corpus, index="exact", queries=own[:, :3])


@pytest.mark.slow
def test_auto_builds_another_kind_if_the_target_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("autopar.vector_search.build")
    missed_kinds: list[tuple[str, ...]] = []

    def choose_codes(name: str, request: Any, missed: Any = ()) -> tuple[str, str]:
        missed_kinds.append(tuple(missed))
        return ("exact", "what is left") if missed else (IVF_PQ, "for a test")

    monkeypatch.setattr(module, "choose", choose_codes)
    monkeypatch.setattr(import_module("autopar.vector_search.ivf.index"), "_REFINED", 1)
    hard = np.random.default_rng(0).normal(size=(600, 64)).astype(np.float32)
    index = build(hard, recall_target=0.999)
    assert missed_kinds == [(), (IVF_PQ,)]
    assert (index.stats().kind, index.stats().reached) == ("exact", True)
    assert index.stats().details["why"] == "what is left; ivfpq did not reach a recall of 0.999"


def test_auto_keeps_the_best_if_no_kind_reaches_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(name: str, promised: float) -> vector_search.Kind:
        details = {"recall": 0.93, "recall_at_least": promised}
        made: Any = SimpleNamespace(stats=lambda: SimpleNamespace(kind=name, reached=False, details=details))
        return vector_search.Kind(lambda request: made, lambda saved, place: made)

    def choose_lists_first(name: str, request: Any, missed: Any = ()) -> tuple[str, str]:
        return (IVF_PQ if missed else IVF), ""

    module = import_module("autopar.vector_search.build")
    monkeypatch.setattr(module, "choose", choose_lists_first)
    monkeypatch.setattr(module, "KINDS", {IVF: kind(IVF, 0.9), IVF_PQ: kind(IVF_PQ, 0.7)})
    with pytest.warns(SearchWarning, match="'ivf' has a recall of 0.930 .* lower bound of 0.900"):
        assert build(data()[0]).stats().kind == IVF


@pytest.mark.slow
def test_beam_search_excludes_nodes() -> None:
    """Excluded nodes are missing from the result, and every other node is found."""
    corpus, _ = data()
    near = exact_nearest(corpus[:200], corpus[:200], 20).astype(np.int32)
    graph = connect(jnp.asarray(corpus[:200]), near, np.arange(3), "l2", degree=16)
    itself = np.arange(0, 200, 10)
    found = np.asarray(
        beam.search(
            graph, jnp.asarray(corpus[itself]), 5, beam=200, left_out=LeftOut(jnp.arange(200), jnp.asarray(itself))
        ).positions
    )
    nearest = exact_nearest(corpus[itself], corpus[:200], 6)
    assert (nearest[:, 0] == itself).all()
    np.testing.assert_array_equal(found, nearest[:, 1:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_recall_does_not_depend_on_the_offset(kind: str, tmp_path: Path) -> None:
    """Recall does not depend on the offset of the corpus; a loaded index has the same centre."""
    corpus, queries = (np.round(each * 64) / 64 + np.float32(1000) for each in data())
    index = build(corpus, index=kind, **SETTINGS[kind])
    assert index.stats().reached is True
    found = index.search(queries, 10)
    assert recall(found.ids, exact_nearest(queries, corpus, 10)) >= 0.92
    own = -np.take_along_axis(exact_scores(queries, corpus, "l2"), found.ids, axis=1)
    np.testing.assert_allclose(found.distances, own, rtol=1e-4)
    index.save(tmp_path / "index")
    loaded = vector_search.load(tmp_path / "index", mesh=MESH_OF_ONE)
    np.testing.assert_array_equal(loaded.search(queries, 10).ids, found.ids)


@pytest.mark.slow
def test_duplicates_of_a_query_do_not_count() -> None:
    """Each vector 10 times: a query's duplicates are in its own list and would inflate the recall."""
    corpus, unseen = np.tile(DATA.corpus[:400], (10, 1)), DATA.queries
    index = build(corpus, index=IVF, num_lists=60)
    assert index.stats().reached is True
    truth = exact_nearest(unseen, corpus, 10)
    far, found = (distances_between(unseen, corpus, which, "l2") for which in (truth, index.search(unseen, 10).ids))
    assert (found <= far[:, -1:]).mean() >= 0.88  # one distinct neighbour each: 400 resolve 0.95 less well than 4,000


def test_duplicates_are_grouped_and_excluded() -> None:
    vectors = np.array([[1, 2], [0.0, 1], [1, 2], [-0.0, 1], [2, 4], [5, 5]], np.float32)
    same = Duplicates.of(vectors, "l2")
    assert same.num_groups == 4
    assert same.groups[0] == same.groups[2] != same.groups[4]
    assert same.groups[1] == same.groups[3]
    assert Duplicates.of(vectors, "cosine").num_groups == 3  # 4 is twice 0
    nearest = same.firsts[exact_nearest(vectors[:2], vectors[same.firsts], 3)]
    found = same.others(nearest, same.groups[:2], 3)
    assert [sorted(row) for row in found.tolist()] == [[1, 3, 4], [0, 2, 4]]
    assert same.others(nearest[:, :1], same.groups[:2], 2).tolist() == [[NO_ID, NO_ID]] * 2
    none = (np.zeros((1, 2)), np.array([[NO_ID] * 2]))
    assert Recall.of(recall_per_query((np.zeros((1, 2)), np.array([[3, 4]])), none, "l2")) == (1, 1)


def test_sample_recall_equals_recall_of_unseen_queries() -> None:
    """Sample vectors that exclude themselves have the recall of queries outside the corpus."""
    corpus, _ = data()
    unseen = DATA.queries
    for kind in (IVF, GRAPH):
        found = positions(made(kind).search(unseen, 10))
        assert abs(recall(found, exact_nearest(unseen, corpus, 10)) - made(kind).stats().details["recall"]) < 0.03


# -- auto ------------------------------------------------------------------------------------


def chosen(num: int, dim: int = 128, hardware: str = "h100-sxm", **options: Any) -> tuple[str, str]:
    """The chosen kind for many vectors, without allocating them."""
    request = SimpleNamespace(
        vectors=np.broadcast_to(np.zeros((), np.float32), (num, dim)),
        metric="l2",
        recall_target=options.get("recall_target", 0.95),
        place=_place("8", hardware, options.get("budget"), options.get("batch", 256)),
        settings=options.get("settings", {}),
    )
    return choose("auto", request)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_auto_chooses_by_predicted_time() -> None:
    kind, why = chosen(100_000)
    assert kind == "exact"
    assert "256 queries" in why
    assert "below 50 ms" in why
    kind, why = chosen(400_000_000, batch=16)
    assert kind == IVF
    assert why.startswith("predicted times of 16 queries: exact ")
    kind, why = chosen(400_000_000)
    assert kind == "exact" and "no other kind is 1.5 times as fast" in why, "it reads all vectors once for all queries"
    assert chosen(400_000_000, recall_target=1.0, batch=16)[0] == "exact"
    assert chosen(6_000_000, hardware="cpu-host", batch=1)[0] == GRAPH
    assert chosen(20_000_000, budget=2e9)[0] == "exact"
    kind, why = chosen(20_000_000, budget=1e9)
    assert kind == IVF_PQ
    assert "1 GB per device" in why


def test_auto_considers_drives_prices_and_updates() -> None:
    """Nothing is built: a million float32 vectors of 128 elements are 0.5 GB."""
    disk, prices = {"path": "index"}, {"memory_usd": 3, "disk_usd": 0.1}
    assert chosen(1_000, settings={**disk, "updates_per_s": 0.5})[0] == "updatable"
    kind, why = chosen(1_000_000, hardware="cpu-host", settings={**disk, **prices})
    assert kind == "graphdisk" and "USD per month: exact 1.5" in why and "(no: batch)" in why
    kind, why = chosen(1_000_000, hardware="cpu-host", settings=prices)
    assert kind not in ("ivfdisk", "graphdisk") and "ivfdisk 0.2" in why and "(no: path)" in why
    rate = {"queries_per_s": 1e7, "disk_bytes_per_s": 1e6}
    assert "ivfdisk" in (why := chosen(1_000_000, hardware="cpu-host", settings={**disk, **prices, **rate})[1])
    assert "(no: rate)" in why
    refused = {
        "has no setting 'num_lists'": {"num_lists": 3},
        "`updates_per_s` is -1": {"updates_per_s": -1, **disk},
        "`disk_bytes_per_s` is 0": {"disk_bytes_per_s": 0},
        "give the `path` of a folder": {"updates_per_s": 5},
        "only one of `memory_usd` and `disk_usd`": {"disk_usd": 5},
    }
    for message, settings in refused.items():
        with pytest.raises(SearchError, match=message):
            chosen(1_000, settings=settings)


def test_auto_reports_its_reason() -> None:
    index = vector_search.build(data()[0], mesh=MESH_OF_ONE)
    assert index.stats().kind == "exact"
    assert "below 50 ms" in index.stats().details["why"]


# -- invalid arguments ------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown setting": (
        {"index": IVF, "degree": 3},
        "'ivf' has no setting 'degree': its settings are num_lists, copies",
    ),
    "a setting of another kind": ({"index": GRAPH, "num_lists": 3}, "'num_lists': its settings are degree, width"),
    "zero": ({"index": IVF, "num_lists": 0}, "`num_lists` is 0"),
    "a fraction": ({"index": GRAPH, "degree": 1.5}, "`degree` is 1.5"),
    "more lists than vectors": ({"index": IVF, "num_lists": 7}, "at most the number of vectors, 6"),
    "codes that do not divide": ({"index": IVF_PQ, "code_bytes": 3}, "4 elements"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_setting_is_rejected(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(SearchError, match=message):
        build(np.ones((6, 4)), **options)


@pytest.mark.parametrize("kind", SETTINGS)
def test_invalid_corpus_and_search_are_rejected(kind: str) -> None:
    corpus, queries = data()
    nan = corpus.copy()
    nan[3, 4] = np.nan
    built: list[tuple[Any, dict[str, Any], str]] = [
        (nan, {}, r"nan at \[3, 4\]"),
        (corpus[0], {}, "two|n, d"),
        (corpus, {"ids": np.zeros(NUM, int)}, "repeats 0"),
        (corpus, {"metric": "hamming"}, "hamming"),
    ]
    for wrong, options, message in built:
        with pytest.raises(SearchError, match=message):
            build(wrong, index=kind, **options)
    index = made(kind)
    searched: list[tuple[Any, int, dict[str, Any], str]] = [
        (queries[:, :3], 1, {}, "num_queries, 16"),
        (queries, 0, {}, "`k` is 0"),
        (queries, 1, {"filter": [True]}, "each of the 1,000 vectors"),
        (queries, 1, {"effort": 0}, "`effort` is 0"),
    ]
    for wrong, k, options, message in searched:
        with pytest.raises(SearchError, match=message):
            index.search(wrong, k, **options)
    with pytest.raises(SearchError, match="an exact index has no `effort` option"):
        build(corpus, index="exact").search(queries, 1, effort=3)


@pytest.mark.slow
def test_digits_have_the_neighbours_of_scikit_learn() -> None:
    """V13: requires scikit-learn."""
    datasets = pytest.importorskip("sklearn.datasets")
    neighbors = pytest.importorskip("sklearn.neighbors")
    digits = datasets.load_digits().data.astype(np.int8)
    queries = digits[::9]
    distances, ids = neighbors.NearestNeighbors(n_neighbors=10, algorithm="brute").fit(digits).kneighbors(queries)
    index = build(digits, index=IVF, num_lists=8)
    found, truth = index.search(queries, 10), (np.rint(distances**2), ids)
    assert recall_per_query((found.distances, found.ids), truth, "l2").mean() >= 0.93
    np.testing.assert_array_equal(index.search(queries, 10, effort=8).distances, np.rint(distances**2))
