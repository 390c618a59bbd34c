"""Keep what workers have done since their last clocks, and what is counted of their reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import jax

from autopar.versions.consistency.board import Board
from autopar.versions.server_update import Update


@dataclass(slots=True)
class Progress:
    """For each worker.

    Args:
        opened: the number of its iteration, and what it pushed in it.
        before: what it pulled at the start of its period: arrays and versions of their shards, by key.
        staleness: how often it read with the slowest worker how many clocks behind.
        waits_s: the seconds for which its pulls waited.
    """

    opened: list[tuple[int, Update]]
    before: list[dict[str, tuple[jax.Array, dict[int, int]]]]
    staleness: list[Counter[int]]
    waits_s: list[float]

    @classmethod
    def of(cls, workers: int) -> Progress:
        """Of workers that have done nothing."""
        numbers = range(workers)
        return cls([(0, {})] * workers, [{} for _ in numbers], [Counter() for _ in numbers], [0.0] * workers)

    def note(self, worker: int, board: Board, wait_s: float) -> None:
        """A worker reads; its first read in a clock counts for its staleness."""
        self.waits_s[worker] += wait_s
        if not board.has_read[worker]:
            self.staleness[worker][board.clocks.staleness(worker)] += 1
