"""Test the paged KV cache.

No order of operations leaks a page, loses one, or lets two sequences write to one. The prefix cache finds what brute
force finds. On the device a paged cache gives the same bits as a contiguous one.
"""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from autopar.errors import InferenceError
from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.page_tables import PagedCache, PageTable
from autopar.inference.kv_cache.prefix_tree import NO_PAGE

PAGE = 4


class Oracle:
    """A model of a pool with one prefix tree: the contents of pages as written, and prefixes by brute force.

    Args:
        window: the tokens that each token sees; None is all before it.
    """

    def __init__(self, num_pages: int, window: int | None = None) -> None:
        self.pool, self.window = PagePool(num_pages), window
        self.cache = PagedCache(self.pool, PAGE, window=window)
        self.contents: dict[tuple[int, int], int] = {}  # (page, offset) to token, in place of the device's arrays
        self.live: list[tuple[PageTable, list[int]]] = []
        self.cached: dict[tuple[int, ...], int] = {}  # the page of each prefix in full pages
        self.done: dict[PageTable, int] = {}  # the tokens that stay, because pages behind their window are given back
        self.fits_all = True

    def first_needed(self, num_tokens: int) -> int:
        """The first page that has a token which the next one sees."""
        seen = range(num_tokens) if self.window is None else range(max(0, num_tokens - self.window + 1), num_tokens + 1)
        return seen[0] // PAGE if seen else 0

    def longest(self, tokens: list[int]) -> int:
        """The tokens of the longest prefix of which all pages in the window of the next token are cached,
        at least the last one."""
        is_there = [tuple(tokens[: PAGE * num]) in self.cached for num in range(1, (len(tokens) - 1) // PAGE + 1)]
        fits = [
            num
            for num in range(1, len(is_there) + 1)
            if all(is_there[min(self.first_needed(PAGE * num), num - 1) : num])
        ]
        return PAGE * max(fits, default=0)

    def start(self, tokens: list[int]) -> None:
        self.forget_evicted()
        longest = self.longest(tokens)
        table = self.cache.start(tokens)
        found = table.num_tokens
        assert found == longest
        self.live.append((table, tokens[:found]))
        self.done[table] = found
        self.check(len(self.live) - 1)
        if not self.write(len(self.live) - 1, tokens[found:]):
            self.release(len(self.live) - 1)

    def write(self, i: int, new: list[int]) -> bool:
        table, tokens = self.live[i]
        before = list(table.pages), self.pool.num_available
        needed = self.cache.num_needed(table, len(tokens) + len(new))
        if needed > self.pool.num_free:
            self.fits_all = False
        copies = self.cache.grow(table, len(tokens) + len(new))
        self.forget_evicted()
        if copies is None:
            assert needed > self.pool.num_available and before == (table.pages, self.pool.num_available)
            return False
        assert len(copies) <= 1, "at most the first page written is shared"
        for source, target in copies:
            for offset in range(PAGE):
                if (source, offset) in self.contents:
                    self.contents[target, offset] = self.contents[source, offset]
        for at, token in enumerate(new, len(tokens)):
            assert self.pool.references(table.pages[at // PAGE]) == 1, "a shared page is never written"
            self.contents[table.pages[at // PAGE], at % PAGE] = token
        tokens += new
        for j in range(len(self.live)):
            self.check(j)
        return True

    def insert_prefix(self, i: int) -> None:
        table, tokens = self.live[i]
        first = table.num_cached_pages
        self.cache.insert_prefix(table, tokens)
        if table.num_cached_pages < len(tokens) // PAGE:
            assert self.window is None
            assert self.pool.references(table.pages[table.num_cached_pages]) > 1, (
                "insertion stops at a page of a fork only"
            )
            prefix = tuple(tokens[: PAGE * (table.num_cached_pages + 1)])
            assert prefix in self.cached, "and only if the prefix is cached already"
        assert table.num_cached_pages >= first
        for num, page in enumerate(table.pages[first : table.num_cached_pages], first + 1):
            if page != NO_PAGE and page in self.pool._on_evict:
                prefix = tuple(tokens[: PAGE * num])
                assert self.cached.setdefault(prefix, page) == page
        self.check(i)

    def fork(self, i: int, num: int = 0) -> None:
        """Fork a sequence without its last `num` tokens."""
        table, tokens = self.live[i]
        tokens = tokens[: max(0, len(tokens) - num)]
        assert self.cache.can_fork(table, len(tokens)) == (table.num_given_back <= self.first_needed(len(tokens)))
        if not self.cache.can_fork(table, len(tokens)):
            return
        fork = self.cache.fork(table, len(tokens))
        self.live.append((fork, tokens))
        self.done[fork] = len(tokens)
        self.check(len(self.live) - 1)

    def give_back(self, i: int) -> None:
        """Give back the pages behind the window of a sequence's next token."""
        table, tokens = self.live[i]
        self.cache.give_back(table, len(tokens))
        self.done[table] = len(tokens)
        assert table.num_given_back == self.first_needed(len(tokens))
        self.check(i)

    def truncate(self, i: int, num: int) -> None:
        table, tokens = self.live[i]
        left = max(table.num_cached_pages * PAGE, len(tokens) - num, self.done[table] if self.window else 0)
        self.cache.truncate(table, left)
        del tokens[left:]

    def release(self, i: int) -> None:
        table, _ = self.live.pop(i)
        self.cache.release(table)

    def check(self, i: int) -> None:
        """Assert that a sequence reads its own tokens, those in the window of the next one."""
        table, tokens = self.live[i]
        first = 0 if self.window is None else max(0, len(tokens) - self.window + 1)
        read = [self.contents[table.pages[t // PAGE], t % PAGE] for t in range(first, len(tokens))]
        assert read == tokens[first:]

    def forget_evicted(self) -> None:
        """Forget the prefixes whose pages have been evicted since."""
        self.cached = {prefix: page for prefix, page in self.cached.items() if page in self.pool._on_evict}

    def check_all(self) -> None:
        self.pool.check()
        assert self.pool.num_free + self.pool.num_evictable + self.pool.num_held == self.pool.num_pages
        assert self.pool.num_held == len({page for table, _ in self.live for page in table.held})
        for table, _ in self.live:
            assert table.pages[: table.num_given_back] == [NO_PAGE] * table.num_given_back
            assert NO_PAGE not in table.held
        self.forget_evicted()
        assert self.cache._tree is not None and set(self.cached.values()) == set(self.cache._tree._nodes)
        nodes = [self.cache._tree._root]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            assert node.children or node.page != NO_PAGE or node.parent is None, "each leaf of the tree has a page"


class Operations(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 24), window=st.sampled_from([None, 1, 3, 5, 9]))
    def begin(self, num_pages: int, window: int | None) -> None:
        self.oracle = Oracle(num_pages, window)

    def _some(self, data: Any) -> int:
        return data.draw(st.integers(0, len(self.oracle.live) - 1))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def start(self, tokens: list[int]) -> None:
        self.oracle.start(tokens)

    @precondition(lambda self: self.oracle.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def write(self, data: Any, tokens: list[int]) -> None:
        self.oracle.write(self._some(data), tokens)

    @precondition(lambda self: self.oracle.live)
    @rule(data=st.data())
    def insert_prefix(self, data: Any) -> None:
        self.oracle.insert_prefix(self._some(data))

    @precondition(lambda self: self.oracle.live and self.oracle.window)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        self.oracle.give_back(self._some(data))

    @precondition(lambda self: self.oracle.live)
    @rule(data=st.data(), num=st.integers(0, 9))
    def fork(self, data: Any, num: int) -> None:
        self.oracle.fork(self._some(data), num)

    @precondition(lambda self: self.oracle.live)
    @rule(data=st.data(), num=st.integers(1, 6))
    def truncate(self, data: Any, num: int) -> None:
        self.oracle.truncate(self._some(data), num)

    @precondition(lambda self: self.oracle.live)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self.oracle.release(self._some(data))

    @invariant()
    def check_all(self) -> None:
        if hasattr(self, "oracle"):
            self.oracle.check_all()

    def teardown(self) -> None:
        if hasattr(self, "oracle"):
            while self.oracle.live:
                self.oracle.release(0)
            assert self.oracle.pool.num_held == 0


Operations.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestOperations = Operations.TestCase


OPERATIONS = ("start", "write", "insert_prefix", "give_back", "fork", "truncate", "release")


def operate(oracle: Oracle, num: int, seed: int) -> None:
    """Do random operations. The pool is small, so pages are shared, copied and evicted all the time."""
    chance = random.Random(seed)
    for step in range(num):
        some = chance.randrange(len(oracle.live)) if oracle.live else None
        what = chance.choice(OPERATIONS)
        if some is None or (what == "start" and len(oracle.live) < 12):
            oracle.start([chance.randrange(2) for _ in range(chance.randint(1, 30))])
        elif what == "write":
            oracle.write(some, [chance.randrange(2) for _ in range(chance.randint(1, 9))])
        elif what == "insert_prefix":
            oracle.insert_prefix(some)
        elif what == "give_back" and oracle.window is not None:
            oracle.give_back(some)
        elif what == "fork" and len(oracle.live) < 12:
            oracle.fork(some, chance.choice([0, 1, 5, 9]))
        elif what == "truncate":
            oracle.truncate(some, chance.randint(1, 6))
        elif what == "release":
            oracle.release(some)
        if step % 50 == 0:
            oracle.check_all()
    while oracle.live:
        oracle.release(0)
    oracle.check_all()
    assert oracle.pool.num_held == 0
    pages = oracle.pool.allocate(oracle.pool.num_pages)
    assert pages is not None, "all pages can be allocated"
    oracle.pool.release(pages)
    oracle.check_all()


WINDOWS = (None, 1, 4, 7, 16)


@pytest.mark.parametrize("window", WINDOWS)
def test_random_operations_leak_no_page(window: int | None) -> None:
    operate(Oracle(40, window), 2000, 0)


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_pages", [12, 40, 400])
def test_a_hundred_thousand_operations_leak_no_page(window: int | None, num_pages: int) -> None:
    operate(Oracle(num_pages, window), 100_000, num_pages)


def test_prefix_cache_finds_what_brute_force_finds() -> None:
    """The prompts form a tree, as conversations do, and the pool holds them all."""
    chance = random.Random(1)
    oracle = Oracle(20_000)
    prompts = [[0]]
    for _ in range(400):
        begin = chance.choice(prompts)
        prompt = begin[: chance.randint(1, len(begin))] + [chance.randrange(3) for _ in range(chance.randint(1, 12))]
        prompts.append(prompt)
        oracle.start(list(prompt))
        oracle.insert_prefix(0)
        oracle.release(0)
    assert oracle.fits_all
    oracle.check_all()


def test_eviction_is_least_recently_used_first_and_leaves_before_ancestors() -> None:
    pool = PagePool(6)
    cache = PagedCache(pool, PAGE)

    def computed(tokens: list[int]) -> None:
        table = cache.start(tokens)
        assert cache.grow(table, len(tokens)) is not None
        cache.insert_prefix(table, tokens)
        cache.release(table)

    first, second = [1] * 8, [2] * 8
    computed(first)
    computed(second)
    cache.release(cache.start([*first, 0]))  # the first was used last
    taken = pool.allocate(3)
    assert taken is not None
    assert (cache.start([*second, 0]).num_tokens, cache.start([*first, 0]).num_tokens) == (4, 8)


def test_two_caches_share_one_pool() -> None:
    """Two models have pages of one size in bytes, with different numbers of tokens per page."""
    pool = PagePool(8)
    small, large = PagedCache(pool, 16), PagedCache(pool, 4)
    table, other = small.start([1]), large.start([1])
    assert small.grow(table, 64) == [] and large.grow(other, 16) == []
    assert large.grow(other, 17) is None
    small.release(table)
    assert large.grow(other, 17) == [] and pool.num_held == 5


def test_a_pool_without_pages_is_an_error() -> None:
    with pytest.raises(InferenceError, match="holds nothing"):
        PagePool(0)


# -- on the device ---------------------------------------------------------------------------

ROWS, LENGTH, HEADS, KV_HEADS, DIM = 3, 16, 4, 2, 8
RNG = np.random.default_rng(0)


def random_array(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def shuffled_tables(num_pages: int) -> jax.Array:
    """Page tables in random order."""
    return jnp.asarray(RNG.permutation(num_pages)[: ROWS * LENGTH // PAGE].reshape(ROWS, -1), jnp.int32)


@pytest.mark.contract
def test_paged_equals_contiguous_to_the_bit() -> None:
    """One prefill chunk for each row, then decode steps, in pages that were full of NaNs."""
    pages = kv_pages.empty_pages(20, PAGE, KV_HEADS, DIM, jnp.dtype("float32"))
    pages = kv_pages.KVPages(pages.keys.at[:].set(jnp.nan), pages.values.at[:].set(jnp.nan))
    keys = values = jnp.zeros((ROWS, LENGTH, KV_HEADS, DIM))
    tables = shuffled_tables(20)
    rows = jnp.arange(ROWS)[:, None]

    @jax.jit
    def both(pages: Any, keys: Any, values: Any, positions: Any, q: Any, k: Any, v: Any) -> Any:
        pages = kv_pages.write(pages, k, v, tables, positions)
        at = jnp.where(positions < 0, LENGTH, positions)
        keys, values = (a.at[rows, at].set(new, mode="drop") for a, new in ((keys, k), (values, v)))
        paged = kv_pages.attend(q, *kv_pages.gather(pages, tables), positions)
        return pages, keys, values, paged, kv_pages.attend(q, keys, values, positions)

    lengths = np.array([5, 1, 7])
    chunk = np.where(np.arange(7) < lengths[:, None], np.arange(7), -1)
    for positions in [chunk, *(lengths[:, None] + step for step in range(9))]:
        n = positions.shape[1]
        new = [random_array(ROWS, n, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        pages, keys, values, paged, contiguous = both(pages, keys, values, jnp.asarray(positions), *new)
        is_real = positions >= 0
        assert np.isfinite(np.asarray(paged)[is_real]).all()
        np.testing.assert_array_equal(np.asarray(paged)[is_real], np.asarray(contiguous)[is_real])


def test_attend_equals_numpy() -> None:
    """Each head is compared with NumPy's result."""
    q = random_array(1, 2, HEADS, DIM)
    k, v = random_array(1, 6, KV_HEADS, DIM), random_array(1, 6, KV_HEADS, DIM)
    got = kv_pages.attend(q, k, v, jnp.array([[3, 4]]))
    for token, position in enumerate((3, 4)):
        for head in range(HEADS):
            of = head // (HEADS // KV_HEADS)
            scores = np.asarray(k[0, : position + 1, of]) @ np.asarray(q[0, token, head]) / np.sqrt(DIM)
            weights = np.exp(scores - scores.max())
            expected = weights @ np.asarray(v[0, : position + 1, of]) / weights.sum()
            np.testing.assert_allclose(got[0, token, head], expected, rtol=1e-5, atol=1e-6)


def test_copies_read_all_sources_before_they_write() -> None:
    pages = kv_pages.KVPages(random_array(5, PAGE, KV_HEADS, DIM), random_array(5, PAGE, KV_HEADS, DIM))
    scratch = pages.scratch_page
    made = kv_pages.copy(pages, jnp.array([0, 1, scratch]), jnp.array([1, 2, scratch]))
    for before, after in zip(pages, made, strict=True):
        np.testing.assert_array_equal(after[jnp.array([0, 1, 2, 3])], before[jnp.array([0, 0, 1, 3])])


def test_a_step_copies_no_whole_pool() -> None:
    """The donated pool is written in place: nothing of its size is copied, read or allocated."""
    num_pages = 4096
    pages = kv_pages.empty_pages(num_pages, PAGE, KV_HEADS, DIM, jnp.dtype("float32"))

    def step(pages: Any, q: Any, k: Any, v: Any, tables: Any, positions: Any, copied: Any) -> Any:
        pages = kv_pages.copy(pages, *copied)
        pages = kv_pages.write(pages, k, v, tables, positions)
        return pages, kv_pages.attend(q, *kv_pages.gather(pages, tables), positions)

    q, k = random_array(ROWS, 1, HEADS, DIM), random_array(ROWS, 1, KV_HEADS, DIM)
    copied = jnp.zeros((2, 1), jnp.int32)
    compiled = (
        jax.jit(step, donate_argnums=0)
        .lower(pages, q, k, k, shuffled_tables(num_pages), jnp.full((ROWS, 1), 3), tuple(copied))
        .compile()
    )
    text = compiled.as_text() or ""
    pool = f"f32[{num_pages + 1},{PAGE},{KV_HEADS},{DIM}]"
    assert text.count("may-alias") + text.count("must-alias") >= 2, "keys and values are written in place"
    moved = [line for line in text.splitlines() if f"= {pool}" in line and (" copy(" in line or " select(" in line)]
    assert not moved, moved[:2]
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < pages.keys.nbytes / 4
