"""Encode a problem as a mixed integer programme, and convert assignments to and from its columns.

    minimise    sum_u sum_s c_u[s] x_u[s]  +  sum_(u,v) sum_(p,q) C_uv[p, q] y_uv[p, q]
    subject to  sum_s x_u[s] = 1                                       for every node u
                sum_q y_uv[p, q] = sum_(s in class p) x_u[s]           for every edge and class p of u
                sum_p y_uv[p, q] = sum_(t in class q) x_v[t]           for every edge and class q of v
                sum_(u live at i) sum_s m_u[s] x_u[s] <= memory limit  for some instants i
                x binary, 0 <= y <= 1

The edge columns y are the marginal (transport) linearisation: with x binary, y is 1 for the chosen pair and 0
elsewhere, and the relaxation is the tightest that considers one edge at a time. A column stands for a pair of
*classes* of strategies with equal costs on the edge (`compact_costs.py`), which is as tight and far smaller.
Forbidden choices have no column. Memory rows are passed separately, because few of them bind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.compact_costs import Table
from autopar.solve.mip import Programme
from autopar.solve.problem import Problem, Usage


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The columns of one edge: from `start`, one for each of the finite pairs (`rows`, `cols`) of classes."""

    source: int
    target: int
    table: Table
    rows: np.ndarray
    cols: np.ndarray
    start: int


class Columns:
    """The column of each strategy and of each pair of strategies in the programme."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes = np.array([len(c) for c in problem.node_costs])
        self.starts = np.concatenate(([0], np.cumsum(self.sizes)))
        self.pairs: list[_Pairs] = []
        self.count = int(self.starts[-1])
        known: dict[int, tuple[Table, np.ndarray, np.ndarray]] = {}
        for edge in problem.edges:
            if id(edge.costs) not in known:
                table = Table.of(edge.costs)
                rows, cols = np.nonzero(np.isfinite(table.core))
                known[id(edge.costs)] = (table, rows, cols)
            table, rows, cols = known[id(edge.costs)]
            self.pairs.append(_Pairs(edge.source, edge.target, table, rows, cols, self.count))
            self.count += len(rows)

    @property
    def terms(self) -> int:
        """Number of columns that an assignment sets to 1."""
        return len(self.sizes) + len(self.pairs)

    def encode(self, choices: Sequence[int]) -> np.ndarray:
        """The column values of an assignment of finite cost."""
        values = np.zeros(self.count)
        values[self.starts[:-1] + np.asarray(choices, int)] = 1.0
        for p in self.pairs:
            row, col = p.table.rows[choices[p.source]], p.table.cols[choices[p.target]]
            values[p.start + np.flatnonzero((p.rows == row) & (p.cols == col))] = 1.0
        return values

    def decode(self, values: np.ndarray) -> tuple[int, ...]:
        """The assignment that column values describe: each node's strategy with the largest value."""
        return tuple(int(values[a:b].argmax()) for a, b in zip(self.starts[:-1], self.starts[1:], strict=True))

    def memory_row(self, live: Sequence[Usage]) -> np.ndarray:
        """The memory of each column in the live usages, in bytes."""
        held = np.zeros(self.count)
        for usage in live:
            start = self.starts[usage.node]
            held[start : start + self.sizes[usage.node]] += usage.amounts
        return held

    def programme(
        self,
        *,
        costs: np.ndarray,
        memory: Sequence[tuple[np.ndarray, float]] = (),
        peak_cost: float | None = None,
    ) -> Programme:
        """The programme for the given column costs.

        Args:
            costs: cost of each column.
            memory: memory rows and their limits, scaled to limits of about 1.
            peak_cost: cost of an additional last column that raises the limit of every memory row.
        """
        rows, columns, coefficients, count = self._structure()
        extra = [] if peak_cost is None else [peak_cost]
        parts = [(rows, columns, coefficients)]
        for i, (held, _) in enumerate(memory):
            at = np.flatnonzero(held)
            parts.append((np.full(len(at), count + i), at, held[at]))
            if extra:
                parts.append((np.array([count + i]), np.array([self.count]), np.array([-1.0])))
        limits = np.array([limit for _, limit in memory])
        ones = np.zeros(count)
        ones[: len(self.sizes)] = 1.0
        integer = np.zeros(self.count + len(extra), bool)
        integer[: self.starts[-1]] = True
        return Programme(
            objective=np.concatenate((costs, extra)),
            integer=integer,
            rows=np.concatenate([p[0] for p in parts]),
            columns=np.concatenate([p[1] for p in parts]),
            coefficients=np.concatenate([p[2] for p in parts]),
            row_least=np.concatenate((ones, np.full(len(memory), -np.inf))),
            row_most=np.concatenate((ones, limits)),
        )

    def costs(self) -> np.ndarray:
        """The problem's cost of each column, in seconds."""
        parts = [*self.problem.node_costs, *(p.table.core[p.rows, p.cols] for p in self.pairs)]
        return np.concatenate(parts)

    def floors(self) -> tuple[np.ndarray, float]:
        """The minimum cost of each column's node or edge, and the sum of the minima, in seconds."""
        starts = [*self.starts[:-1].tolist(), *(p.start for p in self.pairs)]
        leasts = np.minimum.reduceat(self.costs(), starts)
        return np.repeat(leasts, np.diff([*starts, self.count])), math.fsum(leasts)

    def _structure(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """The non-zeros (rows, columns, coefficients) of all rows but the memory rows, and the number of these rows."""
        nodes = np.repeat(np.arange(len(self.sizes)), self.sizes)
        rows, columns = [nodes], [np.arange(self.starts[-1])]
        signs = [np.ones(self.starts[-1])]
        count = len(self.sizes)
        for p in self.pairs:
            own = p.start + np.arange(len(p.rows))
            for node, of_pair, of_node in ((p.source, p.rows, p.table.rows), (p.target, p.cols, p.table.cols)):
                rows += [count + of_pair, count + of_node]
                columns += [own, self.starts[node] + np.arange(len(of_node))]
                signs += [np.ones(len(own)), -np.ones(len(of_node))]
                count += int(of_node.max()) + 1
        return np.concatenate(rows), np.concatenate(columns), np.concatenate(signs), count
