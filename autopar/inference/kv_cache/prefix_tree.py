"""Find the pages of computed prefixes by their tokens: the prefix cache, as a radix tree.

In: tokens, and the pages with their keys and values. Out: `PrefixTree`. A node is one full page, and its key is the bytes
of its tokens. So no node is ever split, and a look-up takes one step per matching page. The pool decides which nodes are
evicted, and when (`page_pool`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.inference.kv_cache.page_pool import PagePool


def page_keys(tokens: NDArray[np.int32], page_size: int) -> list[bytes]:
    """The keys of the full pages of a sequence, in order: the bytes of the tokens of each page."""
    data, size = tokens.tobytes(), page_size * tokens.itemsize
    return [data[start : start + size] for start in range(0, len(data) - size + 1, size)]


@dataclass(eq=False, slots=True)
class _Node:
    page: int
    key: bytes
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)


class PrefixTree:
    """The cached prefixes of one model.

    Args:
        pool: the pool that owns the pages.
        page_size: tokens per page.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._root = _Node(-1, b"", None)
        self._nodes: dict[int, _Node] = {}

    def __len__(self) -> int:
        """The number of cached pages."""
        return len(self._nodes)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Find the pages of the longest cached prefix, in full pages.

        Args:
            keys: the keys of the pages (`page_keys`).
        """
        found: list[int] = []
        node = self._root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            found.append(child.page)
            node = child
        return found

    def insert(self, tokens: NDArray[np.int32], pages: list[int], first: int = 0) -> int:
        """Insert the full pages of a sequence that holds them.

        If the tree already has another page for the same prefix, the sequence switches to that page and releases its own.
        So the holder of a node holds all ancestors of the node. Insertion stops at a page that a fork also holds: a fork
        must have the same preceding pages. A later call continues there.

        Args:
            tokens: the tokens of the whole sequence, all of them computed.
            pages: the pages of the sequence; changed in place.
            first: the number of leading pages that are in the tree already.

        Returns:
            The number of leading pages that are now in the tree.
        """
        node = self._nodes[pages[first - 1]] if first else self._root
        keys = page_keys(tokens[first * self._page_size :], self._page_size)
        for i, key in enumerate(keys, first):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(pages[i], key, node)
                self._nodes[pages[i]] = child
                self._pool.mark_cached(pages[i], self._remove)
            elif child.page != pages[i]:
                if self._pool.references(pages[i]) > 1:
                    return i
                self._pool.share([child.page])
                self._pool.release([pages[i]])
                pages[i] = child.page
            node = child
        return first + len(keys)

    def _remove(self, page: int) -> None:
        node = self._nodes.pop(page)
        assert not node.children, "a page is evicted after the pages that follow it"
        assert node.parent is not None
        del node.parent.children[node.key]
