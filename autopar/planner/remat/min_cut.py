"""Choose which activations to keep and which to recompute, by a minimum cut.

    minimize    sum_v price * bytes_v * keep_v + seconds_v * again_v
    subject to  keep_v or again_v       for every v that the backward pass reads
                keep_u or again_u       for every u that some v with again_v = 1 reads

In: costs of one segment, and a price per byte. Out: what is recomputed, at the least cost. Each value has two nodes in the
flow network, `there = keep or again` and `again`: the arc between them is cut where the value is kept, the arc from `again`
to the sink where it is recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Arcs of the flow network have integer capacities: costs are scaled to this sum.
_RESOLUTION = 1e9


@dataclass(frozen=True, slots=True)
class Step:
    """One equation: the bytes to keep its results and the seconds to compute them again; `inf` where that is impossible.

    Args:
        reads: keys of the steps that it reads.
    """

    num_bytes: float
    seconds: float
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class States:
    """A cut: the steps that run again, and those whose results are kept."""

    again: frozenset[int]
    kept: frozenset[int]


def cheapest(steps: Mapping[int, Step], needed: Collection[int], seconds_per_byte: float) -> States:
    """The cut of the least cost: seconds to recompute, and bytes kept at a price.

    Args:
        steps: the steps by key. needed: keys of the steps that the backward pass reads.
    """
    from ortools.graph.python import max_flow  # noqa: PLC0415 - OR-Tools, which running a saved plan must not need

    keys = {key: 2 + 2 * i for i, key in enumerate(steps)}  # `there`; one more is `again`
    source, sink = 0, 1
    keeping = {key: seconds_per_byte * step.num_bytes for key, step in steps.items()}
    finite = [x for x in (*keeping.values(), *(s.seconds for s in steps.values())) if np.isfinite(x)]
    unit = max(sum(finite), 1e-30) / _RESOLUTION
    endless = int(4 * _RESOLUTION)
    arcs: list[tuple[int, int, int]] = []
    for key, step in steps.items():
        there, again = keys[key], keys[key] + 1
        arcs.append((there, again, _whole(keeping[key] / unit, endless)))
        arcs.append((again, there, endless))
        # On a tie the value is kept: a value that costs nothing to keep is not recomputed.
        arcs.append((again, sink, _whole(step.seconds / unit, endless)))
        arcs += [(again, keys[read], endless) for read in step.reads]
    arcs += [(source, keys[key], endless) for key in needed]
    solver = max_flow.SimpleMaxFlow()
    for tail, head, capacity in arcs:
        solver.add_arc_with_capacity(tail, head, capacity)
    assert solver.solve(source, sink) == solver.OPTIMAL
    side = set(solver.get_source_side_min_cut())
    again = frozenset(key for key, at in keys.items() if at + 1 in side)
    return States(again, frozenset(key for key, at in keys.items() if at in side) - again)


def _whole(amount: float, endless: int) -> int:
    return min(endless, int(np.ceil(amount))) if np.isfinite(amount) else endless


def check(states: States, steps: Mapping[int, Step], needed: Sequence[int]) -> bool:
    """Check that every value that is read is kept or recomputed."""
    there = states.again | states.kept
    return set(needed) <= there and all(set(steps[key].reads) <= there for key in states.again)
