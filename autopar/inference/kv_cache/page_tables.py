"""Map the tokens of each sequence to pages of the KV cache: allocation, prefix sharing, copy-on-write.

In: a page pool, and the tokens of sequences. Out: one `PageTable` (block table) for each sequence. `PagedCache` makes and
changes the tables of one model; several caches can share one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from autopar.inference.kv_cache.byte_pool import Pages
from autopar.inference.kv_cache.prefix_tree import NO_PAGE, Node, PrefixTree, page_keys


class Copy(NamedTuple):
    """A copy-on-write: the device copies page `source` to page `target` before its next write."""

    source: int
    target: int


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of one sequence: token `t` is in `pages[t // page_size]`, at offset `t % page_size`.

    Args:
        pages: page numbers, in the order of the tokens.
        num_tokens: the number of tokens that the pages have room for. The scheduler knows how many are computed.
        num_cached_pages: the number of leading pages that are in the prefix cache.
        num_given_back: the number of leading pages behind the window, which the sequence no longer holds (`NO_PAGE`).
        last_cached: the node of the last page in the prefix cache, if it is known.
    """

    pages: list[int]
    num_tokens: int = 0
    num_cached_pages: int = 0
    num_given_back: int = 0
    last_cached: Node | None = None

    @property
    def held(self) -> list[int]:
        """The pages that the sequence holds."""
        return self.pages[self.num_given_back :]


class PagedCache:
    """The page tables and the prefix cache of one model, on the host.

    Args:
        pool: the pool to allocate pages from.
        page_size: tokens per page.
        shares_prefixes: whether a new sequence reuses the pages of a prefix that another sequence has computed.
        window: the tokens that any token may see, itself included; None is all before it. Pages behind it are given back.
    """

    def __init__(self, pool: Pages, page_size: int, *, shares_prefixes: bool = True, window: int | None = None) -> None:
        self.pool = pool
        self.page_size = page_size
        self.window = window
        tree = PrefixTree(pool, page_size, lambda num_pages: self.first_needed(num_pages * page_size))
        self._tree = tree if shares_prefixes else None

    @property
    def shares_prefixes(self) -> bool:
        return self._tree is not None

    def num_pages(self, num_tokens: int) -> int:
        """The number of pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.page_size)

    def first_needed(self, num_tokens: int) -> int:
        """The first page that the tokens after the first `num_tokens` may see."""
        return 0 if self.window is None else max(0, num_tokens - self.window + 1) // self.page_size

    def most_held(self, num_tokens: int, num_ahead: int) -> int:
        """The number of pages that a sequence of `num_tokens` tokens holds at most.

        Args:
            num_ahead: the tokens that it has room for before pages behind the window are given back.
        """
        return most_held(num_tokens, self.page_size, self.window, num_ahead)

    def start(self, tokens: ArrayLike) -> PageTable:
        """Make the table of a new sequence, with the pages of its longest cached prefix.

        The last token is never taken from the cache: its logits are needed.
        """
        return self.start_with(page_keys(np.asarray(tokens, np.int32)[:-1], self.page_size))

    def start_with(self, keys: Sequence[bytes]) -> PageTable:
        """Make the table of a new sequence from the keys of its full pages, without its last token."""
        pages = self._tree.find(keys) if self._tree else []
        first = pages.count(NO_PAGE)
        self.pool.share(pages[first:])
        return PageTable(pages, len(pages) * self.page_size, len(pages), first)

    def num_cached(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages that are in the prefix cache."""
        return len(self._tree.find(keys)) if self._tree else 0

    def num_needed(self, table: PageTable, num_tokens: int) -> int:
        """The number of pages that `grow` allocates."""
        more = max(0, self.num_pages(num_tokens) - len(table.pages))
        return more + len(self._shared_writes(table, num_tokens))

    def grow(self, table: PageTable, num_tokens: int) -> list[Copy] | None:
        """Make room for `num_tokens` tokens in all. Pages to be written are copied if another sequence reads them.

        Returns:
            The copies that the device must do first; None, without a change, if too few pages are available.
        """
        shared = self._shared_writes(table, num_tokens)
        new = self.pool.allocate(self.num_needed(table, num_tokens))
        if new is None:
            return None
        copies = [Copy(table.pages[i], target) for i, target in zip(shared, new, strict=False)]
        for i, copy in zip(shared, copies, strict=True):
            table.pages[i] = copy.target
        self.pool.release(copy.source for copy in copies)
        table.pages += new[len(copies) :]
        table.num_tokens = max(table.num_tokens, num_tokens)
        return copies

    def truncate(self, table: PageTable, num_tokens: int) -> None:
        """Release the pages past `num_tokens` tokens, such as those of rejected draft tokens."""
        assert num_tokens >= table.num_cached_pages * self.page_size, "pages in the prefix cache cannot be truncated"
        last = self.num_pages(num_tokens)
        self.pool.release(table.pages[last:])
        del table.pages[last:]
        table.num_tokens = min(table.num_tokens, num_tokens)

    def insert_prefix(self, table: PageTable, tokens: ArrayLike) -> None:
        """Insert the full pages of a sequence into the prefix cache.

        Args:
            tokens: the tokens of the sequence, all of them computed.
        """
        tokens = np.asarray(tokens, np.int32)
        if self._tree is None or len(tokens) // self.page_size <= table.num_cached_pages:
            return
        table.num_cached_pages, table.last_cached = self._tree.insert(
            tokens, table.pages, table.num_cached_pages, table.last_cached
        )

    def give_back(self, table: PageTable, num_tokens: int) -> None:
        """Release the pages that no token after the first `num_tokens` may see.

        Args:
            num_tokens: the number of tokens that are computed, and stay.
        """
        first = self.first_needed(num_tokens)
        if first > table.num_given_back:
            behind = slice(table.num_given_back, first)
            self.pool.release(table.pages[behind])
            table.pages[behind] = [NO_PAGE] * (first - table.num_given_back)
            table.num_given_back = first

    def can_fork(self, table: PageTable, num_tokens: int) -> bool:
        """Whether a sequence still holds the pages that a fork of its first `num_tokens` tokens needs."""
        return table.num_given_back <= self.first_needed(num_tokens)

    def fork(self, table: PageTable, num_tokens: int) -> PageTable:
        """Make a second sequence that shares the pages of the first `num_tokens` tokens."""
        assert num_tokens <= table.num_tokens, "a fork shares existing pages only"
        assert self.can_fork(table, num_tokens), "a fork needs the pages in its window"
        first, num = self.first_needed(num_tokens), self.num_pages(num_tokens)
        shared = table.pages[first:num]
        self.pool.share(shared)
        num_cached = min(table.num_cached_pages, num_tokens // self.page_size)
        return PageTable([NO_PAGE] * first + shared, num_tokens, num_cached, first)

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes, such as those that other weights have computed, and what pages lack. No sequence may run."""
        if self._tree is not None:
            self._tree.clear()
        self.pool.claim(0)

    def release(self, table: PageTable) -> None:
        """Release all pages of a sequence. Those in the prefix cache can be found until they are evicted."""
        self.pool.release(table.held)
        table.pages, table.num_tokens, table.num_cached_pages = [], 0, 0
        table.num_given_back, table.last_cached = 0, None

    def _shared_writes(self, table: PageTable, num_tokens: int) -> list[int]:
        """Indices of the pages to be written that others read too: at most the last page, if it is not full."""
        if num_tokens <= table.num_tokens:
            return []
        written = range(table.num_tokens // self.page_size, len(table.pages))
        return [i for i in written if not self.pool.is_writable(table.pages[i])]


def most_held(num_tokens: int, page_size: int, window: int | None, num_ahead: int) -> int:
    """The number of pages that a sequence holds at most; see `PagedCache.most_held`.

    >>> most_held(1000, 16, None, 0), most_held(1000, 16, 100, 20)
    (63, 9)
    """
    needed = -(-num_tokens // page_size)
    return needed if window is None else min(needed, -(-(window + num_ahead) // page_size) + 1)
