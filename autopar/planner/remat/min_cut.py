"""Choose which activations to keep and which to recompute, by a minimum cut.

    minimize    sum_v price * bytes_v * keep_v + seconds_v * again_v
    subject to  keep_v or again_v       for every v that the backward pass reads
                keep_u or again_u       for every u that some v with again_v = 1 reads

In: the costs of one segment, a price per byte. Out: the values to keep and to recompute at minimum cost. Each value has two
nodes in the flow network: `there` = `keep or again`, and `again`. A cut of the arc between the two keeps the value; a cut of the
arc from `again` to the sink recomputes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Arcs of the flow network have integer capacities: costs are scaled to this sum.
_RESOLUTION = 1e9


@dataclass(frozen=True, slots=True)
class Step:
    """One equation.

    Args:
        num_bytes: bytes to keep its results; `inf` where they cannot be kept.
        seconds: time to compute it again; `inf` where that is impossible.
        reads: keys of the steps whose results it reads.
    """

    num_bytes: float
    seconds: float
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class States:
    """A cut: the steps that run again, and the steps whose results are kept."""

    again: frozenset[int]
    kept: frozenset[int]


def cheapest(steps: Mapping[int, Step], needed: Collection[int], seconds_per_byte: float) -> States:
    """The cut of minimum cost: the seconds to recompute, plus the bytes to keep at a price.

    Args:
        steps: steps by key.
        needed: keys of the steps that the backward pass reads.
        seconds_per_byte: the price of memory.
    """
    from ortools.graph.python import max_flow  # noqa: PLC0415 - OR-Tools, which running a saved plan must not need

    keys = {key: 2 + 2 * i for i, key in enumerate(steps)}  # `there`; one more is `again`
    source, sink = 0, 1
    keeping = {key: seconds_per_byte * step.num_bytes for key, step in steps.items()}
    finite = [x for x in (*keeping.values(), *(s.seconds for s in steps.values())) if np.isfinite(x)]
    unit = max(sum(finite), 1e-30) / _RESOLUTION
    infinite = int(4 * _RESOLUTION)
    arcs: list[tuple[int, int, int]] = []
    for key, step in steps.items():
        there, again = keys[key], keys[key] + 1
        arcs.append((there, again, _capacity(keeping[key] / unit, infinite)))
        arcs.append((again, there, infinite))
        # On a tie the value is kept: a value that costs nothing to keep is not recomputed.
        arcs.append((again, sink, _capacity(step.seconds / unit, infinite)))
        arcs += [(again, keys[read], infinite) for read in step.reads]
    arcs += [(source, keys[key], infinite) for key in needed]
    solver = max_flow.SimpleMaxFlow()
    for tail, head, capacity in arcs:
        solver.add_arc_with_capacity(tail, head, capacity)
    assert solver.solve(source, sink) == solver.OPTIMAL
    side = set(solver.get_source_side_min_cut())
    again = frozenset(key for key, at in keys.items() if at + 1 in side)
    return States(again, frozenset(key for key, at in keys.items() if at in side) - again)


def _capacity(amount: float, infinite: int) -> int:
    return min(infinite, int(np.ceil(amount))) if np.isfinite(amount) else infinite


def check(states: States, steps: Mapping[int, Step], needed: Sequence[int]) -> bool:
    """Check that every value that is read is kept or recomputed."""
    there = states.again | states.kept
    return set(needed) <= there and all(set(steps[key].reads) <= there for key in states.again)
