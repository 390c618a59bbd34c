"""A hundred thousand random operations of three models on one pool of bytes, against an oracle that has the bytes.

The models differ in head size and in the number of layers, one of them has no quota, and the rows of two do not divide a slab. An operation
starts, grows, ends or caches a sequence. The oracle writes to the bytes of a page what depends on the model and on all tokens before, and reads it again
as long as a sequence holds the page. In the end all is released, and every slab must be free.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.inference.kv_cache.byte_pool import BytePool
from autopar.inference.kv_cache.page_tables import PagedCache, PageTable
from benchmarks.inference.rows import row

Row = dict[str, Any]
SLAB, _NUM_SLABS = 240, 20


def measure() -> list[Row]:
    counts, lost = run(100_000, seed=2)
    return [
        row("random operations", sum(counts.values())),
        *(row(f"of them: {kind}", count) for kind, count in counts.items()),
        row("pages with other bytes than were written", 0, "", at_most=0),  # the run ends at the first
        row("slabs that are lost in the end", lost, "", at_most=0),
    ]


class Model:
    """A model's cache, and what its sequences have written to the bytes of the pool.

    Args:
        row_bytes: the bytes of one page in one layer.
    """

    def __init__(
        self, number: int, pool: BytePool, memory: np.ndarray, row_bytes: int, layers: int, quota: float
    ) -> None:
        self.pages = pool.model(row_bytes, layers, quota)
        self.cache = PagedCache(self.pages, 4)
        self.sequences: list[tuple[PageTable, list[int]]] = []
        self._number, self._memory, self._row_bytes, self._layers = number, memory, row_bytes, layers

    def part(self, page: int) -> np.ndarray:
        """The bytes of a page, in all layers."""
        return self._memory[page * self._row_bytes : (page + self._layers) * self._row_bytes]

    def tag(self, tokens: Sequence[int]) -> int:
        """What a page has after these tokens: it depends on the model and on every token."""
        return hash((self._number, tuple(tokens))) % 251 + 1

    def write(self, table: PageTable, tokens: list[int], first: int) -> None:
        """Compute the tokens from one on, into pages that nobody else may have."""
        for at in range(first // 4, len(table.pages)):
            assert self.pages.is_writable(table.pages[at])
            self.part(table.pages[at])[:] = self.tag(tokens[: 4 * (at + 1)])

    def check(self) -> None:
        """Everything that a sequence reads is what was written for it."""
        for table, tokens in self.sequences:
            for at, page in enumerate(table.pages):
                assert (self.part(page) == self.tag(tokens[: 4 * (at + 1)])).all()


def act(model: Model, chance: random.Random) -> str:
    """One random operation of a model. Returns its name."""
    kind, running = chance.random(), model.sequences
    if kind < 0.35 or not running:
        stem = [chance.randrange(3) for _ in range(chance.choice([0, 4, 8, 12]))]
        tokens = stem + [chance.randrange(50) for _ in range(chance.randrange(1, 13))]
        table = model.cache.start(tokens)
        known = table.num_tokens
        fits = model.cache.num_needed(table, len(tokens)) <= model.pages.num_available
        copies = model.cache.grow(table, len(tokens))
        assert (copies is not None) == fits, "exactly what is available can be allocated"
        if copies is None:
            model.pages.claim(model.cache.num_needed(table, len(tokens)))
            model.cache.release(table)
            return "start without room"
        model.pages.claim(0)
        assert not copies, "a prefix has whole pages"
        model.write(table, tokens, known)
        running.append((table, tokens))
        return "start"
    if kind < 0.6:
        table, tokens = chance.choice(running)
        longer = [*tokens, *(chance.randrange(50) for _ in range(chance.randrange(1, 9)))]
        fits = model.cache.num_needed(table, len(longer)) <= model.pages.num_available
        copies = model.cache.grow(table, len(longer))
        assert (copies is not None) == fits
        if copies is None:
            return "grow without room"
        model.write(table, longer, len(tokens) // 4 * 4)
        tokens[:] = longer
        return "grow"
    if kind < 0.75:
        table, tokens = chance.choice(running)
        model.cache.insert_prefix(table, tokens)
        return "cache a prefix"
    if kind < 0.995:
        table, tokens = running.pop(chance.randrange(len(running)))
        if chance.random() < 0.7:
            model.cache.insert_prefix(table, tokens)
        model.cache.release(table)
        return "end"
    while running:
        model.cache.release(running.pop()[0])
    model.cache.forget_prefixes()
    return "end all and forget"


def run(num_operations: int, seed: int) -> tuple[Counter[str], int]:
    """Run random operations. Returns how many of each kind, and the slabs that are not free in the end.

    Raises:
        AssertionError: a page has other bytes than were written, two models have the same bytes, or a page is in no state or in two.
    """
    chance, counts = random.Random(seed), Counter[str]()
    pool = BytePool(_NUM_SLABS * SLAB + 7, SLAB)
    memory = np.zeros(_NUM_SLABS * SLAB + 7, np.uint8)
    sizes = [(8, 3, 0.5), (20, 2, 0.3), (7, 4, 0.0)]
    models = [Model(number, pool, memory, *each) for number, each in enumerate(sizes)]
    for number in range(num_operations):
        model = chance.choices(models, [3, 2, 1 + number // 1000 % 4])[0]
        counts[act(model, chance)] += 1
        if number % 97 == 0:
            pool.check()
            for each in models:
                each.check()
    for model in models:
        while model.sequences:
            model.cache.release(model.sequences.pop()[0])
        model.cache.forget_prefixes()
    pool.check()
    return counts, pool.num_slabs - pool.num_free
