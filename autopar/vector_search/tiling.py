"""How a corpus and queries are cut, so that a search is a few large products of matrices.

In: how many vectors, queries and devices. Out: `Tiling`, the corpus as `[rows, parts, group, d]`, and `Blocks`, the
queries as `[blocks, block, d]`. A position is a place of the corpus read in that order; places at its end are empty.

There are as many parts as devices, so that the planner may give each one; and a block is so large that it may split
that instead. On a CPU a step's scores should stay in its caches: 16 million bytes of a block of 256 queries, which
is what was fastest (docs/decisions/0020-vector-search.md).
"""

from __future__ import annotations

from dataclasses import dataclass

#: Vectors beside each other whose maxima over a step's rows are sorted.
_GROUP = 512

#: Rows of a step.
_STEP_ROWS = 32

#: Queries of a block, for each device.
_BLOCK = 256

#: Scores of one device for which a search takes all rows in one step: there is then nothing to copy out of the corpus.
_ONE_STEP = 2**23


@dataclass(frozen=True, slots=True)
class Tiling:
    """A corpus as `[rows, parts, group, d]`.

    Args:
        steps: that large searches take; divides the rows.
    """

    rows: int
    parts: int
    group: int
    steps: int

    @classmethod
    def of(cls, num_vectors: int, num_devices: int) -> Tiling:
        """For so many vectors and devices."""
        group = _GROUP
        while group > 8 and group * num_devices >= num_vectors:
            group //= 2
        rows = max(1, -(-num_vectors // (group * num_devices)))
        steps = max(1, round(rows / _STEP_ROWS))
        return cls(-(-rows // steps) * steps, num_devices, group, steps)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of what stands beside the vectors."""
        return self.rows, self.parts, self.group

    @property
    def places(self) -> int:
        """Vectors that it has room for."""
        return self.rows * self.parts * self.group

    def step_rows(self, blocks: Blocks) -> int:
        """Rows that a search takes at a time."""
        is_small = blocks.blocks == 1 and blocks.block * self.rows * self.group <= _ONE_STEP
        return self.rows if is_small else self.rows // self.steps


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
            return cls(1, min(block, _rounded(num_queries)))
        return cls(_rounded(-(-num_queries // block)), block)

    @property
    def places(self) -> int:
        """Queries that it has room for."""
        return self.blocks * self.block


def _rounded(count: int) -> int:
    """Up to a number of three binary digits.

    >>> [_rounded(n) for n in (1, 7, 9, 100, 250)]
    [1, 7, 10, 112, 256]
    """
    unit = 1 << max(0, count.bit_length() - 3)
    return -(-count // unit) * unit
