"""Tile a corpus and a batch of queries, so that a search is a few large matmuls.

In: numbers of vectors, queries and devices. Out: `Tiling`, the corpus as `[steps, parts, rows, group, d]`, and
`Blocks`, the queries as `[blocks, block, d]`. A position indexes the flattened corpus; slots at its end are padding.

There are as many parts as devices, so the planner can shard the parts; a block is large enough to be sharded instead.
The scores of one step are sized for a CPU's caches: 16 MB for a block of 256 queries was fastest
(docs/decisions/0020-vector-search.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.vector_search.data.metrics import FEW_QUERIES

#: Columns of a tile, whose maxima over the rows are sorted.
_GROUP = 512

#: Rows of a tile.
_ROWS = 32

#: Queries of a block per device.
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """The shape of a corpus, `[steps, parts, rows, group, d]`."""

    steps: int
    parts: int
    rows: int
    group: int

    @classmethod
    def of(cls, num_vectors: int, num_devices: int) -> Tiling:
        """The tiling of a corpus on a number of devices."""
        group = _GROUP
        while group > 8 and group * num_devices >= num_vectors:
            group //= 2
        rows = max(1, -(-num_vectors // (group * num_devices)))
        steps = max(1, round(rows / _ROWS))
        return cls(steps, num_devices, -(-rows // steps), group)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape without the vectors' dim."""
        return self.steps, self.parts, self.rows, self.group

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The shape of a batch of queries, `[blocks, block, d]`."""

    blocks: int
    block: int

    @classmethod
    def of(cls, num_queries: int, num_devices: int) -> Blocks:
        """Blocks for a batch, rounded up by at most a quarter above 8 queries, so that few programs serve all batch
        sizes."""
        block = _BLOCK * num_devices
        if num_queries <= block:
            return cls(1, min(block, rounded(num_queries)))
        return cls(rounded(-(-num_queries // block)), block)

    @property
    def capacity(self) -> int:
        """Number of query slots."""
        return self.blocks * self.block

    @property
    def at_once(self) -> bool:
        """Whether the batch is so small that one step scores the whole corpus."""
        return self.capacity <= FEW_QUERIES


def rounded(count: int) -> int:
    """Round up to a number with three significant binary digits.

    >>> [rounded(n) for n in (1, 7, 9, 100, 250)]
    [1, 7, 10, 112, 256]
    """
    unit = 1 << max(0, count.bit_length() - 3)
    return -(-count // unit) * unit
