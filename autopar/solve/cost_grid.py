"""Round costs to multiples of one power of two, so that the search adds, subtracts and compares them exactly.

In: a `Problem`. Out: a `Gridded`, whose costs are all multiples of one power of two. The costs of every node and edge
are first shifted so that their minimum is 0, and the sum of the minima goes to the first node. The costs that a cheap
assignment adds up are then small and exact, however large the costs that it avoids. Float64 holds 2^53 steps of the
grid: costs above `ceiling` may be rounded, so bounds are capped there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from autopar.solve.problem import Problem

_FINE, _GUESSED = 50, 46  # binary digits below the optimum's size, where that size is known or only guessed
_MOST = 52  # binary digits that sums may take
_FARTHEST = 2.0**200  # steps: the largest finite cost, instead of an overflow


@dataclass(frozen=True, slots=True)
class Gridded:
    """A problem on a grid.

    Args:
        problem: the problem, with costs on the grid.
        error: largest difference between an assignment's cost and its original cost, in seconds.
        ceiling: largest valid bound, in seconds; sums above it may be rounded.
        whole: whether every original cost is an integer.
        least: the sum of the minima of all nodes and edges; no assignment is cheaper.
    """

    problem: Problem
    error: float
    ceiling: float
    whole: bool
    least: float


def on_grid(problem: Problem, cost: float | None = None) -> Gridded:
    """Round a problem's costs to a grid.

    Args:
        cost: the cost of a known assignment, in seconds. Without one the optimum's size is guessed: too low a guess
            lowers `ceiling`, too high a guess raises `error`.
    """
    tables = {id(e.costs): e.costs for e in problem.edges}
    arrays = [*problem.node_costs, *tables.values()]
    sizes = [a.size for a in arrays]
    flat = np.concatenate([np.zeros(0), *(a.ravel() for a in arrays)])  # one array is faster than many small ones
    whole = bool((np.floor(flat) == flat).all())
    leasts = [_least(a) for a in arrays]
    of_table = dict(zip(tables, leasts[len(problem.node_costs) :], strict=True))
    base = math.fsum([*leasts[: len(problem.node_costs)], *(of_table[id(e.costs)] for e in problem.edges)])
    flat -= np.repeat(leasts, np.array(sizes, int))
    terms = sum(len(c) > 1 for c in problem.node_costs) + sum(e.costs.size > 1 for e in problem.edges)
    size = abs(base) + (_typical(flat) * max(1, terms) if cost is None else abs(cost - base))
    step = _power(size, _GUESSED if cost is None else _FINE)
    if whole and size < 2.0 ** (_MOST - 1):
        step = 1.0
    exact = whole and step <= 1.0
    flat, ends = _rounded(flat, step), np.cumsum(sizes).tolist()
    rounded = [flat[end - a.size : end].reshape(a.shape) for end, a in zip(ends, arrays, strict=True)]
    nodes = rounded[: len(problem.node_costs)]
    tables = dict(zip(tables, rounded[len(nodes) :], strict=True))
    if nodes:
        nodes[0] = nodes[0] + np.round(base / step) * step
    return Gridded(
        replace(
            problem,
            node_costs=tuple(nodes),
            edges=tuple(replace(e, costs=tables[id(e.costs)]) for e in problem.edges),
        ),
        error=0.0 if exact else step * (terms + 1),
        ceiling=base + step * 2.0**_MOST,
        whole=whole,
        least=base,
    )


def _least(costs: np.ndarray) -> float:
    least = float(costs.min(initial=np.inf))
    return least if math.isfinite(least) else 0.0


def _typical(costs: np.ndarray) -> float:
    """The median of the positive finite costs."""
    costs = costs[(costs > 0.0) & (costs < np.inf)]
    return float(np.median(costs)) if len(costs) else 0.0


def _power(size: float, digits: int) -> float:
    """The power of two that lies `digits` binary digits below a size."""
    return max(math.ldexp(1.0, math.frexp(size)[1] - digits), 2.0**-1000) if 0.0 < size < math.inf else 1.0


def _rounded(costs: np.ndarray, step: float) -> np.ndarray:
    with np.errstate(over="ignore"):
        steps = np.where(np.isinf(costs), np.inf, np.minimum(np.round(costs / step), _FARTHEST))
    return steps * step
