"""A cache of 100 of 1,000 lists, each of one page, read by Zipf's law with exponent 1; 100,000 reads, three random seeds.

The hit rate is that of the second half. Then the lists change places at random: 90 % of the hit rate is regained when the
mean of 500 reads reaches it. A scan reads all lists once, in order; the hit rate of the 1,000 reads after it is compared
with the one before. LRU is simulated beside; Che's approximation for it is 0.5765, and no cache without knowledge of the
future that keeps the same lists is above 0.693.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from autopar.vector_search.on_disk.memory_division import best_hit_rate, lru_hit_rate
from autopar.vector_search.on_disk.page_cache import PageCache

Row = dict[str, Any]

NUM_LISTS, CACHED, READS, SEEDS = 1_000, 100, 100_000, (21, 22, 23)


def measure(reads: int = READS) -> list[Row]:
    """One row for each figure and seed."""
    rates = 1 / np.arange(1, NUM_LISTS + 1)
    che, rows = lru_hit_rate(rates, CACHED), []
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        drawn = lambda num, draw=draw: draw.choice(NUM_LISTS, num, p=rates / rates.sum())  # noqa: E731
        before, after = drawn(reads), draw.permutation(NUM_LISTS)[drawn(reads // 2)]
        lru = float(_lru(before)[reads // 2 :].mean())
        cache = PageCache(CACHED, NUM_LISTS, page_bytes=1)
        hit = float(_ours(cache, before)[reads // 2 :].mean())
        shifted = _ours(cache, after)
        last = float(shifted[-reads // 4 :].mean())
        regained = next(
            (at + 500 for at in range(0, len(shifted) - 500, 50) if shifted[at : at + 500].mean() >= 0.9 * hit), reads
        )
        _ours(cache, np.arange(NUM_LISTS))
        lost = last - float(_ours(cache, after[-1_000:]).mean())
        figures = [
            ("hit rate of LRU", lru, f"{che:.4f} within 0.01", abs(lru - che) <= 0.01),
            ("hit rate", hit, 0.67, hit >= 0.67),
            ("bound of the hit rate", best_hit_rate(rates, CACHED), "", ""),
            ("reads until 90 % are regained after a shift", regained, 5_000, regained <= 5_000),
            ("hit rate lost by a scan of all lists", lost, 0.05, lost < 0.05),
        ]
        rows += [
            {"case": f"Zipf 1.0, seed {seed}", "figure": figure, "measured": measured, "gate": gate, "met": met}
            for figure, measured, gate, met in figures
        ]
    return rows


def _ours(cache: PageCache, trace: np.ndarray) -> np.ndarray:
    """Whether each read is a hit."""
    hits = np.zeros(len(trace), bool)
    for at, which in enumerate(trace):
        page = np.array([which], np.int64)
        hits[at] = cache.find(page)[0] >= 0
        if not hits[at]:
            cache.offer(page, np.zeros((1, 1), np.uint8))
    return hits


def _lru(trace: np.ndarray) -> np.ndarray:
    held: OrderedDict[int, None] = OrderedDict()
    hits = np.zeros(len(trace), bool)
    for at, which in enumerate(trace.tolist()):
        hits[at] = which in held
        held[which] = None
        held.move_to_end(which)
        if len(held) > CACHED:
            held.popitem(last=False)
    return hits
