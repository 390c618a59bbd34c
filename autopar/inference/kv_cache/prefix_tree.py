"""Find the pages of computed prefixes by their tokens: the prefix cache, as a radix tree.

In: tokens, and the pages with their keys and values. Out: `PrefixTree`. A node is one full page, and its key is the bytes
of its tokens. So no node is ever split, and a look-up takes one step per matching page. The pool decides which nodes are
evicted, and when (`page_pool`).

With a sliding window a sequence gives back its first pages before its last ones, so a page may be evicted before those that
follow it. Its node then stays without a page. A prefix is found if all pages in its last window are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.inference.kv_cache.byte_pool import Pages

#: In a page table: a page behind the window, which the sequence does not hold.
NO_PAGE = -1


def page_keys(tokens: NDArray[np.int32], page_size: int) -> list[bytes]:
    """The keys of the full pages of a sequence, in order: the bytes of the tokens of each page."""
    data, size = tokens.tobytes(), page_size * tokens.itemsize
    return [data[start : start + size] for start in range(0, len(data) - size + 1, size)]


@dataclass(eq=False, slots=True)
class Node:
    """A page of a prefix.

    Args:
        page: the page, or `NO_PAGE` if it has been evicted.
        is_removed: whether the node is no longer in the tree.
    """

    page: int
    key: bytes
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    is_removed: bool = False


class PrefixTree:
    """The cached prefixes of one model.

    Args:
        pool: the pool that owns the pages.
        page_size: tokens per page.
        first_needed: the function from a number of pages to the first of them that a token after them may see.
    """

    def __init__(self, pool: Pages, page_size: int, first_needed: Callable[[int], int] = lambda num_pages: 0) -> None:
        self._pool = pool
        self._page_size = page_size
        self._first_needed = first_needed
        self._has_gaps = first_needed(1 << 40) > 0
        self._root = Node(NO_PAGE, b"", None)
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        """The number of cached pages."""
        return len(self._nodes)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Find the pages of the longest cached prefix, in full pages. Those that no later token may see are `NO_PAGE`.

        Args:
            keys: the keys of the pages (`page_keys`).
        """
        found: list[int] = []
        node, longest, num_there = self._root, 0, 0
        for num, key in enumerate(keys, 1):
            child = node.children.get(key)
            if child is None:
                break
            found.append(child.page)
            num_there = num_there + 1 if child.page != NO_PAGE else 0
            if num_there >= num - self._first_found(num):
                longest = num
            node = child
        first = self._first_found(longest)
        return [NO_PAGE] * first + found[first:longest]

    def clear(self) -> None:
        """Forget all prefixes. No sequence of the model may have been started from one and still run."""
        self._pool.forget(self._nodes)
        self._nodes.clear()
        self._root = Node(NO_PAGE, b"", None)

    def _first_found(self, num: int) -> int:
        """The first page that must be there to find a prefix of `num` pages; at least the last one must."""
        return max(0, min(self._first_needed(num), num - 1))

    def insert(
        self, tokens: NDArray[np.int32], pages: list[int], first: int = 0, last: Node | None = None
    ) -> tuple[int, Node]:
        """Insert the full pages of a sequence that holds them.

        If the tree already has another page for the same prefix, the sequence switches to that page and releases its own.
        So without a window, the holder of a node holds all ancestors of the node. Insertion stops at a page that a fork also
        holds: a fork must have the same preceding pages. A later call continues there. With a window, such a page stays the
        sequence's own.

        Args:
            tokens: the tokens of the whole sequence, all of them computed.
            pages: the pages of the sequence; changed in place.
            first: the number of leading pages that are in the tree already.
            last: the node of the last of them; by default it is looked up.

        Returns:
            The number of leading pages that are now in the tree, and the node of the last.
        """
        node = last if last is not None and not last.is_removed else self._node_of(tokens, pages, first)
        keys = page_keys(tokens[first * self._page_size :], self._page_size)
        for i, key in enumerate(keys, first):
            child = self._child(node, key)
            if child.page == NO_PAGE and pages[i] != NO_PAGE:
                child.page = pages[i]
                self._nodes[pages[i]] = child
                self._pool.mark_cached(pages[i], self._remove)
            elif NO_PAGE not in (child.page, pages[i]) and child.page != pages[i]:
                if self._pool.references(pages[i]) == 1:
                    self._pool.share([child.page])
                    self._pool.release([pages[i]])
                    pages[i] = child.page
                elif not self._has_gaps:
                    return i, node
            node = child
        self._prune(node)
        return first + len(keys), node

    def _child(self, node: Node, key: bytes) -> Node:
        """The child of a key, made without a page if there is none."""
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(NO_PAGE, key, node)
        return child

    def _node_of(self, tokens: NDArray[np.int32], pages: list[int], num: int) -> Node:
        """The node of the first `num` pages of a sequence."""
        node = self._nodes.get(pages[num - 1]) if num else self._root
        if node is not None:
            return node
        node = self._root
        for key in page_keys(tokens[: num * self._page_size], self._page_size):
            node = self._child(node, key)
        return node

    def _remove(self, page: int) -> None:
        """Take a page out of the tree, and those that follow it if no prefix is found without it.

        Where models share a pool of bytes, a page may be evicted before those that follow it, which no sequence holds either.
        """
        node = self._nodes.pop(page)
        node.page = NO_PAGE
        if node.children and not self._has_gaps:
            self._pool.forget(self._cut_off(node))
        self._prune(node)

    def _cut_off(self, node: Node) -> list[int]:
        """Remove all nodes that follow one, and return their pages."""
        pages, rest = list[int](), list(node.children.values())
        node.children = {}
        while rest:
            each = rest.pop()
            rest += each.children.values()
            each.is_removed, each.children = True, {}
            pages.append(each.page)
            del self._nodes[each.page]
        return pages

    def _prune(self, node: Node) -> None:
        """Remove a node, and those before it, that lead to no page."""
        while node.page == NO_PAGE and not node.children and node.parent is not None:
            del node.parent.children[node.key]
            node.is_removed = True
            node = node.parent
