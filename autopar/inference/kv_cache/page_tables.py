"""The pages of each sequence: where its next tokens go, what it shares, and what must be copied before it writes.

In: a pool, and sequences as tokens. Out: `PageTable`, one for each sequence, made and changed by `PagedCache`, which
is the cache of one model on the host. Several may stand on one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.inference.kv_cache.page_pool import PagePool
from autopar.inference.kv_cache.prefix_tree import PrefixTree


class Copy(NamedTuple):
    """A page whose contents are to be copied to another before anything else is done on the device."""

    source: int
    target: int


@dataclass(eq=False, slots=True)
class PageTable:
    """Token `t` of a sequence lies in `pages[t // page_size]`, at `t % page_size`.

    Args:
        pages: in order.
        num_tokens: there is room for; those of them that are computed, the scheduler knows.
        num_kept: pages that are in the prefix tree.
    """

    pages: list[int]
    num_tokens: int = 0
    num_kept: int = 0


class PagedCache:
    """The cache of one model.

    Args:
        pool: whose pages are taken.
        page_size: tokens of a page.
        shares_prefixes: whether prefixes that other sequences have computed are found again.
    """

    def __init__(self, pool: PagePool, page_size: int, *, shares_prefixes: bool = True) -> None:
        self.pool = pool
        self.page_size = page_size
        self._tree = PrefixTree(pool, page_size) if shares_prefixes else None

    @property
    def shares_prefixes(self) -> bool:
        return self._tree is not None

    def num_pages(self, num_tokens: int) -> int:
        """That hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def start(self, tokens: Sequence[int]) -> PageTable:
        """The table of a new sequence: with the pages of its longest prefix that is there.

        At least one token is left to be computed, for the logits that follow it.
        """
        pages = self._tree.match(tokens[: len(tokens) - 1]) if self._tree and tokens else []
        return PageTable(pages, len(pages) * self.page_size, len(pages))

    def num_common(self, tokens: list[int], others: list[int], first: int) -> int:
        """How many tokens of a new sequence are worth sharing with another, where `first`, in whole pages, can be had
        without: all but the last, which is left for the logits that follow it; else those in whole pages."""
        num, most, size = first, len(tokens) - 1, self.page_size
        while num + size <= most and tokens[num : num + size] == others[num : num + size]:
            num += size
        if num + size > most and tokens[num:most] == others[num:most]:
            num = most
        return num if num > first and tokens[:first] == others[:first] else first

    def num_needed(self, table: PageTable, num_tokens: int) -> int:
        """Pages that `grow` would take."""
        more = max(0, self.num_pages(num_tokens) - len(table.pages))
        return more + len(self._to_copy(table, num_tokens))

    def grow(self, table: PageTable, num_tokens: int) -> list[Copy] | None:
        """Make room for tokens up to a number, in pages that nobody else reads.

        Returns:
            what is to be copied first; None, and nothing is changed, where there are too few pages.
        """
        to_copy = self._to_copy(table, num_tokens)
        taken = self.pool.take(self.num_needed(table, num_tokens))
        if taken is None:
            return None
        copies = [Copy(table.pages[i], target) for i, target in zip(to_copy, taken, strict=False)]
        for i, copy in zip(to_copy, copies, strict=True):
            table.pages[i] = copy.target
        self.pool.give_back(copy.source for copy in copies)
        table.pages += taken[len(copies) :]
        table.num_tokens = max(table.num_tokens, num_tokens)
        return copies

    def cut(self, table: PageTable, num_tokens: int) -> None:
        """Give back the room behind a number of tokens, such as that of proposals that were not accepted."""
        assert num_tokens >= table.num_kept * self.page_size, "what others may find is not taken back"
        last = self.num_pages(num_tokens)
        self.pool.give_back(table.pages[last:])
        del table.pages[last:]
        table.num_tokens = min(table.num_tokens, num_tokens)

    def keep(self, table: PageTable, tokens: Sequence[int]) -> None:
        """Let others find the whole pages of the tokens of a sequence, all of them computed."""
        if self._tree is None or len(tokens) // self.page_size <= table.num_kept:
            return
        table.num_kept = self._tree.insert(tokens, table.pages, table.num_kept)

    def fork(self, table: PageTable, num_tokens: int) -> PageTable:
        """A second sequence that begins with the same tokens, so many of them, in the same pages."""
        assert num_tokens <= table.num_tokens, "a fork shares what is there"
        pages = table.pages[: self.num_pages(num_tokens)]
        self.pool.share(pages)
        return PageTable(pages, num_tokens, min(table.num_kept, num_tokens // self.page_size))

    def end(self, table: PageTable) -> None:
        """Give all back. What `keep` was told stays findable until its page is needed."""
        self.pool.give_back(table.pages)
        table.pages, table.num_tokens, table.num_kept = [], 0, 0

    def _to_copy(self, table: PageTable, num_tokens: int) -> list[int]:
        """Which of its pages are to be written, but read by others too: at most the last, where it is not full."""
        if num_tokens <= table.num_tokens:
            return []
        written = range(table.num_tokens // self.page_size, len(table.pages))
        return [i for i in written if not self.pool.is_writable(table.pages[i])]
