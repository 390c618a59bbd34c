"""`autopar.vector_search.on_disk`: the cache of pages, and how memory is divided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopar import vector_search
from autopar.errors import SearchError
from autopar.vector_search.on_disk.cached_reader import pages_of, runs_of
from autopar.vector_search.on_disk.memory_division import InMemory, best_hit_rate, divided
from autopar.vector_search.on_disk.page_cache import PageCache
from autopar.vector_search.on_disk.readers import Run
from benchmarks.vector_disk import cache as cache_benchmark


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_hit_rates_of_a_zipf_trace() -> None:
    rows = {row["figure"]: row for row in cache_benchmark.measure(20_000)}
    assert all(row["met"] is not False for row in rows.values()), rows


def test_a_page_that_is_in_the_cache_has_its_content() -> None:
    draw, cache, content = np.random.default_rng(0), PageCache(8, 40, page_bytes=2), {}
    for step in range(3_000):
        if step % 500 == 499:
            changed = draw.choice(40, 5, replace=False)
            cache.drop(changed, 40)
            content |= {int(page): step % 256 for page in changed}
        if step == 2_000:
            cache.shrink(5)
        if step % 700 == 300:
            cache.pin(draw.choice(40, 6, replace=False))
        some = draw.choice(40, int(draw.integers(1, 6)), replace=False)
        rows = cache.find(some)
        for page, row in zip(some.tolist(), rows.tolist(), strict=True):
            if row >= 0:
                assert cache.contents(np.array([row]))[0].tolist() == [page, content.get(page, 0)]
        missing = some[rows < 0]
        cache.offer(
            missing, np.array([[page, content.get(page, 0)] for page in missing.tolist()], np.uint8).reshape(-1, 2)
        )
        held = [len(each) for each in (cache._window, cache._probation, cache._protected)]
        assert len(cache._rows) <= (8 if step < 2_000 else 5) and sum(held) + len(
            cache._pinned & set(cache._rows)
        ) == len(cache._rows)
    assert cache.stats.hits > 300


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_small_caches_work(capacity: int) -> None:
    cache = PageCache(capacity, 5, page_bytes=1)
    for page in [1, 1, 2, 3, 1, 1, 4, 1]:
        if cache.find(pages(page))[0] < 0:
            cache.offer(pages(page), np.array([[page]], np.uint8))
    assert cache.stats.lookups == 8


def test_pinned_pages_stay() -> None:
    cache = PageCache(4, 100, page_bytes=1)
    cache.pin(pages(7, 8, 9))
    assert cache.stats.pinned == 2
    cache.offer(pages(7, 8), np.array([[7], [8]], np.uint8))
    for page in range(20, 100):
        cache.find(pages(page))
        cache.offer(pages(page), np.array([[page]], np.uint8))
    assert (cache.find(pages(7, 8)) >= 0).all()


def test_runs_are_those_of_the_pages() -> None:
    runs = [Run(3, 2), Run(9, 1), Run(10, 3)]
    assert pages_of(runs).tolist() == [3, 4, 9, 10, 11, 12]
    assert runs_of(pages_of(runs)) == [Run(3, 2), Run(9, 4)]
    assert runs_of(pages()) == []


def test_memory_goes_where_it_saves_most_reads() -> None:
    rates = 1 / np.arange(1, 1001)
    small, large = InMemory("short codes", 10**6, 30.0), InMemory("long codes", 3 * 10**6, 20.0)
    found = divided(4.5e6, [small, large], 10**5, 1000, rates)
    assert found.stored is small or found.hit_rate < best_hit_rate(rates, 1000)
    assert divided(4.5e6, [small, large], 10**5, 10**6).stored is large  # a cache of an unknown worth
    assert divided(1.2e6, [small, large], 10**5, 10**6).stored is small
    with pytest.raises(
        SearchError, match=r"short codes needs 1,000,000, and a search 100,000 more. Give at least 1,100,000"
    ):
        divided(1e6, [small, large], 10**5, 1000)


@pytest.mark.slow
def test_an_index_with_a_cache_finds_the_same_and_reads_less(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    vectors = np.round(20 * draw.normal(size=(20_000, 16))).astype(np.int8)
    queries = vectors[draw.choice(100, 300)]
    with vector_search.build_on_disk(vectors, tmp_path / "index", progress=False, reader="mmap") as plain:
        truth = plain.search(queries, 10)
        singles = plain.reads().pages
        for query in queries:
            plain.search(query, 10)
        singles = plain.reads().pages - singles
        with pytest.raises(SearchError, match="has no cache"):
            plain.pin(queries)
    index = vector_search.load(tmp_path / "index", memory_budget_bytes=20e6, batch=1, reader="mmap")
    assert isinstance(index, vector_search.DiskIndex)
    assert index.pin(queries[:50]) > 0
    found = [index.search(query, 10) for query in queries]
    np.testing.assert_array_equal(np.stack([each.distances for each in found]), truth.distances)
    stats = index.stats().details["cache"]
    assert stats.hits > 0.8 * stats.lookups and index.reads().pages < 0.3 * singles
    index.close()
    with pytest.raises(SearchError, match="`memory_budget_bytes` is 1,000: the index needs"):
        vector_search.load(tmp_path / "index", memory_budget_bytes=1000)


@pytest.mark.slow
def test_a_cache_follows_updates(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(6_000, 8)).astype(np.float32)
    vector_search.create_updatable(tmp_path / "index", 8).close()
    index = vector_search.load(tmp_path / "index", memory_budget_bytes=20e6, batch=1)
    assert isinstance(index, vector_search.UpdatableIndex)
    sizes = [index.stats().details["cache"].pages]
    for at in range(0, 6_000, 1_000):
        index.upsert(np.arange(1_000), vectors[at : at + 1_000])
        index.checkpoint()
        found = index.search(vectors[at : at + 200], 1, effort=1000)
        assert found.ids[:, 0].tolist() == list(range(200))
        sizes.append(index.stats().details["cache"].pages)
    assert index.stats().details["cache"].lookups > 0
    assert sizes[-1] < sizes[0] or sizes[0] == 0
    index.close()
