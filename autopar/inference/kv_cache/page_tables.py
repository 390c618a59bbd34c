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

from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.prefix_tree import PrefixTree, page_keys


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
    """

    pages: list[int]
    num_tokens: int = 0
    num_cached_pages: int = 0


class PagedCache:
    """The page tables and the prefix cache of one model, on the host.

    Args:
        pool: the pool to allocate pages from.
        page_size: tokens per page.
        shares_prefixes: whether a new sequence reuses the pages of a prefix that another sequence has computed.
    """

    def __init__(self, pool: PagePool, page_size: int, *, shares_prefixes: bool = True) -> None:
        self.pool = pool
        self.page_size = page_size
        self._tree = PrefixTree(pool, page_size) if shares_prefixes else None

    @property
    def shares_prefixes(self) -> bool:
        return self._tree is not None

    def num_pages(self, num_tokens: int) -> int:
        """The number of pages that `num_tokens` tokens need."""
        return -(-num_tokens // self.page_size)

    def start(self, tokens: ArrayLike) -> PageTable:
        """Make the table of a new sequence, with the pages of its longest cached prefix.

        The last token is never taken from the cache: its logits are needed.
        """
        return self.start_with(page_keys(np.asarray(tokens, np.int32)[:-1], self.page_size))

    def start_with(self, keys: Sequence[bytes]) -> PageTable:
        """Make the table of a new sequence from the keys of its full pages, without its last token."""
        pages = self._tree.find(keys) if self._tree else []
        self.pool.share(pages)
        return PageTable(pages, len(pages) * self.page_size, len(pages))

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
        table.num_cached_pages = self._tree.insert(tokens, table.pages, table.num_cached_pages)

    def fork(self, table: PageTable, num_tokens: int) -> PageTable:
        """Make a second sequence that shares the pages of the first `num_tokens` tokens."""
        assert num_tokens <= table.num_tokens, "a fork shares existing pages only"
        pages = table.pages[: self.num_pages(num_tokens)]
        self.pool.share(pages)
        return PageTable(pages, num_tokens, min(table.num_cached_pages, num_tokens // self.page_size))

    def release(self, table: PageTable) -> None:
        """Release all pages of a sequence. Those in the prefix cache can be found until they are evicted."""
        self.pool.release(table.pages)
        table.pages, table.num_tokens, table.num_cached_pages = [], 0, 0

    def _shared_writes(self, table: PageTable, num_tokens: int) -> list[int]:
        """Indices of the pages to be written that others read too: at most the last page, if it is not full."""
        if num_tokens <= table.num_tokens:
            return []
        written = range(table.num_tokens // self.page_size, len(table.pages))
        return [i for i in written if not self.pool.is_writable(table.pages[i])]
