"""Number the partitions of a node's strategies into classes: equal partitions get equal numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Partitions:
    """A growing list of distinct partitions.

    `labels[p]` is the class of each strategy, `counts[p]` the number of classes, `first[p]` the first strategy of
    each class. Classes are numbered by their first strategy.
    """

    def __init__(self) -> None:
        self.labels: list[np.ndarray] = []
        self.counts: list[int] = []
        self.first: list[np.ndarray] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._refinements: dict[tuple[int, int], int] = {}

    def number(self, labels: Sequence[int] | Sequence[tuple[int, int]]) -> int:
        """The number of the partition whose classes are the strategies with equal labels."""
        classes: dict[int | tuple[int, int], int] = {}
        canonical = tuple([classes.setdefault(x, len(classes)) for x in labels])
        if canonical not in self._numbers:
            self._numbers[canonical] = len(self.labels)
            self.labels.append(np.array(canonical, int))
            self.counts.append(len(classes))
            self.first.append(np.unique(self.labels[-1], return_index=True)[1])
        return self._numbers[canonical]

    def refine(self, a: int, b: int) -> int:
        """The number of the common refinement: a class holds strategies that share a class in both."""
        if a == b:
            return a
        key = (a, b) if a < b else (b, a)
        if key not in self._refinements:
            pairs = list(zip(self.labels[a].tolist(), self.labels[b].tolist(), strict=True))
            self._refinements[key] = self.number(pairs)
        return self._refinements[key]
