"""Share one pool of bytes between the page caches of several models, whose pages differ in size.

In: the bytes of the pool, and of each model's pages. Out: `BytePool`, and a `ModelPages` for each model, with the calls of a `PagePool`.

The bytes are divided into slabs of equal size. A slab belongs to one model at a time, which cuts it into pages; when none of them is held
or cached, the slab is free again. A page of a model is one row for each of its layers, one after the other, and its number is that of its first
row, counted from the begin of the pool in rows of this model. So page numbers mean the same to the devices whoever had the bytes before.

Each model has a quota of slabs, and borrows what others do not hold; cached prefixes that nobody uses are no obstacle. A model that has less
than its quota and lacks pages *claims* slabs. Until it has them, models over their quota get no slab that is claimed, and drain as many of
their own: they allocate nothing there, so that a slab is free when the requests in it have ended or were preempted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from autopar.errors import InferenceError
from autopar.inference.kv_cache.page_pool import OnEvict, PagePool


@dataclass(eq=False, slots=True)
class Slab:
    """A part of the pool that a model has.

    Args:
        pages: all pages that the model cuts it into. free: those that are neither held nor cached. num_held: how many are held.
    """

    number: int
    pages: range
    free: list[int] = field(default_factory=list)
    num_held: int = 0

    @property
    def num_cached(self) -> int:
        """The number of pages that are cached and not held."""
        return len(self.pages) - len(self.free) - self.num_held


class BytePool:
    """Slabs `0 .. num_slabs - 1`.

    Args:
        num_bytes: the size of the pool. slab_bytes: the size of a slab.

    Raises:
        InferenceError: there is not one slab.
    """

    def __init__(self, num_bytes: int, slab_bytes: int) -> None:
        if slab_bytes < 1 or num_bytes < slab_bytes:
            raise InferenceError(f"a pool of {num_bytes} bytes has no slab of {slab_bytes} bytes: leave it more memory")
        self.slab_bytes, self.num_slabs = slab_bytes, num_bytes // slab_bytes
        self._free = list(range(self.num_slabs - 1, -1, -1))
        self.models: list[ModelPages] = []

    @property
    def num_free(self) -> int:
        """The number of free slabs."""
        return len(self._free)

    def model(self, row_bytes: int, num_layers: int, quota: float) -> ModelPages:
        """The pages of one more model.

        Args:
            row_bytes: the bytes of one page in one layer. quota: the share of the pool that it can count on, 0 to 1.

        Raises:
            InferenceError: a slab has no room for a page, or quotas exceed the pool.
        """
        given, slabs = sum(model.quota for model in self.models), int(quota * self.num_slabs + 1e-9)
        if not 0 <= quota <= 1 or given + slabs > self.num_slabs:
            raise InferenceError(
                f"the quota is {quota:g} of the pool, and other models have {given / self.num_slabs:.0%}: give shares that add up to at"
                " most 1"
            )
        pages = ModelPages(self, row_bytes, num_layers, slabs)
        if pages.per_slab < 1:
            raise InferenceError(
                f"a page of {num_layers} layers with {row_bytes} bytes each does not fit in a slab of {self.slab_bytes} bytes: give"
                " the pool larger slabs, or a smaller page_size"
            )
        self.models.append(pages)
        return pages

    def num_takeable(self, model: ModelPages) -> int:
        """The number of slabs that a model can get now."""
        there = len(self._free) + sum(len(other.unheld) for other in self.models if other is not model)
        return max(0, min(there, model.quota - model.num_slabs), there - self.num_claimed(model))

    def num_claimed(self, model: ModelPages) -> int:
        """The number of slabs that other models claim."""
        return sum(other.num_claimed for other in self.models if other is not model)

    def take(self, model: ModelPages) -> int:
        """Take a slab for a model: a free one, or one in which another model only caches prefixes."""
        if not self._free:
            others = (other for other in self.models if other is not model and other.unheld)
            loser = max(others, key=lambda other: other.num_slabs - other.quota)
            loser.give_up(next(iter(loser.unheld)))
        return self._free.pop()

    def put_back(self, number: int) -> None:
        """A slab is free again."""
        self._free.append(number)

    def check(self) -> None:
        """Assert that every slab and every page is in exactly one state. For tests."""
        owned = [number for model in self.models for number in model.slabs]
        assert sorted([*self._free, *owned]) == list(range(self.num_slabs)), "a slab has two owners or none"
        for model in self.models:
            model.check()


class ModelPages:
    """The pages of one model in a `BytePool`; see `PagePool` for the states of a page.

    Attributes:
        quota: in slabs. slabs: those that the model has, by number. unheld: those of them without a held page.
        per_slab: the pages of a slab. num_pages: those of the whole pool.
    """

    def __init__(self, pool: BytePool, row_bytes: int, num_layers: int, quota: int) -> None:
        self.pool, self.quota = pool, quota
        self._row_bytes, self._num_layers = row_bytes, num_layers
        is_aligned = pool.slab_bytes % row_bytes == 0
        self.per_slab = (pool.slab_bytes // row_bytes - (not is_aligned)) // num_layers
        self.num_pages = self.per_slab * pool.num_slabs
        self.slabs: dict[int, Slab] = {}
        self.unheld: dict[int, None] = {}
        self._references: dict[int, int] = {}  # of held pages
        self._on_evict: dict[int, OnEvict] = {}
        self._evictable: dict[int, None] = {}  # least recently used first
        self._num_free = self._claimed = 0

    @property
    def num_slabs(self) -> int:
        return len(self.slabs)

    @property
    def num_claimed(self) -> int:
        """The number of slabs that the model claims: at most those that it lacks of its quota."""
        return max(0, min(self._claimed, self.quota - self.num_slabs))

    @property
    def num_free(self) -> int:
        """The number of pages that are free in the model's slabs, or in slabs that it can get."""
        return self._num_free + self.per_slab * self.pool.num_takeable(self)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_held(self) -> int:
        return len(self._references)

    @property
    def num_available(self) -> int:
        """The number of pages that can be allocated."""
        return self._available(self._draining())

    def _available(self, draining: Collection[int]) -> int:
        lost = sum(len(self.slabs[number].free) + self.slabs[number].num_cached for number in draining)
        return self.num_free + len(self._evictable) - lost

    def _draining(self) -> set[int]:
        """The slabs in which nothing is allocated, because other models claim them: those with the fewest held pages."""
        missing = self.pool.num_claimed(self) - self.pool.num_free
        num = min(missing, self.num_slabs - self.quota)
        if num <= 0:
            return set()
        return set(sorted(self.slabs, key=lambda number: self.slabs[number].num_held)[:num])

    def references(self, page: int) -> int:
        """The reference count of a page."""
        return self._references.get(page, 0)

    def is_writable(self, page: int) -> bool:
        """Whether one sequence alone refers to the page, and no prefix cache does."""
        return self._references.get(page) == 1 and page not in self._on_evict

    def claim(self, num: int) -> None:
        """Say that so many pages are lacking; 0 if none are."""
        self._claimed = -(-num // self.per_slab)

    def allocate(self, num: int) -> list[int] | None:
        """Allocate pages with a reference count of 1; None, without a change, if fewer than `num` are available."""
        draining = self._draining()
        if num > self._available(draining):
            return None
        pages: list[int] = []
        usable = [slab for number, slab in self.slabs.items() if slab.free and number not in draining]
        while len(pages) < num:
            # A slab of which everything cached was forgotten meanwhile has been given back.
            while usable and (self.slabs.get(usable[-1].number) is not usable[-1] or not usable[-1].free):
                usable.pop()
            if usable:
                pages.append(self._allocate_in(usable[-1]))
            elif self.pool.num_free and self.pool.num_takeable(self):
                usable.append(self._cut())
            elif (page := self._least_recent(draining)) is not None:
                usable.append(self._evict(page))
            else:
                usable.append(self._cut())
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page. The pages are held or evictable."""
        for page in pages:
            if page in self._evictable:
                del self._evictable[page]
                self._references[page] = 0
                self._hold(self._slab_of(page))
            assert page in self._references, f"page {page} is free and cannot be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page, the last page first: later pages of a sequence are evicted earlier."""
        for page in reversed(list(pages)):
            assert page in self._references, f"page {page} is released but not held"
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            slab = self._slab_of(page)
            slab.num_held -= 1
            if page in self._on_evict:
                self._evictable[page] = None
            else:
                slab.free.append(page)
                self._num_free += 1
            self._note_unheld(slab)

    def mark_cached(self, page: int, on_evict: OnEvict) -> None:
        """As `PagePool.mark_cached`."""
        assert page in self._references, f"page {page} is not held"
        assert page not in self._on_evict, f"page {page} is already cached"
        self._on_evict[page] = on_evict

    def forget(self, pages: Iterable[int]) -> None:
        """As `PagePool.forget`."""
        for page in list(pages):
            del self._on_evict[page]
            if page in self._evictable:
                self._note_unheld(self._freed(page))

    def give_up(self, number: int) -> None:
        """Evict all pages of a slab without held ones, and give it back."""
        for page in self.slabs[number].pages:
            if page in self._evictable:  # an earlier one may have taken it along
                self._note_unheld(self._evict(page))

    # -- helpers -----------------------------------------------------------------------------

    def _allocate_in(self, slab: Slab) -> int:
        page = slab.free.pop()
        self._num_free -= 1
        self._references[page] = 1
        self._hold(slab)
        return page

    def _slab_of(self, page: int) -> Slab:
        return self.slabs[page * self._row_bytes // self.pool.slab_bytes]

    def _cut(self) -> Slab:
        """Take a slab, and cut it into pages."""
        number = self.pool.take(self)
        first = -(-number * self.pool.slab_bytes // self._row_bytes)
        pages = range(first, first + self.per_slab * self._num_layers, self._num_layers)
        slab = self.slabs[number] = Slab(number, pages, list(reversed(pages)))
        self._num_free += len(pages)
        return slab

    def _hold(self, slab: Slab) -> None:
        slab.num_held += 1
        self.unheld.pop(slab.number, None)

    def _note_unheld(self, slab: Slab) -> None:
        """Note that a slab has no held page; give it back if none is cached either."""
        if slab.num_held or slab.number not in self.slabs:
            return
        if len(slab.free) == len(slab.pages):
            self._num_free -= len(slab.free)
            del self.slabs[slab.number]
            self.unheld.pop(slab.number, None)
            self.pool.put_back(slab.number)
        else:
            self.unheld[slab.number] = None

    def _least_recent(self, draining: Collection[int]) -> int | None:
        """The least recently used evictable page outside of some slabs."""
        return next((page for page in self._evictable if self._slab_of(page).number not in draining), None)

    def _evict(self, page: int) -> Slab:
        """Evict a page. Its prefix cache may forget others, which follow it."""
        slab = self._freed(page)
        self._on_evict.pop(page)(page)
        return slab

    def _freed(self, page: int) -> Slab:
        """Make an evictable page free."""
        slab = self._slab_of(page)
        del self._evictable[page]
        slab.free.append(page)
        self._num_free += 1
        return slab

    def check(self) -> None:
        """Assert that every page is in exactly one state. For tests."""
        held, evictable = set(self._references), set(self._evictable)
        assert not held & evictable and all(count > 0 for count in self._references.values())
        assert evictable == self._on_evict.keys() - held, "a page is evictable if it is cached and not held"
        free = [page for slab in self.slabs.values() for page in slab.free]
        assert len(free) == len(set(free)) == self._num_free and not set(free) & (held | evictable)
        pages = [page for slab in self.slabs.values() for page in slab.pages]
        assert sorted([*free, *held, *evictable]) == sorted(pages), "a page is lost"
        for slab in self.slabs.values():
            assert slab.num_held == len(held.intersection(slab.pages))
            assert (slab.number in self.unheld) == (slab.num_held == 0)
            assert slab.num_held or slab.num_cached, "a slab without a page in use is free"
            begin = slab.number * self.pool.slab_bytes
            rows = slab.pages[0], slab.pages[-1] + self._num_layers
            assert begin <= rows[0] * self._row_bytes and rows[1] * self._row_bytes <= begin + self.pool.slab_bytes


#: The pages of one model: all of a pool, or those that it has in a pool of bytes.
Pages = PagePool | ModelPages
