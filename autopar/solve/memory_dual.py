"""Maximise the Lagrangian dual of the memory limit, and collect good assignments on the way.

A price of lambda_t seconds per byte live at instant t replaces the limit. Elimination then solves the problem, and

    L(lambda) = min over assignments of  cost + sum_t lambda_t (load_t - limit)

bounds the cost of every assignment that fits. Cutting planes find the best prices (Kelley; dually Dantzig and
Wolfe's column generation): a small linear programme finds the cheapest mixture of known assignments that fits, and
its row duals are the next prices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.elimination import Elimination
from autopar.solve.live_instants import Instants
from autopar.solve.mip import Programme
from autopar.solve.problem import Problem

_MOST_ROUNDS = 60
_HIGH_PRICE, _HIGH_PRICE_ROUNDS = 1e3, 4  # price of memory by (cost / limit), and rounds at it
_CLOSE = 1e-7  # relative gap of the dual's two bounds that ends the search


@dataclass(frozen=True, slots=True)
class Dual:
    """The result of pricing memory.

    Args:
        bound: the largest L(lambda), in seconds; `-inf` if none was computed.
        priced_costs: node costs with memory at the best prices.
        offset: - sum_t lambda_t limit, the term that turns a priced cost into a bound.
        assignments: all assignments found.
    """

    bound: float
    priced_costs: tuple[np.ndarray, ...]
    offset: float
    assignments: tuple[tuple[int, ...], ...]


def assignments_at_high_prices(
    problem: Problem, instants: Instants, elimination: Elimination
) -> Iterator[tuple[int, ...]]:
    """Yield assignments at prices where memory dominates the cost, to find one that fits.

    Each round adds a price at the instant where the last assignment had its peak.
    """
    if not len(instants.times):
        return
    costs = [np.array(c, float) for c in problem.node_costs]
    choices, bound = elimination.solve(costs)
    price = _HIGH_PRICE * (abs(bound) or 1.0) / (abs(problem.memory_limit or 0.0) or 1.0)
    for _ in range(_HIGH_PRICE_ROUNDS):
        for usage in instants.live_at(int(instants.loads(choices).argmax())):
            costs[usage.node] = costs[usage.node] + price * usage.amounts
        choices, _ = elimination.solve(costs)
        yield choices


def price_memory(
    problem: Problem,
    instants: Instants,
    elimination: Elimination,
    seeds: Sequence[tuple[int, ...]],
    *,
    deadline: float,
) -> Dual:
    """Find good prices of memory.

    Args:
        seeds: first assignments; some mixture of them must fit.
        deadline: end of the search, by `time.monotonic`.
    """
    search = _Search(problem, instants, elimination)
    for choices in seeds:
        search.add(choices)
    for _ in range(_MOST_ROUNDS):
        mixed = search.mix()
        if mixed is None:
            break
        value, prices = mixed
        if value - search.best.bound <= _CLOSE * abs(value) or not search.price(prices) or time.monotonic() > deadline:
            break
    return search.best


class _Search:
    """The assignments found so far and the best prices."""

    def __init__(self, problem: Problem, instants: Instants, elimination: Elimination) -> None:
        assert problem.memory_limit is not None
        self.best = Dual(float("-inf"), problem.node_costs, 0.0, ())
        self._problem, self._instants, self._elimination = problem, instants, elimination
        self._limit = problem.memory_limit
        self._costs: list[float] = []
        self._loads: list[np.ndarray] = []
        self._met: dict[tuple[int, ...], None] = {}

    def add(self, choices: tuple[int, ...]) -> None:
        if choices not in self._met and np.isfinite(cost := self._problem.evaluate(choices)):
            self._met[choices] = None
            self._costs.append(cost)
            self._loads.append(self._instants.loads(choices))

    def mix(self) -> tuple[float, np.ndarray] | None:
        """The least cost of a mixture that fits, and the dual prices; None if the linear programme fails."""
        from autopar.solve.highs import solve_lp  # noqa: PLC0415 - running a saved plan must not need OR-Tools

        costs, loads = np.array(self._costs), np.array(self._loads).T  # [instants, assignments]
        unit_s, unit_bytes = float(np.abs(costs).max()) or 1.0, max(abs(self._limit), float(loads.max(initial=1.0)))
        num_rows, num_columns = 1 + len(loads), len(costs)
        matrix = np.vstack([np.ones(num_columns), loads / unit_bytes])
        rows, columns = np.nonzero(matrix)
        most = np.full(num_rows, self._limit / unit_bytes)
        least = np.full(num_rows, -np.inf)
        most[0] = least[0] = 1.0
        solved = solve_lp(
            Programme(costs / unit_s, np.zeros(num_columns, bool), rows, columns, matrix[rows, columns], least, most)
        )
        if solved is None:
            return None
        values, duals = solved
        return float(values @ costs), np.maximum(0.0, -duals[1:]) * unit_s / unit_bytes

    def price(self, prices: np.ndarray) -> bool:
        """Solve at some prices. Returns False if the assignment is already known."""
        costs = [np.array(c, float) for c in self._problem.node_costs]
        for position in np.flatnonzero(prices).tolist():
            for usage in self._instants.live_at(position):
                costs[usage.node] += prices[position] * usage.amounts
        choices, priced = self._elimination.solve(costs)
        known = len(self._met)
        self.add(choices)
        offset = -float(prices.sum()) * self._limit
        if priced + offset > self.best.bound:
            self.best = Dual(priced + offset, tuple(costs), offset, ())
        self.best = replace(self.best, assignments=tuple(self._met))
        return len(self._met) > known
