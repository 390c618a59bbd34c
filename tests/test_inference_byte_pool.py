"""Test the pool of bytes against an oracle that has the bytes."""

from __future__ import annotations

import pytest

from autopar.errors import InferenceError
from autopar.inference.kv_cache.byte_pool import BytePool, ModelPages
from autopar.inference.kv_cache.page_tables import PagedCache
from benchmarks.placement.kv_pool import SLAB, run


def test_models_of_different_page_sizes_never_overlap_and_lose_nothing() -> None:
    assert run(1500, seed=1)[1] == 0


@pytest.mark.slow
def test_a_hundred_thousand_random_operations() -> None:
    assert run(100_000, seed=2)[1] == 0


def hold(pages: ModelPages, num_slabs: int) -> list[int]:
    found = pages.allocate(num_slabs * pages.per_slab)
    assert found is not None
    return found


def test_a_model_borrows_and_gives_back_what_another_claims() -> None:
    """Ten slabs: "a" counts on six, "b" on four, and takes all of them while "a" is idle."""
    pool = BytePool(10 * SLAB, SLAB)
    a, b = pool.model(8, 3, 0.6), pool.model(20, 2, 0.4)
    held = [hold(b, 1) for _ in range(10)]
    assert (a.num_available, b.num_available, pool.num_free) == (0, 0, 0)
    a.claim(2 * a.per_slab)
    b.release(held.pop())
    assert b.num_available == 0, "the free slab is claimed"
    assert a.num_available == a.per_slab
    b.release(held[0][:-1])  # all but one page of a slab, which drains
    assert b.num_available == 0
    first = hold(a, 1)
    assert b.num_available == 0, "one more slab is claimed"
    b.release(held.pop(0)[-1:])
    second = hold(a, 1)
    a.claim(0)
    a.release(second)
    assert b.num_available == b.per_slab, "nobody claims it"
    a.claim(100 * a.per_slab)
    assert a.num_claimed == 5, "it claims no more than its quota"
    for pages, model in [(first, a), *((each, b) for each in held)]:
        model.release(pages)
    pool.check()
    assert pool.num_free == 10


def test_cached_prefixes_of_others_are_no_obstacle() -> None:
    """Evicting a page in the middle of a prefix takes those along that follow it."""
    pool = BytePool(4 * SLAB, SLAB)
    a, b = pool.model(40, 1, 0.5), pool.model(30, 2, 0.5)
    cache = PagedCache(a, 4)
    tokens = list(range(4 * 24))
    table = cache.start(tokens)
    assert cache.grow(table, len(tokens)) == []
    cache.insert_prefix(table, tokens)
    cache.release(table)
    assert (a.num_evictable, pool.num_free, b.num_available) == (24, 0, 4 * b.per_slab)
    hold(b, 1)
    pool.check()
    assert a.num_evictable < 24
    found = cache.start(tokens)
    assert found.pages == found.pages[: a.num_held]
    cache.release(found)
    pool.check()


def test_pools_and_quotas_that_cannot_be_are_refused() -> None:
    with pytest.raises(InferenceError, match="a pool of 9 bytes has no slab of 10 bytes"):
        BytePool(9, 10)
    pool = BytePool(4 * SLAB, SLAB)
    pool.model(8, 3, 0.75)
    with pytest.raises(InferenceError, match="other models have 75%"):
        pool.model(8, 3, 0.5)
    with pytest.raises(InferenceError, match="does not fit in a slab of 240 bytes"):
        pool.model(100, 3, 0.25)
