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
    finite: np.ndarray,
    level: np.ndarray,
    type_of: np.ndarray,
    num_later: np.ndarray,
    maximum: bool,
    after: np.ndarray,
    start: np.ndarray,
) -> None:
    """Fill `start` of one layer, initially `inf`, from `after` of all later ones.

    Args:
        finite: whether a run has a finite value; bool[layers, layers, shapes].
        type_of: the type of each shape; int[shapes].
        maximum: whether the worst stage counts instead of the sum.
        after: float[layers + 1, levels, types, states, n].
        start: float[types, states + 1, n].
    """
    num_layers, num_states, num_counts = len(values), len(num_later), start.shape[2]
    counted = 1 if num_counts > 1 else 0
    for shape in range(len(type_of)):
        best = start[type_of[shape]]
        for last in range(first, num_layers):
            if not finite[first, last, shape]:
                continue
            rest = after[last + 1, level[first, last, shape], type_of[shape]]
            if not counted:
                own = values[first, last, shape, 0]
                for state in range(num_states):
                    total = max(own, rest[state, 0]) if maximum else own + rest[state, 0]
                    best[state, 0] = min(best[state, 0], total)
                continue
            most = min(num_counts, num_layers - last + 1)  # each later stage has at least one layer
            for state in range(num_states):
                for n in range(1, min(most, num_later[state] + 2)):
                    own, more = values[first, last, shape, n], rest[state, n - 1]
                    best[state, n] = min(best[state, n], max(own, more) if maximum else own + more)


@compiled
def follow(
    inside: np.ndarray,
    across: np.ndarray,
    footprint: np.ndarray,
    states_inside: np.ndarray,
    states_across: np.ndarray,
    start: np.ndarray,
    after: np.ndarray,
) -> None:
    """Fill `after` of one layer, initially `inf`, from its `start`.

    Args:
        inside, across: float[levels, types, types].
        footprint: the footprint of each type; int[types].
        states_inside, states_across: the moves of the packing.
        after: float[levels, types, states, n].
    """
    num_levels, num_types, num_states, num_counts = after.shape
    for target in range(num_types):
        of, begun = footprint[target], start[target]
        for state in range(num_states):
            for n in range(num_counts):
                near, far = np.inf, np.inf
                for choice in range(states_inside.shape[2]):
                    near = min(near, begun[states_inside[state, of, choice], n])
                for choice in range(states_across.shape[2]):
                    far = min(far, begun[states_across[state, of, choice], n])
                if near == np.inf and far == np.inf:
                    continue
                for level in range(num_levels):
                    for source in range(num_types):
                        least = min(inside[level, source, target] + near, across[level, source, target] + far)
                        after[level, source, state, n] = min(after[level, source, state, n], least)


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
