"""Solve the dynamic program over layers, devices in line, and stages.

    start[k, P, n]    least cost of layers k to the end in n stages, the first of them on place P
                      = min over l of  value[k, l, shape of P, n]  +  after[l + 1, P, n - 1]
    after[m, P, n]    least cost of layers m to the end in n stages, on places after P
                      = min over Q of  transfer[m, shape of P, shape of Q, one host?]  +  start[m, Q, n]

A place Q comes after P if it starts at P's end inside P's host, or at the start of any later host. The hosts of a group
are identical, and so are the devices of a host, so idle devices may be moved to the end of a host or form whole hosts.
The dim n has one entry if values do not depend on it. `combine` is the sum, or the maximum if the worst stage counts.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autopar.pipeline.partition.cluster import Line


class Combine(Protocol):
    """`np.add` or `np.maximum`."""

    def __call__(self, a: np.ndarray, b: np.ndarray, /) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Hops:
    """Transfer costs before each layer. Several levels forbid expensive transfers to some runs.

    Args:
        inside: cost between two shapes in one host, `inf` if forbidden; float[layers, levels, shapes, shapes].
        across: cost between two shapes in different hosts; float[layers, levels, shapes, shapes].
        level: the level that applies to a run; int[layers, layers, shapes].
    """

    inside: np.ndarray
    across: np.ndarray
    level: np.ndarray

    @staticmethod
    def free(num_layers: int, num_shapes: int) -> Hops:
        """Transfers without cost."""
        none = np.zeros((num_layers, 1, num_shapes, num_shapes))
        return Hops(none, none, np.zeros((num_layers, num_layers, num_shapes), int))


@dataclass(frozen=True, slots=True)
class Found:
    """The least cost, and its stages: first layer, last layer, place."""

    cost: float
    stages: tuple[tuple[int, int, int], ...]


def solve(
    line: Line, values: np.ndarray, hops: Hops, *, combine: Combine = np.add, num_stages: int | None = None
) -> Found | None:
    """Find the cheapest assignment of all layers to the line.

    Args:
        values: cost of a run of layers on a shape; float[layers, layers, shapes, n], `inf` if forbidden. The last dim
            counts the stages from this one to the end (0: unused), or is 1.
        num_stages: the exact number of stages; only if they are counted.

    Returns:
        None if no assignment is feasible. Ties prefer short first stages on many devices.
    """
    # Imported late: compiled loops take a moment to import, and many models have no stages.
    loops = importlib.import_module("autopar.pipeline.partition.dynamic_program_numba")
    num_layers, num_counts = len(values), values.shape[3]
    num_places, num_levels = len(line.start), hops.inside.shape[1]
    start = np.full((num_layers, num_places, num_counts), np.inf)
    after = np.full((num_layers + 1, num_levels, num_places, num_counts), np.inf)
    after[num_layers, :, :, 0] = 0.0
    pairs = line.left, line.right
    for first in reversed(range(num_layers)):
        loops.begin_at(first, values, hops.level, line.shape, combine is np.maximum, after, start[first])
        if first:
            at_host = _at_hosts(line, start[first], hops.inside.shape[2])
            for level in range(num_levels):
                sent = hops.inside[first, level], hops.across[first, level]
                best = np.full(at_host.shape, np.inf)
                loops.follow(
                    *sent, line.shape, line.next_host, *pairs, start[first], at_host, best, after[first, level]
                )
    return _trace(line, values, hops, combine, start, after, num_stages)


def _at_hosts(line: Line, start: np.ndarray, num_shapes: int) -> np.ndarray:
    """Least cost of a stage that starts at a host or a later one and of all later stages, by the stage's shape:
    float[shapes, hosts + 1, n]."""
    at_host = np.full((num_shapes, line.num_hosts + 1, start.shape[1]), np.inf)
    begins = line.host >= 0
    at_host[line.shape[begins], line.host[begins]] = start[begins]
    return np.ascontiguousarray(np.minimum.accumulate(at_host[:, ::-1], axis=1)[:, ::-1])


def _trace(
    line: Line,
    values: np.ndarray,
    hops: Hops,
    combine: Combine,
    start: np.ndarray,
    after: np.ndarray,
    num_stages: int | None,
) -> Found | None:
    """Trace back the stages of the least cost."""
    num_layers, num_counts = len(values), values.shape[3]
    counted = num_counts > 1
    counts = np.arange(num_counts) if num_stages is None else np.array([num_stages])
    begin = np.where(line.host[:, None] >= 0, start[0][:, counts], np.inf)
    least = float(begin.min(initial=np.inf))
    if not np.isfinite(least):
        return None
    place, index = (int(i) for i in np.unravel_index(int(begin.argmin()), begin.shape))
    left = int(counts[index]) if counted else 0
    first, stages = 0, []
    while True:
        shape = line.shape[place]
        own = values[first, first:, shape, left]
        level = hops.level[first, first:, shape]
        rest = after[np.arange(first + 1, num_layers + 1), level, place, left - counted]
        last = first + int(combine(own, rest).argmin())
        stages.append((first, last, place))
        if last == num_layers - 1:
            return Found(least, tuple(stages))
        level, first, left = int(hops.level[first, last, shape]), last + 1, left - counted
        place = _next_place(
            line, place, hops.inside[first, level, shape], hops.across[first, level, shape], start, first, left
        )


def _next_place(
    line: Line, place: int, inside: np.ndarray, across: np.ndarray, start: np.ndarray, first: int, left: int
) -> int:
    """The next place of the optimum, by the recurrence of `after`."""
    cost = np.full(len(line.start), np.inf)
    later = line.host >= line.next_host[place]
    cost[later] = across[line.shape[later]] + start[first, later, left]
    adjacent = line.right[line.left == place]
    cost[adjacent] = np.minimum(cost[adjacent], inside[line.shape[adjacent]] + start[first, adjacent, left])
    return int(cost.argmin())
