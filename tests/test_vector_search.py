"""Exact search: what NumPy says, on one device and on eight, laid out by the planner, saved and loaded, and all that is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import vector_search
from autopar.errors import BudgetError, IndexFileError, SearchError
from autopar.vector_search.build import _place
from autopar.vector_search.data import metrics
from autopar.vector_search.data.centering import centred, whole
from autopar.vector_search.exact.index import ExactIndex
from autopar.vector_search.frame.subset_search import Among
from autopar.vector_search.kernels.exact_top_k import Corpus, exact_arguments, exact_search
from autopar.vector_search.kernels.tiling import Blocks, Tiling
from autopar.xla_compiler import hlo_collectives as hlo

MESH_OF_ONE = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
RNG = np.random.default_rng(0)
build = partial(vector_search.build, index="exact")


def vectors(n: int, dim: int = 16, dtype: str = "float32") -> np.ndarray[Any, Any]:
    if dtype == "int8":
        return RNG.integers(-128, 128, (n, dim)).astype(np.int8)
    return np.asarray(RNG.standard_normal((n, dim)), np.float32).astype(getattr(jnp, dtype))


def expected(queries: Any, corpus: Any, metric: str) -> np.ndarray[Any, Any]:
    """Distances of all, in 64 bits."""
    q, x = (np.asarray(a, np.float64) for a in (queries, corpus))
    if metric == "l2":
        return ((q[:, None] - x) ** 2).sum(-1)
    found = q @ x.T
    if metric == "inner_product":
        return found
    lengths = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(x, axis=1)
    return np.divide(found, lengths, out=np.zeros_like(found), where=lengths > 0)


def check(found: vector_search.Found, queries: Any, corpus: Any, metric: str, k: int, allowed: Any = None) -> None:
    """The k best distances, each that of its id."""
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
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    share=st.sampled_from([0.0, 0.1, 1.0]),
    dim=st.sampled_from([5, 400]),  # scores of int8 that are floats exactly, and that are not
)
def test_the_program_is_exact(
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
    less, centre = centred(corpus, metric)
    held = Corpus.of(jnp.asarray(less.reshape(*tiling, dim)), centre, allowed.reshape(tiling), metric)
    k = min(k, len(corpus))
    distances, positions, _ = jax.jit(exact_search(metric, k, at_once=at_once))(
        queries.reshape(blocks, block, dim), held
    )
    assert distances.dtype == metrics.score_dtype(jnp.dtype(corpus.dtype), metric)
    ids = np.asarray(positions, np.int64).reshape(-1, k)
    check(vector_search.Found(ids, np.asarray(distances).reshape(-1, k)), queries, corpus, metric, k, allowed)


@pytest.mark.sampled(3)
@pytest.mark.contract
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("metric", metrics.METRICS)
def test_an_index_answers_like_numpy(metric: str, dtype: str) -> None:
    corpus, queries = vectors(700, dtype=dtype), vectors(9, dtype=dtype)
    index = build(corpus, metric=metric)
    check(index.search(queries, 5), queries, corpus, metric, 5)
    one = index.search(queries[0], 3)
    assert one.ids.shape == (3,)
    check(vector_search.Found(one.ids[None], one.distances[None]), queries[:1], corpus, metric, 3)


@pytest.mark.parametrize("num_queries", [1, 2, 300])
def test_integers_are_exact(num_queries: int) -> None:
    """V1, by NumPy's integers."""
    corpus, queries = vectors(4000, 100, "int8"), vectors(num_queries, 100, "int8")
    found = build(corpus, mesh=MESH_OF_ONE).search(queries, 10)
    wide = ((queries[:, None].astype(np.int64) - corpus.astype(np.int64)) ** 2).sum(-1)
    assert found.distances.dtype == np.int32
    np.testing.assert_array_equal(found.distances, np.sort(wide, axis=1)[:, :10])
    np.testing.assert_array_equal(np.take_along_axis(wide, found.ids, 1), found.distances)


# -- distances that are small beside the vectors --------------------------------------------------

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


#: Corpora, and queries, by how many there are: beside the distances of neighbours, the vectors are long.
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
    """The k nearest by 64 bits, as far as distances of 32 bits tell, each once."""
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
def test_distances_that_are_small_beside_the_vectors_are_exact(case: str) -> None:
    """No neighbour is lost to rounding; and where an index is saved, it is what was given, to the last bit."""
    corpus, queries = (make(n).astype(np.float32) for make, n in zip(HARD[case], (NUM_HARD, NUM_NEAR), strict=True))
    index = build(corpus, mesh=MESH_OF_ONE, batch=NUM_NEAR)
    check_nearest(index.search(queries, 10), queries, corpus)
    check_nearest(index.search(queries, 10), queries, corpus)  # begins with as many candidates as the first needed
    assert isinstance(index, ExactIndex)
    corpus_held = index._corpus(index._programs.held.layouts[0])
    less = np.asarray(corpus_held.vectors).reshape(-1, 24)[: len(corpus)]
    np.testing.assert_array_equal(whole(less, np.asarray(corpus_held.centre)), corpus)
    among = Among(corpus, "l2", _place(MESH_OF_ONE, None, None, NUM_NEAR))  # what other kinds are measured by
    distances, positions = among.search(queries, 10, np.arange(len(corpus)))
    check_nearest(vector_search.Found(positions, distances), queries, corpus)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["offset of 1000", "two clusters far apart", "each thirty times"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_exact_on_eight_devices(case: str, dtype: str) -> None:
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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_centre_loses_nothing(dtype: str, offset: float, scale: float, whole_numbers: bool) -> None:
    given = _normal(50, 3) * scale + offset
    given = (np.round(given) if whole_numbers else given).astype(getattr(jnp, dtype))
    less, centre = centred(given, "l2")
    assert less.dtype == given.dtype
    assert centre is not None
    np.testing.assert_array_equal(whole(less, centre), given)
    if offset > 100 * scale:
        assert np.abs(less.astype(np.float64)).max() < offset / 10


@pytest.mark.parametrize("offset", [0, 300])
def test_an_inner_product_is_of_the_vectors_themselves(offset: float) -> None:
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
def test_ids_are_the_users_own() -> None:
    corpus, queries = vectors(50), vectors(3)
    own = np.arange(50)[::-1] + 2**40
    index = build(corpus, mesh=MESH_OF_ONE, ids=own)
    plain = build(corpus, mesh=MESH_OF_ONE)
    np.testing.assert_array_equal(index.search(queries, 4).ids, own[plain.search(queries, 4).ids])


def test_more_neighbours_than_there_are_come_padded() -> None:
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


def test_a_vector_of_zeros_has_no_cosine() -> None:
    corpus = np.array([[0, 0], [1, 1], [-1, 0]])
    found = build(corpus, metric="cosine", mesh=MESH_OF_ONE).search([[1.0, 0.0], [0.0, 0.0]], 3)
    np.testing.assert_allclose(found.distances, [[0.5**0.5, 0, -1], [0, 0, 0]], atol=1e-6)
    assert found.ids[0].tolist() == [1, 0, 2]


# -- layouts ---------------------------------------------------------------------------------


def split(num_vectors: int, num_queries: int, hardware: str, k: int = 10) -> dict[str, Any]:
    """What the plan of a search splits over 8 devices: the dims of the queries, the vectors and the result."""
    tiling, blocks = Tiling.of(num_vectors, 8), Blocks.of(num_queries, 8)
    arguments = exact_arguments(tiling, blocks, 64, np.dtype(np.float32), "l2")
    plan = autopar.plan(exact_search("l2", k, at_once=blocks.at_once), *arguments, mesh="8", hardware=hardware)
    split_dims = [[d for d, axes in enumerate(t.sharding.dims) if axes] for t in plan.inputs]
    return {"queries": split_dims[0], "vectors": split_dims[1]}


def test_corpus_batch_and_hardware_flip_the_layout() -> None:
    """A large corpus is split by its parts, and many queries within their blocks; where messages are cheap beside
    memory and arithmetic, the corpus is split at a size at which it would not pay elsewhere."""
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
def test_an_index_is_held_in_as_many_layouts_as_the_budget_allows() -> None:
    """One query wants the corpus split, three thousand want it whole."""
    corpus, one, many = vectors(4_000, 64), vectors(1, 64), vectors(3_000, 64)
    roomy, full = (build(corpus, mesh="8", batch=1, hardware="cpu-host") for _ in range(2))
    assert isinstance(full, ExactIndex)
    full._programs.held._budget = 0.0  # as if the devices were full
    for index in (roomy, full):
        check(index.search(one, 10), one, corpus, "l2", 10)
        assert len(index.stats().layouts) == 1
    np.testing.assert_array_equal(full.search(many, 3).ids, roomy.search(many, 3).ids)
    assert [len(index.stats().layouts) for index in (roomy, full)] == [2, 1]
    assert roomy.stats().device_bytes > full.stats().device_bytes


@pytest.mark.sampled(3)
@pytest.mark.contract
@pytest.mark.parametrize(("num_queries", "k"), [(1, 10), (64, 10), (64, 100)])
def test_a_split_corpus_sends_candidates_alone(num_queries: int, k: int) -> None:
    """V2: at most queries x devices x k of values and as many positions, once, counted in the compiled program."""
    corpus = vectors(50_000, 64)
    index = build(corpus, mesh="8", batch=num_queries, hardware="cpu-host")
    assert isinstance(index, ExactIndex)
    program = index.planned(num_queries, k)
    assert ("data",) in program.plan.inputs[1].sharding.dims
    lowered = program.run.lower(*program.arguments)
    found = hlo.collectives(lowered.compile().as_text(), ignore_up_to=0)
    places = Blocks.of(num_queries, 8).places
    assert found
    assert all(one.num_times == 1 for one in found)
    candidates = places * 8 * k
    gathered = [one.num_bytes for one in found if one.kind == "all-gather"]
    assert max(gathered, default=0) <= candidates * (4 + 4)  # a value and a position
    # and which were chosen, and of each query the least distance of what is no candidate
    assert sum(one.num_bytes for one in found) <= candidates * (4 + 4) + places * k * 4 + places * 4
    queries = vectors(num_queries, 64)
    alone = build(corpus, mesh=MESH_OF_ONE).search(queries, k)
    np.testing.assert_array_equal(index.search(queries, k).ids, alone.ids)


def test_a_corpus_that_fits_no_device_is_refused() -> None:
    with pytest.raises(BudgetError):
        build(vectors(50_000, 64), mesh="8", memory_budget_bytes=1e6)


@given(st.integers(0, 10**7), st.sampled_from([1, 3, 8]), st.integers(1, 10**5))
def test_tilings_have_room(num_vectors: int, num_devices: int, num_queries: int) -> None:
    tiling, blocks = Tiling.of(num_vectors, num_devices), Blocks.of(num_queries, num_devices)
    assert tiling.places >= num_vectors
    assert tiling.parts == num_devices
    assert tiling.places - num_vectors <= num_vectors // 8 + 1024 * num_devices
    assert num_queries <= blocks.places <= num_queries + max(num_queries // 3, 256 * num_devices)


# -- files -----------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_an_index_is_loaded_onto_other_devices(tmp_path: Path, dtype: str) -> None:
    """V14."""
    corpus, queries = vectors(3_000, dtype=dtype), vectors(20, dtype=dtype)
    index = build(corpus, mesh="8", metric="inner_product", ids=np.arange(3_000) * 7)
    index.save(tmp_path / "index")
    loaded = vector_search.load(tmp_path / "index", mesh=MESH_OF_ONE)
    before, after = index.search(queries, 10), loaded.search(queries, 10)
    np.testing.assert_allclose(before.distances, after.distances, rtol=1e-6)
    assert dtype != "float32" or (before.ids == after.ids).all()  # of others, equal scores may change places
    assert loaded.stats().dtype == dtype
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "index"
    build(vectors(40, 4), mesh=MESH_OF_ONE).save(path)
    return path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused(saved: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(saved) - 1))
    flipped = bytearray(saved)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.getbasetemp() / "damaged"
    for damaged in (bytes(flipped), saved[:place]):
        path.write_bytes(damaged)
        with pytest.raises(IndexFileError, match=str(path)):
            vector_search.load(path, mesh=MESH_OF_ONE)


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- what is refused -------------------------------------------------------------------------

NAN = np.full((3, 4), 1.0)
NAN[1, 2] = np.nan
REFUSED_CORPORA: dict[str, tuple[Any, dict[str, Any], str]] = {
    "one dim": (np.zeros(4), {}, r"shape \(4,\).*\[n, d\]"),
    "no elements": (np.zeros((4, 0)), {}, "at least 1"),
    "ragged": ([[1.0], [1.0, 2.0]], {}, "different lengths"),
    "text": (np.array([["a"]]), {}, "float32, bfloat16, int8"),
    "NaN": (NAN, {}, r"nan at \[1, 2\]"),
    "infinity": (np.full((2, 2), -np.inf), {}, r"-inf at \[0, 0\]"),
    "too long": (np.full((2, 2), 1e30, np.float32), {}, "scale the vectors down"),
    "metric": (np.zeros((2, 2)), {"metric": "hamming"}, "'hamming'.*l2, inner_product, cosine"),
    "kind": (np.zeros((2, 2)), {"index": "magic"}, "'magic'.*auto, exact"),
    "setting": (np.zeros((2, 2)), {"index": "exact", "num_lists": 3}, "'num_lists'"),
    "recall": (np.zeros((2, 2)), {"recall_target": 1.5}, "1.5"),
    "batch": (np.zeros((2, 2)), {"batch": 0}, "`batch` is 0"),
    "equal ids": (np.zeros((3, 2)), {"ids": [5, 7, 5]}, "5 twice, at positions 0 and 2"),
    "too few ids": (np.zeros((3, 2)), {"ids": [5, 7]}, "there are 3 vectors"),
    "ids of a mark": (np.zeros((3, 2)), {"ids": [5, -1, 7]}, "-1, at position 1"),
    "ids of floats": (np.zeros((3, 2)), {"ids": [5.0, 1.0, 7.0]}, "64-bit integers"),
    "ids too large": (np.zeros((2, 2)), {"ids": np.array([1, 2**63], np.uint64)}, "9223372036854775808"),
    "int8 too long": (np.zeros((1, metrics.MAX_INT8_DIM + 1), np.int8), {}, "exact in 32 bits"),
}


@pytest.mark.parametrize("case", REFUSED_CORPORA)
def test_what_no_index_is_built_of(case: str) -> None:
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
def test_what_no_index_can_be_asked(case: str) -> None:
    queries, k, allowed, message = REFUSED_SEARCHES[case]
    index = build(vectors(6, 4), mesh=MESH_OF_ONE)
    with pytest.raises(SearchError, match=message):
        index.search(queries, k, filter=allowed)


def test_queries_of_an_int8_index_are_whole() -> None:
    index = build(vectors(6, 4, "int8"), mesh=MESH_OF_ONE)
    assert (index.search([[1, 2, 3, -128]], 2).ids >= 0).all()
    with pytest.raises(SearchError, match="-128 to 127"):
        index.search([[1, 2, 3, 128]], 2)


# -- others ----------------------------------------------------------------------------------


def test_scores_are_those_of_faiss() -> None:
    """V1: where FAISS is installed."""
    faiss = pytest.importorskip("faiss")
    corpus, queries = vectors(64_000, 100, "int8"), vectors(50, 100, "int8")
    flat = faiss.IndexFlatL2(100)
    flat.add(corpus.astype(np.float32))
    distances, ids = flat.search(queries.astype(np.float32), 10)
    found = build(corpus, mesh=MESH_OF_ONE).search(queries, 10)
    np.testing.assert_array_equal(found.distances, distances.astype(np.int32))
    tied = (found.distances[:, :, None] == found.distances[:, None]).sum(-1) > 1
    assert ((found.ids == ids) | tied).all()


def test_digits_have_the_neighbours_that_scikit_learn_finds() -> None:
    """V13: where scikit-learn is installed."""
    datasets = pytest.importorskip("sklearn.datasets")
    neighbors = pytest.importorskip("sklearn.neighbors")
    digits = datasets.load_digits().data
    distances, ids = neighbors.NearestNeighbors(n_neighbors=10, algorithm="brute").fit(digits).kneighbors(digits)
    for dtype in (np.float32, np.int8):  # whole numbers from 0 to 16
        found = build(digits.astype(dtype), mesh=MESH_OF_ONE).search(digits.astype(dtype), 10)
        np.testing.assert_array_equal(found.distances, np.rint(distances**2))
        tied = (found.distances[:, :, None] == found.distances[:, None]).sum(-1) > 1
        last = found.distances == found.distances[:, -1:]  # one further may be as far
        assert ((found.ids == ids) | tied | last).all()
