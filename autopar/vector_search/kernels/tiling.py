"""How a corpus and queries are cut, so that a search is a few large products of matrices.

In: how many vectors, queries and devices. Out: `Tiling`, the corpus as `[steps, parts, rows, group, d]`, and `Blocks`, the
queries as `[blocks, block, d]`. A position is a place of the corpus read in that order; places at its end are empty.

There are as many parts as devices, so that the planner may give each one; and a block is so large that it may split
that instead. On a CPU a step's scores should stay in its caches: 16 million bytes of a block of 256 queries, which
is what was fastest (docs/decisions/0020-vector-search.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.vector_search.data.metrics import FEW_QUERIES

#: Vectors beside each other whose maxima over a step's rows are sorted.
_GROUP = 512

#: Rows of a step.
_ROWS = 32

#: Queries of a block, for each device.
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """A corpus as `[steps, parts, rows, group, d]`."""

    steps: int
    parts: int
    rows: int
    group: int

    @classmethod
    def of(cls, num_vectors: int, num_devices: int) -> Tiling:
        """For so many vectors and devices."""
        group = _GROUP
        while group > 8 and group * num_devices >= num_vectors:
            group //= 2
        rows = max(1, -(-num_vectors // (group * num_devices)))
        steps = max(1, round(rows / _ROWS))
        return cls(steps, num_devices, -(-rows // steps), group)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of what stands beside the vectors."""
        return self.steps, self.parts, self.rows, self.group

    @property
    def places(self) -> int:
        """Vectors that it has room for."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Queries as `[blocks, block, d]`."""

    blocks: int
    block: int

    @classmethod
    def of(cls, num_queries: int, num_devices: int) -> Blocks:
        """With room for so many queries, and at most a quarter more where there are more than 8: few numbers of queries
        then have a program of their own."""
        block = _BLOCK * num_devices
        if num_queries <= block:
            return cls(1, min(block, rounded(num_queries)))
        return cls(rounded(-(-num_queries // block)), block)

    @property
    def places(self) -> int:
        """Queries that it has room for."""
        return self.blocks * self.block

    @property
    def at_once(self) -> bool:
        """Whether they are so few that a search takes the whole corpus in one step."""
        return self.places <= FEW_QUERIES


def rounded(count: int) -> int:
    """Up to a number of three binary digits.

    >>> [rounded(n) for n in (1, 7, 9, 100, 250)]
    [1, 7, 10, 112, 256]
    """
    unit = 1 << max(0, count.bit_length() - 3)
    return -(-count // unit) * unit
