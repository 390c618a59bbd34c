"""Ways to class the strategies of a node, by number: equal labellings get equal numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Partitions:
    """A growing table of labellings.

    `labels[p]` is the class of each strategy, `counts[p]` the number of classes, `first[p]` one strategy of
    each class; classes are numbered in the order in which the strategies meet them.
    """

    def __init__(self) -> None:
        self.labels: list[np.ndarray] = []
        self.counts: list[int] = []
        self.first: list[np.ndarray] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._joined: dict[tuple[int, int], int] = {}

    def number(self, labels: Sequence[int] | Sequence[tuple[int, int]]) -> int:
        """The number of a labelling, whatever its labels are called."""
        classes: dict[int | tuple[int, int], int] = {}
        canonical = tuple([classes.setdefault(x, len(classes)) for x in labels])
        if canonical not in self._numbers:
            self._numbers[canonical] = len(self.labels)
            self.labels.append(np.array(canonical, int))
            self.counts.append(len(classes))
            self.first.append(np.unique(self.labels[-1], return_index=True)[1])
        return self._numbers[canonical]

    def join(self, a: int, b: int) -> int:
        """The classes of strategies that both labellings hold alike."""
        if a == b:
            return a
        key = (a, b) if a < b else (b, a)
        if key not in self._joined:
            pairs = list(zip(self.labels[a].tolist(), self.labels[b].tolist(), strict=True))
            self._joined[key] = self.number(pairs)
        return self._joined[key]
