"""Divide a memory budget: what an index needs in memory, what a search works with, and a cache for the rest.

In: a budget; for each way to store the index, what it keeps in memory and how many pages a query then reads; how often
pages are read. Out: the way and the cache for which a query reads the fewest pages from the file.

Codes, centroids and an entry graph reduce the pages that a query wants; a cache reduces how many of these are read. A
cache of C pages holds at best the C pages that are read most; an LRU cache, by Che's approximation (2002), a page of
rate p with probability 1 - exp(-p t), where t is such that these sum to C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import SearchError
from autopar.vector_search.on_disk.pages import PAGE_BYTES


class InMemory(NamedTuple):
    """One way to store an index.

    Args:
        name: what is in memory.
        num_bytes: bytes of it.
        pages: pages that a query wants.
    """

    name: str
    num_bytes: int
    pages: float = 1.0


class Division(NamedTuple):
    """How a budget is divided.

    Args:
        stored: the way to store the index.
        working_bytes: what a search works with.
        cache_pages: pages of the cache; 0: no cache.
        hit_rate: share of the wanted pages that the best cache of this size has; 0 if how often pages are read is
            unknown.
    """

    stored: InMemory
    working_bytes: int
    cache_pages: int
    hit_rate: float


def divided(
    budget_bytes: float,
    ways: Sequence[InMemory],
    working_bytes: int,
    num_pages: int,
    rates: NDArray[np.floating] | None = None,
) -> Division:
    """Divide a budget so that a query reads the fewest pages.

    Args:
        num_pages: pages of the file.
        rates: how often each page is read, in any unit, of all pages or of a sample; None: unknown.

    Raises:
        SearchError: the budget does not hold what the smallest way needs.
    """
    found: list[Division] = []
    for way in ways:
        left = budget_bytes - way.num_bytes - working_bytes
        if left < 0:
            continue
        pages = int(min(num_pages, left // (PAGE_BYTES + 128)))  # and what the cache knows of a page
        found.append(Division(way, working_bytes, pages, 0.0 if rates is None else best_hit_rate(rates, pages)))
    if not found:
        least = min(ways, key=lambda way: way.num_bytes)
        raise SearchError(
            f"`memory_budget_bytes` is {budget_bytes:,.0f}: {least.name} needs {least.num_bytes:,}, and a search"
            f" {working_bytes:,} more. Give at least {least.num_bytes + working_bytes:,}"
        )
    return min(found, key=lambda each: (each.stored.pages * (1 - each.hit_rate), -each.cache_pages))


def best_hit_rate(rates: NDArray[np.floating], num_pages: int) -> float:
    """The share of reads that the most read pages have.

    >>> round(best_hit_rate(1 / np.arange(1, 1001), 100), 3)
    0.693
    """
    total = float(rates.sum())
    return float(np.sort(rates)[::-1][:num_pages].sum()) / total if total else 0.0


def lru_hit_rate(rates: NDArray[np.floating], num_pages: int) -> float:
    """The hit rate of an LRU cache, by Che's approximation.

    >>> round(lru_hit_rate(1 / np.arange(1, 1001), 100), 4)
    0.5765
    """
    if num_pages >= len(rates):
        return 1.0
    shares = rates / rates.sum()
    low, high = 0.0, 1.0
    while (1 - np.exp(-shares * high)).sum() < num_pages:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - np.exp(-shares * middle)).sum() < num_pages else (low, middle)
    return float((shares * (1 - np.exp(-shares * high))).sum())
