"""The loops of `pipeline/partition/dynamic_program.py` and `pipeline/partition/price_tables.py`, compiled; all arrays are as there.

They are imported when the first problem is solved: `solve/numba_jit.py` says why.
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
    """Fill `start` of one layer, full of `inf`, from `after` of all later ones.

    Args:
        maximum: whether the worst stage counts, and not the sum.
        start: float[places, n]. after: float[layers + 1, levels, places, n].
    """
    num_layers, (num_places, num_counts) = len(values), start.shape
    counted = 1 if num_counts > 1 else 0
    most = min(num_counts, num_layers - first + 1)  # each stage has a layer at least
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
    """Fill `after` of one layer and one level, full of `inf`, from its `start`.

    Args:
        inside, across: float[shapes, shapes].
        at_host: least cost of what begins at a host, or at a later one, by its shape: float[shapes, hosts + 1, n].
        best: full of `inf`, and as large; the least cost by the shape that is left, and the host where to go on.
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
    """Of each run, the largest bound that its parts give, less a slack for each time that two runs are joined.

    Args:
        table: prices where `known`, else bounds; float[layers, layers, shapes].
        adds: whether two parts count together, else the larger one; bool[shapes].
        slack: float[shapes].
        bounds: a copy of `table`; it becomes the prices where known, else the larger of bound and what is found.
        found: that, full of 0.
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
