"""Compile the loops of `dynamic_program.py` and `price_tables.py`; the arrays are the same as there.

The module is imported when the first problem is solved; `solve/numba_jit.py` gives the reason.
"""

from __future__ import annotations

import numpy as np

from autopar.solve.numba_jit import compiled


@compiled
def begin_at(
    first: int,
    values: np.ndarray,
    level: np.ndarray,
    shape: np.ndarray,
    maximum: bool,
    after: np.ndarray,
    start: np.ndarray,
) -> None:
    """Fill `start` of one layer, initially `inf`, from `after` of all later ones.

    Args:
        maximum: whether the worst stage counts instead of the sum.
        after: float[layers + 1, levels, places, n].
        start: float[places, n].
    """
    num_layers, (num_places, num_counts) = len(values), start.shape
    counted = 1 if num_counts > 1 else 0
    most = min(num_counts, num_layers - first + 1)  # each stage has at least one layer
    for place in range(num_places):
        of = shape[place]
        for last in range(first, num_layers):
            rest = after[last + 1, level[first, last, of], place]
            for n in range(counted, most):
                own, more = values[first, last, of, n], rest[n - counted]
                start[place, n] = min(start[place, n], max(own, more) if maximum else own + more)


@compiled
def follow(
    inside: np.ndarray,
    across: np.ndarray,
    shape: np.ndarray,
    next_host: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    start: np.ndarray,
    at_host: np.ndarray,
    best: np.ndarray,
    after: np.ndarray,
) -> None:
    """Fill `after` of one layer and one level, initially `inf`, from its `start`.

    Args:
        inside, across: float[shapes, shapes].
        at_host: least cost of what starts at a host or a later one, by the shape there: float[shapes, hosts + 1, n].
        best: scratch of the same shape, initially `inf`: least cost by the previous shape and the next host.
        after: float[places, n].
    """
    num_shapes, num_hosts, num_counts = at_host.shape
    for source in range(num_shapes):
        for target in range(num_shapes):
            sent = across[source, target]
            for number in range(num_hosts):
                for n in range(num_counts):
                    best[source, number, n] = min(best[source, number, n], sent + at_host[target, number, n])
    for place in range(len(shape)):
        for n in range(num_counts):
            after[place, n] = best[shape[place], next_host[place], n]
    for pair in range(len(left)):
        one, other = left[pair], right[pair]
        sent = inside[shape[one], shape[other]]
        for n in range(num_counts):
            after[one, n] = min(after[one, n], sent + start[other, n])


@compiled
def from_shorter(
    table: np.ndarray, known: np.ndarray, adds: np.ndarray, slack: np.ndarray, bounds: np.ndarray, found: np.ndarray
) -> None:
    """For each run, compute the largest bound from splits into two runs, less a slack per split.

    Args:
        table: costs where `known`, else bounds; float[layers, layers, shapes].
        adds: whether the bounds of two parts add up, else the larger one counts; bool[shapes].
        slack: float[shapes].
        bounds: a copy of `table`; becomes the cost where known, else the larger of the bound and `found`.
        found: the result, initially 0.
    """
    num_layers, _, num_shapes = table.shape
    for first in range(num_layers - 2, -1, -1):
        for last in range(first + 1, num_layers):
            for shape in range(num_shapes):
                best = 0.0
                for cut in range(first, last):
                    one, other = bounds[first, cut, shape], bounds[cut + 1, last, shape]
                    best = max(best, (one + other if adds[shape] else max(one, other)) - slack[shape])
                found[first, last, shape] = best
                if not known[first, last, shape]:
                    bounds[first, last, shape] = max(bounds[first, last, shape], best)
