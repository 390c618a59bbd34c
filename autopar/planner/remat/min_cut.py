"""What to keep from the forward to the backward pass, and what to compute again: a minimum cut.

    minimise    sum_v price * bytes_v * keep_v + seconds_v * again_v
    subject to  keep_v or again_v       for every v that the backward pass reads
                keep_u or again_u       for every u that some v with again_v = 1 reads

In: numbers of one segment, and what a byte is worth. Out: what is computed again, at the least sum. `again` and
`there = keep or again` are the sides of a cut: an arc is cut from `there` to `again` where a value is kept, and from
`again` to the sink where it is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: A cut's arcs have whole capacities.
_RESOLUTION = 1e9


@dataclass(frozen=True, slots=True)
class Step:
    """What one equation makes: what it takes to keep it, and to make it again; `inf` where that cannot be.

    Args:
        reads: other steps, by key.
    """

    num_bytes: float
    seconds: float
    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class States:
    """A choice: the steps that run again, and those whose results are kept."""

    again: frozenset[int]
    kept: frozenset[int]


def cheapest(steps: Mapping[int, Step], needed: Collection[int], seconds_per_byte: float) -> States:
    """The least sum of seconds and of bytes at a price.

    Args:
        steps: by key. needed: those that the backward pass reads.
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
        # A tie is kept: what costs nothing to hold is not computed again.
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
    """Whether nothing reads what is neither kept nor computed again."""
    there = states.again | states.kept
    return set(needed) <= there and all(set(steps[key].reads) <= there for key in states.again)
