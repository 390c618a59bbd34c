"""Allocate, share and evict the pages of the KV cache by reference counts.

In: the number of pages. Out: `PagePool`. A page is a number. All pages have the same size in bytes and the pool does not
know their contents, so the caches of several models can share one pool. A page is in one of three states:

- free: its contents are not needed;
- held: at least one sequence refers to it; its reference count is the number of those sequences;
- evictable: no sequence refers to it, but a prefix cache can still find it. It is evicted when no page is free.

The owner of a prefix cache must keep two invariants: a sequence that holds a cached page also holds the ancestors of this
page, and it releases the ancestors last. Then the least recently used evictable page is always a leaf of the prefix
tree, and eviction needs no search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autopar.errors import InferenceError

#: Called with a cached page when the pool evicts it.
OnEvict = Callable[[int], None]


class PagePool:
    """Pages `0 .. num_pages - 1`. The cost of a call does not grow with the number of pages.

    Args:
        num_pages: the size of the pool, at least 1.

    Raises:
        InferenceError: `num_pages` is less than 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise InferenceError(
                f"a KV cache of {num_pages} pages holds nothing: leave it more memory, or make pages smaller"
            )
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._on_evict: dict[int, OnEvict] = {}  # of each cached page
        self._evictable: dict[int, None] = {}  # least recently used first: dicts keep their order

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """The number of pages that can be allocated: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def references(self, page: int) -> int:
        """The reference count of a page."""
        return self._references[page]

    def is_writable(self, page: int) -> bool:
        """Whether one sequence alone refers to the page, and no prefix cache does."""
        return self._references[page] == 1 and page not in self._on_evict

    def claim(self, num: int) -> None:
        """Say that so many pages are lacking. Without effect: all pages are of one model, or of models without quotas."""

    def allocate(self, num: int) -> list[int] | None:
        """Allocate pages with a reference count of 1; None, without a change, if fewer than `num` are available."""
        if num > self.num_available:
            return None
        while len(self._free) < num:
            self._evict()
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page. The pages are held or evictable."""
        for page in pages:
            assert self._references[page] or page in self._evictable, f"page {page} is free and cannot be shared"
            self._evictable.pop(page, None)
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page, the last page first: later pages of a sequence are evicted earlier."""
        for page in reversed(list(pages)):
            assert self._references[page], f"page {page} is released but not held"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._on_evict:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def mark_cached(self, page: int, on_evict: OnEvict) -> None:
        """Make a held page evictable, not free, once its last reference is dropped.

        Args:
            on_evict: called with the page when it is evicted.
        """
        assert self._references[page], f"page {page} is not held"
        assert page not in self._on_evict, f"page {page} is already cached"
        self._on_evict[page] = on_evict

    def forget(self, pages: Iterable[int]) -> None:
        """Take cached pages out of their prefix cache, which calls this: those that no sequence refers to are free."""
        for page in pages:
            del self._on_evict[page]
            if page in self._evictable:
                del self._evictable[page]
                self._free.append(page)

    def _evict(self) -> None:
        page = next(iter(self._evictable))
        del self._evictable[page]
        self._on_evict.pop(page)(page)
        self._free.append(page)

    def check(self) -> None:
        """Assert that every page is in exactly one state. For tests: the cost grows with the pool."""
        held = {page for page, references in enumerate(self._references) if references}
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(evictable) + len(held) == self.num_pages == len(free | evictable | held)
        assert evictable == self._on_evict.keys() - held, "a page is evictable if it is cached and not held"
        assert min(self._references) >= 0
