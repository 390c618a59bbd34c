"""Store edge cost matrices with equal rows and equal columns kept once.

Many strategies of a node produce or need the same sharding of the tensor that an edge carries, so their rows of
the cost matrix are equal. A `Table` keeps the distinct rows and columns (`core`) and the class of each strategy. It is
exact: `core[rows][:, cols]` is the matrix. The classes keep dominance, elimination and the integer programme small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Table:
    """Cost of a pair of strategies: `core[rows[s], cols[t]]`.

    Args:
        rows: class of each strategy of the first node, int[strategies].
        cols: class of each strategy of the second node, int[strategies].
        core: cost per pair of classes, float[row classes, column classes].
    """

    rows: np.ndarray
    cols: np.ndarray
    core: np.ndarray

    @staticmethod
    def of(costs: np.ndarray) -> Table:
        """The table of a full matrix."""
        rows, cols = costs.shape
        return Table(np.arange(rows), np.arange(cols), costs).compact()

    def dense(self) -> np.ndarray:
        """The full matrix, float[strategies, strategies]."""
        return self.core[self.rows[:, None], self.cols]

    def transposed(self) -> Table:
        """The table with its two nodes swapped."""
        return Table(self.cols, self.rows, self.core.T)

    def take(self, rows: np.ndarray) -> Table:
        """The table restricted to the strategies at positions `rows` of the first node."""
        return Table(self.rows[rows], self.cols, self.core).compact()

    def compact(self) -> Table:
        """The table without unused classes and with equal classes merged."""
        rows, core = _distinct(self.rows, self.core)
        cols, core = _distinct(self.cols, core.T)
        return Table(rows, cols, core.T)

    def plus(self, other: Table) -> Table:
        """The sum of two tables of the same pair of nodes."""
        rows, row_pick = joint(self.rows, other.rows)
        cols, col_pick = joint(self.cols, other.cols)
        core = self.core[self.rows[row_pick][:, None], self.cols[col_pick]]
        core = core + other.core[other.rows[row_pick][:, None], other.cols[col_pick]]
        return Table(rows, cols, core).compact()

    def normalised(self) -> tuple[Table, np.ndarray, np.ndarray]:
        """Shift every row and column to minimum 0: the table, and the amounts subtracted from either node's strategies.

        A class without a finite partner keeps its `inf` entries; the amount subtracted from its strategies is `inf`.
        """
        row_least, col_least = self.core.min(axis=1), self.core.min(axis=0)
        if not row_least.any() and not col_least.any():
            return self, row_least[self.rows], col_least[self.cols]
        core = self.core - np.where(np.isinf(row_least), 0.0, row_least)[:, None]
        col_least = core.min(axis=0)
        core = core - np.where(np.isinf(col_least), 0.0, col_least)
        # Set differences of rounding size to 0, so that equal costs stay equal.
        core[np.isfinite(core) & (core <= 1e-15 * np.abs(self.core))] = 0.0
        table = Table(self.rows, self.cols, core).compact()
        return table, row_least[self.rows], col_least[self.cols]

    def is_zero(self) -> bool:
        """Whether every cost is 0: after `normalised`, such a table can be dropped."""
        return not self.core.any()


def joint(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The common refinement of two labellings: the labels, and one strategy of each class."""
    keys = first * (int(second.max()) + 1) + second
    _, pick, labels = np.unique(keys, return_index=True, return_inverse=True)
    return labels.reshape(-1), pick


def _distinct(labels: np.ndarray, core: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge equal rows of `core` and drop the rows that no label uses."""
    core = np.ascontiguousarray(core) + 0.0  # -0.0 becomes 0.0: rows are compared by their bytes
    data, width = core.tobytes(), core.shape[1] * core.itemsize
    used = np.zeros(len(core), bool)
    used[labels] = True
    first: dict[bytes, int] = {}
    new = np.zeros(len(core), labels.dtype)
    pick: list[int] = []
    for row in np.flatnonzero(used).tolist():
        key = data[row * width : (row + 1) * width]
        if key not in first:
            first[key] = len(pick)
            pick.append(row)
        new[row] = first[key]
    if len(pick) == len(core):
        return labels, core
    return new[labels], core[pick]
