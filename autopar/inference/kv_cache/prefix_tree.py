"""Prefixes that have been computed: found again by their tokens, page by page.

In: tokens and the pages that hold their keys and values. Out: `PrefixTree`. A radix tree over whole pages of tokens:
each node is one page, its key the page's tokens, so nothing has to be split when prefixes part in the middle, and a
look-up takes as many steps as pages match. Which nodes may go, and when, the pool decides (`page_pool`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.inference.kv_cache.page_pool import PagePool


@dataclass(eq=False, slots=True)
class _Node:
    page: int
    tokens: tuple[int, ...]
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class PrefixTree:
    """The prefixes of one model's cache.

    Args:
        pool: whose pages they are.
        page_size: tokens of a page.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._root = _Node(-1, (), None)
        self._nodes: dict[int, _Node] = {}

    def __len__(self) -> int:
        """Pages that are remembered."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest prefix that is remembered, in whole pages; each with one more reference."""
        found: list[int] = []
        node = self._root
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            child = node.children.get(tuple(tokens[start : start + self._page_size]))
            if child is None:
                break
            found.append(child.page)
            node = child
        self._pool.share(found)
        return found

    def insert(self, tokens: Sequence[int], pages: list[int], first: int = 0) -> int:
        """Remember the whole pages of a sequence, which holds them.

        Where another sequence's page with the same prefix is remembered already, this one gives its own back and holds
        that: so who holds a node holds all nodes above it. Not while a fork holds its page too: all who hold a page hold
        the same pages before it, and so they are remembered for all of them. It ends there then, and may be called again.

        Args:
            tokens: of the whole sequence, all of them computed.
            pages: its pages; changed in place.
            first: so many of its pages are in the tree already.

        Returns:
            how many are now.
        """
        node = self._nodes[pages[first - 1]] if first else self._root
        for i in range(first, len(tokens) // self._page_size):
            key = tuple(tokens[i * self._page_size : (i + 1) * self._page_size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(pages[i], key, node)
                self._nodes[pages[i]] = child
                self._pool.remember(pages[i], self._forget)
            elif child.page != pages[i]:
                if self._pool.references(pages[i]) > 1:
                    return i
                self._pool.share([child.page])
                self._pool.give_back([pages[i]])
                pages[i] = child.page
            node = child
        return max(first, len(tokens) // self._page_size)

    def _forget(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert not node.children, "a page is evicted before those that follow it"
        assert node.parent is not None
        del node.parent.children[node.tokens]
