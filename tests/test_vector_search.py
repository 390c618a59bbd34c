"""Exact search agrees with NumPy on one and on eight devices; layouts, index files, invalid arguments."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autopar
from autopar import vector_search
from autopar.errors import BudgetError, IndexFileError, SearchError
from autopar.vector_search.build import _place
from autopar.vector_search.data import metrics
from autopar.vector_search.data.centering import centre_corpus, restore_vectors
from autopar.vector_search.exact.index import ExactIndex
from autopar.vector_search.frame.subset_search import SubsetSearch
from autopar.vector_search.kernels.exact_top_k import Corpus, exact_arguments, exact_search, search_terms
from autopar.vector_search.kernels.tiling import Blocks, Tiling
from autopar.xla_compiler import hlo_collectives as hlo

MESH_OF_ONE = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
RNG = np.random.default_rng(0)
build = partial(vector_search.build, index="exact")


def vectors(n: int, dim: int = 16, dtype: str = "float32") -> np.ndarray[Any, Any]:
    if dtype in ("int8", "uint8"):
        return RNG.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, (n, dim)).astype(dtype)
    return np.asarray(RNG.standard_normal((n, dim)), np.float32).astype(getattr(jnp, dtype))


def expected(queries: Any, corpus: Any, metric: str) -> np.ndarray[Any, Any]:
    """Distances of all vectors, in float64."""
    q, x = (np.asarray(a, np.float64) for a in (queries, corpus))
    if metric == "l2":
        return ((q[:, None] - x) ** 2).sum(-1)
    found = q @ x.T
    if metric == "inner_product":
        return found
    lengths = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(x, axis=1)
    return np.divide(found, lengths, out=np.zeros_like(found), where=lengths > 0)


def check(found: vector_search.Found, queries: Any, corpus: Any, metric: str, k: int, allowed: Any = None) -> None:
    """Check the k best distances, and that each belongs to its id."""
    truth = expected(queries, corpus, metric)
    sign = 1 if metric == "l2" else -1
    live = np.arange(len(corpus)) if allowed is None else np.flatnonzero(allowed)
    best = sign * np.sort(sign * truth[:, live], axis=1)[:, :k]
    there = best.shape[1]
    scale = max(1.0, float(np.abs(truth).max()))
    assert found.ids.dtype == np.int64
    assert found.ids.shape == found.distances.shape == (len(queries), k)
    np.testing.assert_allclose(found.distances[:, :there], best, rtol=1e-5, atol=1e-5 * scale)
    own = np.take_along_axis(truth, found.ids[:, :there], axis=1)
    np.testing.assert_allclose(own, best, rtol=1e-5, atol=1e-5 * scale)
    assert all(len(set(row)) == there for row in found.ids[:, :there])
    assert np.isin(found.ids[:, :there], live).all()
    assert (found.ids[:, there:] == -1).all()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    blocks=st.sampled_from([1, 2]),
    block=st.sampled_from([1, 3]),
    tiling=st.sampled_from([(1, 1, 1, 8), (2, 1, 2, 16), (2, 2, 3, 16), (1, 3, 5, 8), (3, 1, 32, 8)]),
    at_once=st.booleans(),
    k=st.sampled_from([1, 2, 7, 40]),
    metric=st.sampled_from(metrics.METRICS),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int8", "uint8"]),
    share=st.sampled_from([0.0, 0.1, 1.0]),
    dim=st.sampled_from([5, 400]),  # int8 scores below and above the exact range of float32
)
def test_program_is_exact(
    blocks: int,
    block: int,
    tiling: tuple[int, int, int, int],
    at_once: bool,
    k: int,
    metric: Any,
    dtype: str,
    share: float,
    dim: int,
) -> None:
    corpus = vectors(int(np.prod(tiling)), dim, dtype)
    queries = vectors(blocks * block, dim, dtype)
    allowed = RNG.random(len(corpus)) < share
    centred, centre = centre_corpus(corpus, metric)
    tiled = jnp.asarray(centred.reshape(*tiling, dim))
    placed = Corpus(tiled, centre, search_terms(tiled, metric), allowed.reshape(tiling))
    k = min(k, len(corpus))
    distances, positions, _ = jax.jit(exact_search(metric, k, at_once=at_once))(
        queries.reshape(blocks, block, dim), placed
    )
    assert distances.dtype == metrics.score_dtype(jnp.dtype(corpus.dtype), metric)
    ids = np.asarray(positions, np.int64).reshape(-1, k)
    check(vector_search.Found(ids, np.asarray(distances).reshape(-1, k)), queries, corpus, metric, k, allowed)


@pytest.mark.sampled(3)
@pytest.mark.contract
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8"])
@pytest.mark.parametrize("metric", metrics.METRICS)
def test_index_agrees_with_numpy(metric: str, dtype: str) -> None:
    corpus, queries = vectors(700, dtype=dtype), vectors(9, dtype=dtype)
    index = build(corpus, metric=metric)
    check(index.search(queries, 5), queries, corpus, metric, 5)
    one = index.search(queries[0], 3)
    assert one.ids.shape == (3,)
    check(vector_search.Found(one.ids[None], one.distances[None]), queries[:1], corpus, metric, 3)


@pytest.mark.parametrize("num_queries", [1, 2, 300])
def test_integers_are_exact(num_queries: int) -> None:
    """V1, compared with NumPy integers."""
    corpus, queries = vectors(4000, 100, "int8"), vectors(num_queries, 100, "int8")
    found = build(corpus, mesh=MESH_OF_ONE).search(queries, 10)
    wide = ((queries[:, None].astype(np.int64) - corpus.astype(np.int64)) ** 2).sum(-1)
    assert found.distances.dtype == np.int32
    np.testing.assert_array_equal(found.distances, np.sort(wide, axis=1)[:, :10])
    np.testing.assert_array_equal(np.take_along_axis(wide, found.ids, 1), found.distances)


# -- distances that are small relative to the vectors -----------------------------------------------

NUM_HARD, NUM_NEAR = 1500, 20


def _normal(n: int, dim: int = 24) -> np.ndarray[Any, Any]:
    return np.random.default_rng(n + dim).standard_normal((n, dim))


def _with_years(n: int) -> np.ndarray[Any, Any]:
    found = _normal(n)
    found[:, 0] = np.random.default_rng(n).uniform(1900, 2024, n)
    return found


def _in_two_clusters(n: int) -> np.ndarray[Any, Any]:
    return _normal(n) + np.where(np.arange(n) % 2, 3e4, -3e4)[:, None]


def _with_one_near_zero(n: int) -> np.ndarray[Any, Any]:
    found = _normal(n) + 3000
    found[n // 2] *= 1e-6
    return found


def _with_one_giant(n: int) -> np.ndarray[Any, Any]:
    found = _normal(n) + 100
    found[n // 2] *= 1e8
    return found


def _each_thirty_times(n: int) -> np.ndarray[Any, Any]:
    return (_normal(n // 30 + 1) + 300)[np.arange(n) % (n // 30 + 1)]


#: Corpora and queries by their number: vectors are long relative to the distances of neighbours.
HARD: dict[str, tuple[Any, Any]] = {
    "offset of 100": (lambda n: _normal(n) + 100, lambda n: _normal(n) + 100),
    "offset of 1000": (lambda n: _normal(n) + 1000, lambda n: _normal(n) + 1000),
    "a column of years": (_with_years, _with_years),
    "two clusters far apart": (_in_two_clusters, _in_two_clusters),
    "one near zero, which is why nothing is centred": (_with_one_near_zero, lambda n: _normal(n) + 3000),
    "one giant": (_with_one_giant, lambda n: _normal(n) + 100),
    "each thirty times": (_each_thirty_times, lambda n: _normal(n) + 300),
    "each thirty times, and queries among them": (_each_thirty_times, _each_thirty_times),
    "all equal": (lambda n: np.full((n, 24), 7.0), lambda n: _normal(n)),
    "queries far from all": (_normal, lambda n: _normal(n) + 1e4),
    "fewer than neighbours": (lambda n: _normal(5) + 1000, lambda n: _normal(n) + 1000),
}


def check_nearest(found: vector_search.Found, queries: Any, corpus: Any) -> None:
    """Check the k nearest in float64, up to the resolution of float32, each once."""
    truth = expected(queries, corpus, "l2")
    there = min(found.ids.shape[1], len(corpus))
    best = np.sort(truth, axis=1)[:, :there]
    own = np.take_along_axis(truth, found.ids[:, :there], axis=1)
    np.testing.assert_allclose(own, best, rtol=2e-6)
    np.testing.assert_allclose(found.distances[:, :there], own, rtol=2e-6)
    assert all(len(set(row)) == there for row in found.ids[:, :there])
    assert (found.ids[:, there:] == -1).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", HARD)
def test_distances_small_relative_to_norms_are_exact(case: str) -> None:
    """Rounding loses no neighbour, and a saved index restores the vectors to the last bit."""
    corpus, queries = (make(n).astype(np.float32) for make, n in zip(HARD[case], (NUM_HARD, NUM_NEAR), strict=True))
    index = build(corpus, mesh=MESH_OF_ONE, batch=NUM_NEAR)
    check_nearest(index.search(queries, 10), queries, corpus)
    check_nearest(index.search(queries, 10), queries, corpus)  # starts with the candidates that the first search needed
    assert isinstance(index, ExactIndex)
    corpus_placed = index._corpus(index._programs.corpus.layouts[0])
    centred = np.asarray(corpus_placed.vectors).reshape(-1, 24)[: len(corpus)]
    np.testing.assert_array_equal(restore_vectors(centred, np.asarray(corpus_placed.centre)), corpus)
    # the reference for the recall of other kinds
    subset_search = SubsetSearch(corpus, "l2", _place(MESH_OF_ONE, None, None, NUM_NEAR))
    distances, positions = subset_search.search(queries, 10, np.arange(len(corpus)))
    check_nearest(vector_search.Found(positions, distances), queries, corpus)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["offset of 1000", "two clusters far apart", "each thirty times"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_distances_are_exact_on_eight_devices(case: str, dtype: str) -> None:
    corpus, queries = (
        make(n).astype(getattr(jnp, dtype)) for make, n in zip(HARD[case], (NUM_HARD, NUM_NEAR), strict=True)
    )
    index = build(corpus, mesh="8", batch=NUM_NEAR, memory_budget_bytes=3e5)
    found = index.search(queries, 10)
    truth = expected(queries, corpus, "l2")
    best = np.sort(truth, axis=1)[:, :10]
    np.testing.assert_allclose(np.take_along_axis(truth, found.ids, axis=1), best, rtol=2e-6)
    np.testing.assert_allclose(found.distances, best, rtol=2e-6)
    few = np.arange(NUM_HARD) % 7 == 0
    found = index.search(queries[0], 10, filter=few)
    own = expected(queries[:1], corpus, "l2")[0]
    np.testing.assert_allclose(own[found.ids], np.sort(own[few])[:10], rtol=2e-6)


@settings(max_examples=30, deadline=None)
@given(
    offset=st.sampled_from([0.0, 0.3, 10.0, 1e3, 1e6]),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    whole_numbers=st.booleans(),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_centering_is_lossless(dtype: str, offset: float, scale: float, whole_numbers: bool) -> None:
    assume(dtype != "float16" or offset < 1e4)  # which it cannot hold
    given = _normal(50, 3) * scale + offset
    given = (np.round(given) if whole_numbers else given).astype(getattr(jnp, dtype))
    centred, centre = centre_corpus(given, "l2")
    assert centred.dtype == given.dtype
    assert centre is not None
    np.testing.assert_array_equal(restore_vectors(centred, centre), given)
    if offset > 100 * scale:
        assert np.abs(centred.astype(np.float64)).max() < offset / 10


@pytest.mark.parametrize("offset", [0, 300])
def test_inner_products_are_of_uncentred_vectors(offset: float) -> None:
    corpus, queries = ((_normal(n) + offset).astype(np.float32) for n in (NUM_HARD, NUM_NEAR))
    found = build(corpus, mesh=MESH_OF_ONE, metric="inner_product").search(queries, 10)
    truth = expected(queries, corpus, "inner_product")
    best = -np.sort(-truth, axis=1)[:, :10]
    np.testing.assert_allclose(found.distances, best, rtol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(truth, found.ids, axis=1), best, rtol=3e-8)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 1.0])
def test_a_filter_is_exact(share: float) -> None:
    corpus, queries = vectors(1000), vectors(4)
    allowed = RNG.random(1000) < share
    found = build(corpus, mesh=MESH_OF_ONE).search(queries, 20, filter=allowed)
    check(found, queries, corpus, "l2", 20, allowed)
    assert share > 0 or np.isinf(found.distances).all()


@pytest.mark.slow
def test_results_have_the_users_ids() -> None:
    corpus, queries = vectors(50), vectors(3)
    own = np.arange(50)[::-1] + 2**40
    index = build(corpus, mesh=MESH_OF_ONE, ids=own)
    plain = build(corpus, mesh=MESH_OF_ONE)
    np.testing.assert_array_equal(index.search(queries, 4).ids, own[plain.search(queries, 4).ids])


def test_k_beyond_the_corpus_is_padded() -> None:
    corpus, queries = vectors(5), vectors(2)
    found = build(corpus, metric="cosine").search(queries, 600)
    check(found, queries, corpus, "cosine", 600)
    assert np.isneginf(found.distances[:, 5:]).all()


def test_an_empty_index_finds_nothing() -> None:
    found = build(np.zeros((0, 8), np.int8)).search(np.zeros((3, 8), np.int8), 2)
    assert (found.ids == -1).all()
    assert (found.distances == np.iinfo(np.int32).max).all()


def test_no_queries_find_nothing() -> None:
    found = build(vectors(10)).search(np.zeros((0, 16)), 4)
    assert found.ids.shape == found.distances.shape == (0, 4)


def test_zero_vector_has_cosine_zero() -> None:
    corpus = np.array([[0, 0], [1, 1], [-1, 0]])
    found = build(corpus, metric="cosine", mesh=MESH_OF_ONE).search([[1.0, 0.0], [0.0, 0.0]], 3)
    np.testing.assert_allclose(found.distances, [[0.5**0.5, 0, -1], [0, 0, 0]], atol=1e-6)
    assert found.ids[0].tolist() == [1, 0, 2]


# -- layouts ---------------------------------------------------------------------------------


def split(num_vectors: int, num_queries: int, hardware: str, k: int = 10) -> dict[str, Any]:
    """The shards over 8 devices of the queries, the vectors and the result."""
    tiling, blocks = Tiling.of(num_vectors, 8), Blocks.of(num_queries, 8)
    arguments = exact_arguments(tiling, blocks, 64, np.dtype(np.float32), "l2")
    plan = autopar.plan(exact_search("l2", k, at_once=blocks.at_once), *arguments, mesh="8", hardware=hardware)
    split_dims = [[d for d, axes in enumerate(t.sharding.dims) if axes] for t in plan.inputs]
    return {"queries": split_dims[0], "vectors": split_dims[1]}


def test_corpus_batch_and_hardware_determine_the_layout() -> None:
    """A large corpus is sharded by parts, a large batch within its blocks. Where messages are cheap relative to memory
    and arithmetic, a smaller corpus is sharded too.
    """
    large_and_one = split(4_000_000, 1, "h100-sxm")
    assert (large_and_one["queries"], large_and_one["vectors"]) == ([], [1])
    large_and_some = split(4_000_000, 1_000, "h100-sxm")
    assert (large_and_some["queries"], large_and_some["vectors"]) == ([], [1])
    small_and_many = split(1_000, 100_000, "h100-sxm")
    assert (small_and_many["queries"], small_and_many["vectors"]) == ([1], [])
    middle = {hardware: split(50_000, 1_000, hardware) for hardware in ("h100-sxm", "cpu-host")}
    assert (middle["h100-sxm"]["queries"], middle["h100-sxm"]["vectors"]) == ([1], [])
    assert (middle["cpu-host"]["queries"], middle["cpu-host"]["vectors"]) == ([], [1])


@pytest.mark.slow
def test_index_has_as_many_layouts_as_the_budget_allows() -> None:
    """One query prefers a sharded corpus, three thousand a replicated one."""
    corpus, one, many = vectors(4_000, 64), vectors(1, 64), vectors(3_000, 64)
    roomy, full = (build(corpus, mesh="8", batch=1, hardware="cpu-host") for _ in range(2))
    assert isinstance(full, ExactIndex)
    full._programs.corpus._budget = 0.0  # simulate full devices
    for index in (roomy, full):
        check(index.search(one, 10), one, corpus, "l2", 10)
        assert len(index.stats().layouts) == 1
    np.testing.assert_array_equal(full.search(many, 3).ids, roomy.search(many, 3).ids)
    assert [len(index.stats().layouts) for index in (roomy, full)] == [2, 1]
    assert roomy.stats().device_bytes > full.stats().device_bytes


@pytest.mark.sampled(3)
@pytest.mark.contract
@pytest.mark.parametrize(("num_queries", "k"), [(1, 10), (64, 10), (64, 100)])
def test_sharded_corpus_sends_only_candidates(num_queries: int, k: int) -> None:
    """V2: the compiled program sends at most queries x devices x k values and as many positions, once."""
    corpus = vectors(50_000, 64)
    index = build(corpus, mesh="8", batch=num_queries, hardware="cpu-host")
    assert isinstance(index, ExactIndex)
    program = index.planned(num_queries, k)
    assert ("data",) in program.plan.inputs[1].sharding.dims
    lowered = program.run.lower(*program.arguments)
    found = hlo.collectives(lowered.compile().as_text(), ignore_up_to=0)
    places = Blocks.of(num_queries, 8).capacity
    assert found
    assert all(one.num_times == 1 for one in found)
    candidates = places * 8 * k
    gathered = [one.num_bytes for one in found if one.kind == "all-gather"]
    assert max(gathered, default=0) <= candidates * (4 + 4)  # value and position
    # and the chosen positions, and the distance bound of each query
    assert sum(one.num_bytes for one in found) <= candidates * (4 + 4) + places * k * 4 + places * 4
    queries = vectors(num_queries, 64)
    alone = build(corpus, mesh=MESH_OF_ONE).search(queries, k)
    np.testing.assert_array_equal(index.search(queries, k).ids, alone.ids)


def test_corpus_over_the_memory_budget_is_rejected() -> None:
    with pytest.raises(BudgetError):
        build(vectors(50_000, 64), mesh="8", memory_budget_bytes=1e6)


@given(st.integers(0, 10**7), st.sampled_from([1, 3, 8]), st.integers(1, 10**5))
def test_tilings_have_capacity(num_vectors: int, num_devices: int, num_queries: int) -> None:
    tiling, blocks = Tiling.of(num_vectors, num_devices), Blocks.of(num_queries, num_devices)
    assert tiling.capacity >= num_vectors
    assert tiling.parts == num_devices
    assert tiling.capacity - num_vectors <= num_vectors // 8 + 1024 * num_devices
    assert num_queries <= blocks.capacity <= num_queries + max(num_queries // 3, 256 * num_devices)


# -- files -----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8"])
def test_an_index_is_loaded_onto_other_devices(tmp_path: Path, dtype: str) -> None:
    """V14: an index file is independent of the number of devices."""
    corpus, queries = vectors(3_000, dtype=dtype), vectors(20, dtype=dtype)
    index = build(corpus, mesh="8", metric="inner_product", ids=np.arange(3_000) * 7)
    index.save(tmp_path / "index")
    loaded = vector_search.load(tmp_path / "index", mesh=MESH_OF_ONE)
    before, after = index.search(queries, 10), loaded.search(queries, 10)
    np.testing.assert_allclose(before.distances, after.distances, rtol=1e-6)
    assert dtype != "float32" or (before.ids == after.ids).all()  # equal scores may be in another order
    assert loaded.stats().dtype == dtype
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "index"
    build(vectors(40, 4), mesh=MESH_OF_ONE).save(path)
    return path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_file_is_rejected(saved: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(saved) - 1))
    flipped = bytearray(saved)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.getbasetemp() / "damaged"
    for damaged in (bytes(flipped), saved[:place]):
        path.write_bytes(damaged)
        with pytest.raises(IndexFileError, match=str(path)):
            vector_search.load(path, mesh=MESH_OF_ONE)


def test_failed_write_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = build(vectors(40, 4), mesh=MESH_OF_ONE)
    path = tmp_path / "index"
    index.save(path)
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(IndexFileError, match="No space left"):
        index.save(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["index"]
    with pytest.raises(IndexFileError, match="cannot be written"):
        index.save(tmp_path / "no" / "folder")


# -- invalid arguments ------------------------------------------------------------------------

NAN = np.full((3, 4), 1.0)
NAN[1, 2] = np.nan
REFUSED_CORPORA: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one dim": (np.zeros(4), {}, r"shape \(4,\).*\[n, d\]"),
    "no elements": (np.zeros((4, 0)), {}, "at least 1"),
    "ragged": ([[1.0], [1.0, 2.0]], {}, "different lengths"),
    "text": (np.array([["a"]]), {}, "float32, bfloat16, float16, int8, uint8"),
    "NaN": (NAN, {}, r"nan at \[1, 2\]"),
    "infinity": (np.full((2, 2), -np.inf), {}, r"-inf at \[0, 0\]"),
    "too long": (np.full((2, 2), 1e30, np.float32), {}, "overflows float32"),
    "metric": (np.zeros((2, 2)), {"metric": "hamming"}, "'hamming'.*l2, inner_product, cosine"),
    "kind": (np.zeros((2, 2)), {"index": "magic"}, "'magic'.*auto, exact"),
    "setting": (np.zeros((2, 2)), {"index": "exact", "num_lists": 3}, "'num_lists'"),
    "recall": (np.zeros((2, 2)), {"recall_target": 1.5}, "1.5"),
    "batch": (np.zeros((2, 2)), {"batch": 0}, "`batch` is 0"),
    "equal ids": (np.zeros((3, 2)), {"ids": [5, 7, 5]}, "repeats 5, at positions 0 and 2"),
    "too few ids": (np.zeros((3, 2)), {"ids": [5, 7]}, "there are 3 vectors"),
    "ids of a mark": (np.zeros((3, 2)), {"ids": [5, -1, 7]}, "-1, at position 1"),
    "ids of floats": (np.zeros((3, 2)), {"ids": [5.0, 1.0, 7.0]}, "64-bit integers"),
    "ids too large": (np.zeros((2, 2)), {"ids": np.array([1, 2**63], np.uint64)}, "9223372036854775808"),
    "int8 too long": (np.zeros((1, metrics.max_dim("int8") + 1), np.int8), {}, "int32 scores are exact up to 43,690"),
    "uint8 too long": (
        np.zeros((1, metrics.max_dim("uint8") + 1), np.uint8),
        {},
        "int32 scores are exact up to 16,512",
    ),
    "float16 too large": (np.full((2, 2), 40_000, np.float16), {}, r"40000 at \[0, 0\].*at most 32,752"),
}


@pytest.mark.parametrize("case", REFUSED_CORPORA)
def test_invalid_corpus_is_rejected(case: str) -> None:
    corpus, options, message = REFUSED_CORPORA[case]
    with pytest.raises(SearchError, match=message):
        build(corpus, **options)


REFUSED_SEARCHES: dict[str, tuple[Any, Any, Any, str]] = {
    "dim": (np.zeros((2, 5)), 1, None, r"shape \(2, 5\).*\[num_queries, 4\]"),
    "NaN": (NAN, 1, None, r"`queries` has nan at \[1, 2\]"),
    "no k": (np.zeros((2, 4)), 0, None, "`k` is 0"),
    "k of a float": (np.zeros((2, 4)), 1.5, None, "`k` is 1.5"),
    "short filter": (np.zeros((2, 4)), 1, [True], "each of the 6 vectors"),
    "filter of ids": (np.zeros((2, 4)), 1, np.arange(6), "one bool for each"),
}


@pytest.mark.parametrize("case", REFUSED_SEARCHES)
def test_invalid_search_is_rejected(case: str) -> None:
    queries, k, allowed, message = REFUSED_SEARCHES[case]
    index = build(vectors(6, 4), mesh=MESH_OF_ONE)
    with pytest.raises(SearchError, match=message):
        index.search(queries, k, filter=allowed)


def test_int8_index_takes_integer_queries() -> None:
    index = build(vectors(6, 4, "int8"), mesh=MESH_OF_ONE)
    assert (index.search([[1, 2, 3, -128]], 2).ids >= 0).all()
    with pytest.raises(SearchError, match="-128 to 127"):
        index.search([[1, 2, 3, 128]], 2)


@pytest.mark.parametrize("wrong", [-1, 256, 0.5, np.nan])
def test_uint8_index_takes_integer_queries(wrong: float) -> None:
    """Vectors stay as they are, and scores of the largest values are exact."""
    dim = 400
    corpus = np.concatenate([vectors(6, dim, "uint8"), np.full((2, dim), 255, np.uint8)])
    index = build(corpus, mesh=MESH_OF_ONE)
    assert index.stats().dtype == "uint8"
    found = index.search(np.zeros(dim), 8)
    assert found.distances.max() == dim * 255**2 and set(found.ids[-2:]) == {6, 7}
    assert build(corpus, mesh=MESH_OF_ONE, metric="inner_product").search(corpus[6], 1).distances == [dim * 255**2]
    with pytest.raises(SearchError, match="integers from 0 to 255"):
        index.search(np.full(dim, wrong), 2)


def test_float16_index_refuses_what_overflows() -> None:
    index = build(vectors(6, 4, "float16"), mesh=MESH_OF_ONE)
    assert index.stats().dtype == "float16"
    assert index.search(np.full(4, 32_752), 1).ids.shape == (1,)
    with pytest.raises(SearchError, match=r"`queries` has -1e\+06 at \[0, 0\].*at most 32,752"):
        index.search(np.full(4, -1e6), 1)


# -- others ----------------------------------------------------------------------------------


def test_scores_are_those_of_faiss() -> None:
    """V1: requires FAISS."""
    faiss = pytest.importorskip("faiss")
    corpus, queries = vectors(64_000, 100, "int8"), vectors(50, 100, "int8")
    flat = faiss.IndexFlatL2(100)
    flat.add(corpus.astype(np.float32))
    distances, ids = flat.search(queries.astype(np.float32), 10)
    found = build(corpus, mesh=MESH_OF_ONE).search(queries, 10)
    np.testing.assert_array_equal(found.distances, distances.astype(np.int32))
    tied = (found.distances[:, :, None] == found.distances[:, None]).sum(-1) > 1
    assert ((found.ids == ids) | tied).all()


def test_digits_have_the_neighbours_of_scikit_learn() -> None:
    """V13: requires scikit-learn."""
    datasets = pytest.importorskip("sklearn.datasets")
    neighbors = pytest.importorskip("sklearn.neighbors")
    digits = datasets.load_digits().data
    distances, ids = neighbors.NearestNeighbors(n_neighbors=10, algorithm="brute").fit(digits).kneighbors(digits)
    for dtype in (np.float32, np.int8):  # integers from 0 to 16
        found = build(digits.astype(dtype), mesh=MESH_OF_ONE).search(digits.astype(dtype), 10)
        np.testing.assert_array_equal(found.distances, np.rint(distances**2))
        tied = (found.distances[:, :, None] == found.distances[:, None]).sum(-1) > 1
        last = found.distances == found.distances[:, -1:]  # a further vector may be as near
        assert ((found.ids == ids) | tied | last).all()
