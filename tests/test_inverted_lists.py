"""IVF-Flat is exact within the probed lists, for any work shape, and its lists contain the whole corpus."""

from __future__ import annotations

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearest import exact_nearest, exact_scores, recall

from autopar.api.planned_function import Planned
from autopar.vector_search.data.metrics import METRICS, NO_ID, Metric
from autopar.vector_search.ivf import search as list_search
from autopar.vector_search.ivf.lists import InvertedLists, fill, lists_of, longest_of, members, usual_slots
from autopar.vector_search.ivf.probe_batching import group_by_list, num_work_items, work_items
from autopar.vector_search.ivf.search import Shape, shape_of
from autopar.vector_search.kernels.k_means import k_means
from autopar.vector_search.kernels.top_k_merge import Best, distinct
from benchmarks.synthetic_vectors import faiss_synthetic

NUM, LISTS, DIM = 1000, 16, 12

search = jax.jit(list_search.search, static_argnums=(2, 3), static_argnames="shape")
search_lists = jax.jit(list_search.search_lists, static_argnums=2, static_argnames="shape")


@cache
def made(
    metric: Metric = "l2", dtype: str = "float32", slots: int = 16
) -> tuple[InvertedLists, np.ndarray, np.ndarray]:
    """An index, its vectors, and 40 queries."""
    data = faiss_synthetic(DIM, 0, NUM, 40)
    vectors, queries = data.corpus, data.queries
    if dtype == "int8":
        vectors, queries = ((100 * each).astype(np.int8) for each in (vectors, queries))
    found = k_means(jnp.asarray(vectors), LISTS, iterations=4)
    index = fill(vectors, np.asarray(found.centroids), np.asarray(found.lists), metric, slots)
    return index, vectors, queries


def best_within(
    index: InvertedLists, vectors: np.ndarray, queries: np.ndarray, probes: np.ndarray, k: int
) -> list[list[int]]:
    """The best of the probed lists, by brute force."""
    held = members(index)
    found: list[list[int]] = []
    for query, lists in zip(queries, probes, strict=True):
        there = np.concatenate([held[each] for each in lists])
        score = exact_scores(query[None], vectors[there], index.metric)[0]
        found.append(there[np.argsort(-score, kind="stable")][:k].tolist())
    return found


def test_lists_that_share_programs_have_equal_sizes_and_results() -> None:
    draw, sizes = np.random.default_rng(0), set[tuple[object, ...]]()
    queries = jnp.asarray(draw.normal(size=(20, DIM)).astype(np.float32))
    for _ in range(4):
        vectors, centroids = (draw.normal(size=(num, DIM)).astype(np.float32) for num in (NUM, LISTS))
        lists = draw.permutation(np.arange(NUM) % LISTS)
        lists[: int(draw.integers(16))] = 0  # lengths that differ, but none near twice another
        own, shared = (fill(vectors, centroids, lists, "l2", shares_programs=shares) for shares in (False, True))
        leaves, structure = jax.tree.flatten(shared)
        sizes.add((structure, *(leaf.shape for leaf in leaves)))
        assert all(most >= num for most, num in zip(shared.longest, own.longest, strict=True))
        for mine, theirs in zip(search(shared, queries, 10, 5), search(own, queries, 10, 5), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert len(sizes) == 1


def test_every_vector_is_in_its_list_once() -> None:
    index, vectors, _ = made()
    assert sorted(np.concatenate(members(index)).tolist()) == list(range(NUM))
    positions = np.asarray(index.positions)
    held = positions != NO_ID
    np.testing.assert_array_equal(np.asarray(index.vectors)[held], vectors[positions[held]])
    owner = lists_of(index, NUM)[:, 0]
    assert [set(owner[each]) for each in members(index)] == [{number} for number in range(LISTS)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_search_is_exact_within_the_lists_probed(metric: Metric, dtype: str) -> None:
    index, vectors, queries = made(metric, dtype)
    probes = np.stack([np.random.default_rng(i).permutation(LISTS)[:5] for i in range(len(queries))]).astype(np.int32)
    found = search_lists(index, jnp.asarray(queries), 7, jnp.asarray(probes))
    truth = best_within(index, vectors, queries, probes, 7)
    score = exact_scores(queries, vectors, metric)
    for row, (mine, theirs) in enumerate(zip(np.asarray(found.positions).tolist(), truth, strict=True)):
        # equal scores may be in any order
        np.testing.assert_allclose(score[row, mine], score[row, theirs], rtol=1e-4, atol=1e-4)
        assert len(set(mine)) == 7


@pytest.mark.parametrize("metric", METRICS)
def test_probing_all_lists_finds_the_nearest(metric: Metric) -> None:
    index, vectors, queries = made(metric)
    found = search(index, jnp.asarray(queries), 10, LISTS)
    assert recall(np.asarray(found.positions), exact_nearest(queries, vectors, 10, metric)) >= 0.999
    assert np.all(np.diff(np.asarray(found.scores), axis=1) <= 0)


@pytest.mark.slow
def test_work_shape_changes_no_result() -> None:
    """Items of few and of many queries; one, some or all items per step; also if every query probes the same list."""
    index, _, queries = made()
    crowded = np.stack([np.array([3, 4 + i % 9, 14, 0, 1], np.int32) for i in range(len(queries))])
    spread = np.stack([np.random.default_rng(i).permutation(LISTS)[:5] for i in range(len(queries))]).astype(np.int32)
    for probes in (crowded, spread):
        results: list[Best] = []
        for rows, at_once in ((40, 1000), (3, 7), (8, 1)):
            results.append(
                search_lists(index, jnp.asarray(queries), 9, jnp.asarray(probes), shape=Shape(rows, at_once))
            )
        for one, other in itertools.pairwise(results):
            np.testing.assert_array_equal(one.positions, other.positions)
            np.testing.assert_allclose(one.scores, other.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_one_query_and_many_find_the_same(num_queries: int) -> None:
    index, _, queries = made()
    every = search(index, jnp.asarray(queries), 5, 4)
    some = search(index, jnp.asarray(queries[:num_queries]), 5, 4)
    np.testing.assert_array_equal(some.positions, every.positions[:num_queries])


def test_rows_follow_the_mean_probes_per_list() -> None:
    index, _, _ = made()
    assert shape_of(index, 1, 2).rows == 1
    assert shape_of(index, 100, 1).rows == 8
    assert shape_of(index, 1000, LISTS).rows == 32


@pytest.mark.parametrize("k", [1, 300])
def test_any_k_and_missing_results_are_marked(k: int) -> None:
    index, vectors, queries = made()
    probes = np.tile(np.array([[0, 1]], np.int32), (len(queries), 1))
    found = search_lists(index, jnp.asarray(queries), k, jnp.asarray(probes))
    truth = best_within(index, vectors, queries, probes, k)
    positions, score = np.asarray(found.positions), np.asarray(found.scores)
    for row, theirs in enumerate(truth):
        assert positions[row, : len(theirs)].tolist() == theirs
        assert np.all(positions[row, len(theirs) :] == NO_ID)
        assert np.all(np.isneginf(score[row, len(theirs) :]))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_filter_returns_the_nearest_allowed_vectors(share: float) -> None:
    index, vectors, queries = made()
    allowed = np.random.default_rng(1).random(NUM) < share
    found = np.asarray(search(index, jnp.asarray(queries), 4, LISTS, jnp.asarray(allowed)).positions)
    which = np.nonzero(allowed)[0]
    assert set(found[found != NO_ID].tolist()) <= set(which.tolist())
    if not len(which):
        assert np.all(found == NO_ID)
    else:
        assert recall(found, which[exact_nearest(queries, vectors[allowed], 4)]) >= 0.999


def test_vector_in_two_lists_is_returned_once() -> None:
    index, vectors, queries = made()
    first = np.zeros(NUM, int)
    for number, held in enumerate(members(index)):
        first[held] = number
    both = np.stack([first, np.where(np.arange(NUM) % 3 == 0, (first + 1) % LISTS, NO_ID)], axis=1)
    index = fill(vectors, np.asarray(index.centroids), both, "l2")
    assert sum(len(each) for each in members(index)) == NUM + len(range(0, NUM, 3))
    found = search(index, jnp.asarray(queries), 10, LISTS)
    np.testing.assert_array_equal(found.positions, exact_nearest(queries, vectors, 10))


def test_distinct_keeps_the_best_duplicate_and_marks_missing_results() -> None:
    found = Best(jnp.array([[9.0, 9.0, 5.0, 5.0, -jnp.inf]]), jnp.array([[4, 4, 2, 2, NO_ID]], jnp.int32))
    best = distinct(found, 3)
    assert best.positions.tolist() == [[4, 2, NO_ID]]
    assert best.scores.tolist() == [[9.0, 5.0, -np.inf]]


def test_ranks_count_the_probes_of_a_list() -> None:
    probes = np.random.default_rng(0).integers(0, 5, size=(30, 3)).astype(np.int32)
    found = group_by_list(jnp.asarray(probes), 6)
    np.testing.assert_array_equal(found.counts, np.bincount(probes.reshape(-1), minlength=6))
    for each in range(6):
        assert sorted(np.asarray(found.rank)[probes == each].tolist()) == list(range((probes == each).sum()))


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.sampled_from((1, 7)), st.sampled_from((1, 4)), st.sampled_from((1, 13)), st.data())
def test_work_items_cover_every_block_and_probing_query_within_capacity(
    num_lists: int, rows: int, queries: int, data: st.DataObject
) -> None:
    num_blocks = data.draw(st.lists(st.integers(1, 5), min_size=num_lists, max_size=num_lists))
    num_probes = data.draw(st.sampled_from((1, num_lists // 2 + 1, num_lists)))
    one = st.permutations(range(num_lists)).map(lambda order: order[:num_probes])
    probes = np.array(data.draw(st.lists(one, min_size=queries, max_size=queries)), np.int32)
    first = np.concatenate([[0], np.cumsum(num_blocks)]).astype(np.int32)
    longest = longest_of(np.array(num_blocks))[min((num_probes - 1).bit_length(), (num_lists - 1).bit_length())]
    assert longest >= sum(sorted(num_blocks)[-num_probes:])
    most, _ = num_work_items(queries, rows, sum(num_blocks), longest)
    by_list = group_by_list(jnp.asarray(probes), num_lists)
    made = jax.device_get(work_items(by_list, jnp.asarray(first), rows, most))
    by_list = jax.device_get(by_list)
    taken = np.bincount(probes.reshape(-1), minlength=num_lists)
    assert int(made.num_items) == (-(-taken // rows) * num_blocks).sum() <= most
    served = {
        (query, block) for query, lists in enumerate(probes) for b in lists for block in range(*first[[b, b + 1]])
    }
    found = []
    for item in range(int(made.num_items)):
        start, each = int(made.first_probe[item]), int(made.lists[item])
        end = min(start + rows, int(by_list.first[each + 1]))
        found += [(int(query), int(made.blocks[item])) for query in by_list.queries[start:end]]
        assert first[each] <= made.blocks[item] < first[each + 1]
    assert len(found) == len(set(found))
    assert set(found) == served


@pytest.mark.slow
def test_block_size_changes_no_result() -> None:
    small, _, queries = made()
    large, _, _ = made(slots=64)
    assert large.num_blocks < small.num_blocks
    a, b = (search(each, jnp.asarray(queries), 10, 5) for each in (small, large))
    np.testing.assert_array_equal(a.positions, b.positions)


@pytest.mark.parametrize(("length", "slots"), [(3, 16), (100, 32), (120, 64), (200, 64), (1000, 128), (10**6, 1024)])
def test_block_size_follows_the_mean_list_length(length: int, slots: int) -> None:
    assert usual_slots(10 * length, 10) == slots


def test_recall_equals_faiss_with_its_centroids_and_lists() -> None:
    faiss = pytest.importorskip("faiss")
    data = faiss_synthetic(32, 0, 2000, 100)
    quantizer = faiss.IndexFlatL2(32)
    theirs = faiss.IndexIVFFlat(quantizer, 32, 40)
    theirs.train(data.corpus)
    theirs.add(data.corpus)
    theirs.nprobe = 4
    _, expected = theirs.search(data.queries, 10)
    lists = quantizer.search(data.corpus, 1)[1][:, 0]
    index = fill(data.corpus, quantizer.reconstruct_n(0, 40), lists, "l2")
    found = np.asarray(search(index, jnp.asarray(data.queries), 10, 4).positions)
    truth = exact_nearest(data.queries, data.corpus, 10)
    assert abs(recall(found, truth) - recall(expected, truth)) <= 1e-4
    assert recall(found, expected) >= 0.9995


@pytest.mark.slow
def test_sharded_lists_give_the_results_of_one_device() -> None:
    """Larger than one device's budget: every list is sharded over all devices, which balances the work."""
    data = faiss_synthetic(64, 0, 20000, 128)
    lists = np.random.default_rng(0).integers(0, 32, size=20000)
    index = fill(data.corpus, data.corpus[:32], lists, "l2")
    arrays, tree = jax.tree.flatten((index, jnp.asarray(data.queries)))

    def searched(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        index, queries = jax.tree.unflatten(tree, arrays)
        return tuple(list_search.search(index, queries, 10, 8))

    shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays)
    planned = Planned.of(searched, shapes, {"mesh": "8", "memory_budget_bytes": 4e6})
    split = [s for array, s in zip(arrays, planned.shardings, strict=True) if array.ndim == 3]
    assert split[0].spec[1] == "data"
    found, positions = planned.run(*map(jax.device_put, arrays, planned.shardings))
    expected, whole = jax.jit(searched)(*arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    assert np.mean(np.asarray(positions) == np.asarray(whole)) > 0.995  # nearly equal scores may swap
