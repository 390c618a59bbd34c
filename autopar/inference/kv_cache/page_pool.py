"""Who owns which page of the KV cache: the one place where pages are taken, shared and given back.

In: how many pages there are. Out: `PagePool`. A page is a number, all are of one size in bytes, and the pool does not
know what is in them; so the caches of several models can be served from one pool. At any time each page is

- free: nothing of worth is in it;
- held: one sequence or more read it, as many as it has references;
- evictable: no sequence reads it, but a prefix tree remembers what is in it, and it is taken when no page is free.

Who remembers a page must see to it that whoever holds it holds its ancestors too, and gives them back after it. Then
the page that has been evictable longest is never an ancestor of another that is remembered, and least recently used
first is also leaves first, without a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autopar.errors import InferenceError

#: What a page's rememberer is told when the page is taken from it.
Forget = Callable[[int], None]


class PagePool:
    """Pages `0 .. num_pages - 1`. No call's cost grows with their number.

    Args:
        num_pages: as many as there are.

    Raises:
        InferenceError: there is no page.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise InferenceError(
                f"a KV cache of {num_pages} pages holds nothing: leave it more memory, or make pages smaller"
            )
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._remembered: dict[int, Forget] = {}
        self._evictable: dict[int, None] = {}  # least recently used first: dicts keep their order

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def references(self, page: int) -> int:
        """How many hold it."""
        return self._references[page]

    def is_writable(self, page: int) -> bool:
        """Whether its one holder is all who will ever read it."""
        return self._references[page] == 1 and page not in self._remembered

    def take(self, num: int) -> list[int] | None:
        """Pages with one reference each, or None where there are not as many; nothing is taken then."""
        if num > self.num_available:
            return None
        while len(self._free) < num:
            self._evict()
        taken = [self._free.pop() for _ in range(num)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each; they are held, or remembered."""
        for page in pages:
            assert self._references[page] or page in self._evictable, f"page {page} is free: nobody can share it"
            self._evictable.pop(page, None)
            self._references[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One reference less to each, the last page first: what comes later in a sequence is evicted earlier."""
        for page in reversed(list(pages)):
            assert self._references[page], f"page {page} is given back by one who does not hold it"
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._remembered:
                self._evictable[page] = None
            else:
                self._free.append(page)

    def remember(self, page: int, forget: Forget) -> None:
        """What is in a held page is worth keeping when nobody holds it any more.

        Args:
            forget: called with the page when it is taken all the same.
        """
        assert self._references[page], f"page {page} is not held"
        assert page not in self._remembered, f"page {page} is remembered already"
        self._remembered[page] = forget

    def _evict(self) -> None:
        page = next(iter(self._evictable))
        del self._evictable[page]
        self._remembered.pop(page)(page)
        self._free.append(page)

    def check(self) -> None:
        """Assert that every page is free, evictable or held, and in one of these states only. For tests: its cost
        grows with the pool."""
        held = {page for page, references in enumerate(self._references) if references}
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a page is free twice"
        assert len(free) + len(evictable) + len(held) == self.num_pages == len(free | evictable | held)
        assert evictable == self._remembered.keys() - held, "a page is evictable if it is remembered and not held"
        assert min(self._references) >= 0
