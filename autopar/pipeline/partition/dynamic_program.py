"""Solve the dynamic program over layers, free devices, and stages.

    start[k, R, t, n]   least cost of layers k to the end in n stages; the first has type t and leaves the devices R free
                        = min over l, shapes s of type t of  value[k, l, s, n]  +  after[l + 1, R, t, n - 1]
    after[m, R, t, n]   least cost of layers m to the end in n stages, after one of type t that left R free
                        = min over moves from R to S by type u of  transfer[m, t, u, same host?]  +  start[m, S, u, n]

Types are shapes without their option. The states R and the moves are those of a `Packing`. The dim n has one entry if
values do not depend on it. `combine` is the sum, or the maximum if the worst stage counts.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autopar.pipeline.partition.cluster import SubmeshShape
from autopar.pipeline.partition.packing import Footprint, Packing


class Combine(Protocol):
    """`np.add` or `np.maximum`."""

    def __call__(self, a: np.ndarray, b: np.ndarray, /) -> np.ndarray: ...


@dataclass(frozen=True, slots=True, eq=False)
class Types:
    """The shapes of submeshes without their options, by number.

    Args:
        shapes: the types.
        of: the type of each shape; int[shapes].
        footprints: the different footprints.
        footprint: the footprint of each type; int[types].
    """

    shapes: tuple[SubmeshShape, ...]
    of: np.ndarray
    footprints: tuple[Footprint, ...]
    footprint: np.ndarray

    @staticmethod
    def among(shapes: Sequence[SubmeshShape]) -> Types:
        """The types of these shapes."""
        plain = [shape.without_option for shape in shapes]
        types = tuple(dict.fromkeys(plain))
        footprints = tuple(dict.fromkeys(map(Footprint.of, types)))
        footprint = np.array([footprints.index(Footprint.of(one)) for one in types], int)
        return Types(types, np.array([types.index(one) for one in plain], int), footprints, footprint)


@dataclass(frozen=True, slots=True)
class Hops:
    """Transfer costs before each layer. Several levels forbid expensive transfers to some runs.

    Args:
        inside: cost between two types in one host, `inf` if forbidden; float[layers, levels, types, types].
        across: cost between two types in different hosts; float[layers, levels, types, types].
        level: the level that applies to a run; int[layers, layers, shapes].
    """

    inside: np.ndarray
    across: np.ndarray
    level: np.ndarray

    @staticmethod
    def free(num_layers: int, types: Types) -> Hops:
        """Transfers without cost."""
        none = np.zeros((num_layers, 1, len(types.shapes), len(types.shapes)))
        return Hops(none, none, np.zeros((num_layers, num_layers, len(types.of)), int))


@dataclass(frozen=True, slots=True)
class Found:
    """The least cost, and its stages: first layer, last layer, number of the shape."""

    cost: float
    stages: tuple[tuple[int, int, int], ...]


def solve(
    packing: Packing,
    types: Types,
    values: np.ndarray,
    hops: Hops,
    *,
    combine: Combine = np.add,
    num_stages: int | None = None,
    all_devices: bool = False,
) -> Found | None:
    """Find the cheapest stages.

    Args:
        values: cost of a run of layers on a shape; float[layers, layers, shapes, n], `inf` if forbidden. The last dim
            counts the stages from this one to the end (0: unused), or is 1.
        num_stages: the exact number of stages; only if they are counted.
        all_devices: whether no device may stay idle.

    Returns:
        None if no assignment is feasible. Ties prefer short first stages on many devices.
    """
    # Imported late: compiled loops take a moment to import, and many models have no stages.
    loops = importlib.import_module("autopar.pipeline.partition.dynamic_program_numba")
    num_layers, num_counts = len(values), values.shape[3]
    num_types, num_levels, num_states = len(types.shapes), hops.inside.shape[1], packing.num_states
    finite = np.isfinite(values).any(axis=3)
    start = np.full((num_layers, num_types, num_states + 1, num_counts), np.inf)  # the last state is none
    after = np.full((num_layers + 1, num_levels, num_types, num_states, num_counts), np.inf)
    after[num_layers][..., packing.is_full | (not all_devices), 0] = 0.0
    for first in reversed(range(num_layers)):
        maximum = combine is np.maximum
        loops.begin_at(first, values, finite, hops.level, types.of, packing.num_later, maximum, after, start[first])
        if first:
            sent = hops.inside[first], hops.across[first]
            loops.follow(*sent, types.footprint, packing.inside, packing.across, start[first], after[first])
    return _trace(packing, types, values, hops, combine, start, after, num_stages)


def _trace(
    packing: Packing,
    types: Types,
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
    every = np.arange(len(types.shapes))
    empty = packing.across[0, types.footprint]  # int[types, choices]
    begin = start[0][every[:, None, None], empty[..., None], counts]
    least = float(begin.min(initial=np.inf))
    if not np.isfinite(least):
        return None
    kind, choice, index = (int(i) for i in np.unravel_index(int(begin.argmin()), begin.shape))
    left, state = (int(counts[index]) if counted else 0), int(empty[kind, choice])
    first, stages = 0, []
    while True:
        shapes = np.flatnonzero(types.of == kind)
        own = values[first, first:, shapes, left]  # float[shapes, lasts]
        level = hops.level[first, first:, shapes]
        rest = after[np.arange(first + 1, num_layers + 1), level, kind, state, left - counted]
        total = combine(own, rest)
        best, length = (int(i) for i in np.unravel_index(int(total.argmin()), total.shape))
        last, shape = first + length, int(shapes[best])
        stages.append((first, last, shape))
        if last == num_layers - 1:
            return Found(least, tuple(stages))
        number, first, left = int(level[best, length]), last + 1, left - counted
        moves = np.concatenate([packing.inside[state], packing.across[state]], axis=1)[types.footprint]
        sent = np.where(
            np.arange(moves.shape[1]) < packing.inside.shape[2],
            hops.inside[first, number, kind][:, None],
            hops.across[first, number, kind][:, None],
        )
        total = sent + start[first][every[:, None], moves, left]
        kind, choice = (int(i) for i in np.unravel_index(int(total.argmin()), total.shape))
        state = int(moves[kind, choice])
