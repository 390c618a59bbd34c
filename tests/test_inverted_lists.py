"""IVF-Flat: search is exact within the lists probed, whatever the passes, and all of the corpus is in the lists."""

from __future__ import annotations

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nearest import exact_nearest, exact_scores, recall

from autopar.planned import Planned
from autopar.vector_search import list_search
from autopar.vector_search.best import Best, distinct
from autopar.vector_search.inverted_lists import InvertedLists, fill, members
from autopar.vector_search.k_means import k_means
from autopar.vector_search.list_search import Passes, passes
from autopar.vector_search.metrics import METRICS, NO_ID, Metric
from autopar.vector_search.seats import seats
from autopar.vector_search.size_classes import size_classes
from benchmarks.synthetic_vectors import faiss_synthetic

NUM, LISTS, DIM = 1000, 16, 12

search = jax.jit(list_search.search, static_argnums=(2, 3), static_argnames="how")
search_lists = jax.jit(list_search.search_lists, static_argnums=2, static_argnames="how")


@cache
def made(
    metric: Metric = "l2", dtype: str = "float32", most_classes: int = 4
) -> tuple[InvertedLists, np.ndarray, np.ndarray]:
    """An index, its vectors, and 40 queries."""
    data = faiss_synthetic(DIM, 0, NUM, 40)
    vectors, queries = data.corpus, data.queries
    if dtype == "int8":
        vectors, queries = ((100 * each).astype(np.int8) for each in (vectors, queries))
    found = k_means(jnp.asarray(vectors), LISTS, rounds=4)
    index = fill(vectors, np.asarray(found.centroids), np.asarray(found.lists), metric, most_classes)
    return index, vectors, queries


def best_within(
    index: InvertedLists, vectors: np.ndarray, queries: np.ndarray, probes: np.ndarray, k: int
) -> list[list[int]]:
    """By looking at every vector of the lists probed."""
    held = members(index)
    found: list[list[int]] = []
    for query, lists in zip(queries, probes, strict=True):
        there = np.concatenate([held[each] for each in lists])
        score = exact_scores(query[None], vectors[there], index.metric)[0]
        found.append(there[np.argsort(-score, kind="stable")][:k].tolist())
    return found


def test_every_vector_is_in_its_list_once() -> None:
    index, vectors, _ = made()
    assert sorted(np.concatenate(members(index)).tolist()) == list(range(NUM))
    first = 0
    for each in index.classes:
        size = each.positions.shape[0]
        for row, positions in enumerate(np.asarray(each.positions)):
            held = positions != NO_ID
            np.testing.assert_array_equal(np.asarray(each.vectors)[row][held], vectors[positions[held]])
        first += size
    assert first == index.num_lists


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_search_is_exact_within_the_lists_probed(metric: Metric, dtype: str) -> None:
    index, vectors, queries = made(metric, dtype)
    probes = np.stack([np.random.default_rng(i).permutation(LISTS)[:5] for i in range(len(queries))]).astype(np.int32)
    found = search_lists(index, jnp.asarray(queries), 7, jnp.asarray(probes))
    truth = best_within(index, vectors, queries, probes, 7)
    score = exact_scores(queries, vectors, metric)
    for row, (mine, theirs) in enumerate(zip(np.asarray(found.positions).tolist(), truth, strict=True)):
        # equal scores may come in any order
        np.testing.assert_allclose(score[row, mine], score[row, theirs], rtol=1e-4, atol=1e-4)
        assert len(set(mine)) == 7


@pytest.mark.parametrize("metric", METRICS)
def test_probing_all_lists_finds_the_nearest(metric: Metric) -> None:
    index, vectors, queries = made(metric)
    found = search(index, jnp.asarray(queries), 10, LISTS)
    assert recall(np.asarray(found.positions), exact_nearest(queries, vectors, 10, metric)) >= 0.999
    assert np.all(np.diff(np.asarray(found.scores), axis=1) <= 0)


def test_the_passes_change_no_result() -> None:
    """Room for all, for some, for none; tiles of few rows; few lists in a pass. Also when every query wants one list."""
    index, _, queries = made()
    classes = len(index.classes)
    crowded = np.stack([np.array([3, 4 + i % 9, 14, 0, 1], np.int32) for i in range(len(queries))])
    spread = np.stack([np.random.default_rng(i).permutation(LISTS)[:5] for i in range(len(queries))]).astype(np.int32)
    for probes in (crowded, spread):
        results: list[Best] = []
        for rows, tile, num in ((40, 8, 1), (8, 3, 1), (0, 4, 2)):
            how = Passes(rows, tile, (num,) * classes)
            results.append(search_lists(index, jnp.asarray(queries), 9, jnp.asarray(probes), how=how))
        for one, other in itertools.pairwise(results):
            np.testing.assert_array_equal(one.positions, other.positions)
            np.testing.assert_allclose(one.scores, other.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_one_query_and_many_find_the_same(num_queries: int) -> None:
    index, _, queries = made()
    every = search(index, jnp.asarray(queries), 5, 4)
    some = search(index, jnp.asarray(queries[:num_queries]), 5, 4)
    np.testing.assert_array_equal(some.positions, every.positions[:num_queries])


def test_few_queries_are_not_multiplied_with_all_lists() -> None:
    index, _, _ = made()
    assert passes(index, 1, 2).rows == 0
    assert passes(index, 100, 8).rows > 100 * 8 / LISTS


@pytest.mark.parametrize("k", [1, 300])
def test_any_k_and_what_is_missing_is_marked(k: int) -> None:
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
def test_a_filter_leaves_the_rest_out_and_finds_the_nearest_of_what_is_allowed(share: float) -> None:
    index, vectors, queries = made()
    allowed = np.random.default_rng(1).random(NUM) < share
    found = np.asarray(search(index, jnp.asarray(queries), 4, LISTS, jnp.asarray(allowed)).positions)
    which = np.nonzero(allowed)[0]
    assert set(found[found != NO_ID].tolist()) <= set(which.tolist())
    if not len(which):
        assert np.all(found == NO_ID)
    else:
        assert recall(found, which[exact_nearest(queries, vectors[allowed], 4)]) >= 0.999


def test_a_vector_in_two_lists_is_found_once() -> None:
    index, vectors, queries = made()
    first = np.zeros(NUM, int)
    for number, held in enumerate(members(index)):
        first[held] = number
    both = np.stack([first, np.where(np.arange(NUM) % 3 == 0, (first + 1) % LISTS, NO_ID)], axis=1)
    index = fill(vectors, np.asarray(index.centroids), both, "l2")
    assert sum(len(each) for each in members(index)) == NUM + len(range(0, NUM, 3))
    found = search(index, jnp.asarray(queries), 10, LISTS)
    np.testing.assert_array_equal(found.positions, exact_nearest(queries, vectors, 10))


def test_distinct_keeps_the_best_of_each_and_marks_what_is_missing() -> None:
    found = Best(jnp.array([[9.0, 9.0, 5.0, 5.0, -jnp.inf]]), jnp.array([[4, 4, 2, 2, NO_ID]], jnp.int32))
    best = distinct(found, 3)
    assert best.positions.tolist() == [[4, 2, NO_ID]]
    assert best.scores.tolist() == [[9.0, 5.0, -np.inf]]


def test_seats_count_the_probes_of_a_list() -> None:
    probes = np.random.default_rng(0).integers(0, 5, size=(30, 3)).astype(np.int32)
    found = seats(jnp.asarray(probes), 6)
    np.testing.assert_array_equal(found.taken, np.bincount(probes.reshape(-1), minlength=6))
    for each in range(6):
        assert sorted(np.asarray(found.seat)[probes == each].tolist()) == list(range((probes == each).sum()))


def test_size_classes_pad_least_of_all_ways_to_cut() -> None:
    counts = np.array([3, 17, 18, 40, 41, 100, 5, 90, 0])
    found = size_classes(counts, most=3)
    padded = np.sort(np.maximum(-(-counts // 16), 1) * 16)
    assert sum(found.num_lists) == len(counts)
    last = 0
    for num, length in zip(found.num_lists, found.lengths, strict=True):
        assert counts[found.order[last : last + num]].max() <= length
        last += num
    cuts = [sorted({a, b, 9} - {0}) for a in range(10) for b in range(10)]
    least = min(sum((e - s) * padded[e - 1] for s, e in zip([0, *c[:-1]], c, strict=True)) for c in cuts)
    assert sum(n * length for n, length in zip(found.num_lists, found.lengths, strict=True)) == least


def test_one_class_and_many_give_the_same() -> None:
    one, _, queries = made(most_classes=1)
    many, _, _ = made()
    assert len(one.classes) == 1 < len(many.classes)
    assert many.num_slots < one.num_slots
    a, b = (search(each, jnp.asarray(queries), 10, 5) for each in (one, many))
    np.testing.assert_array_equal(a.positions, b.positions)


def test_with_faiss_centroids_and_lists_the_recall_is_faiss_own() -> None:
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


def test_lists_split_over_devices_by_the_planner_find_what_one_device_finds() -> None:
    """More than one device's budget: every list over all devices, so that each has as much to do."""
    data = faiss_synthetic(64, 0, 20000, 128)
    lists = np.random.default_rng(0).integers(0, 32, size=20000)
    index = fill(data.corpus, data.corpus[:32], lists, "l2", most_classes=1)
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
    assert np.mean(np.asarray(positions) == np.asarray(whole)) > 0.995  # near-equal scores change places
