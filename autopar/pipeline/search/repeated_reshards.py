"""Find the pieces of a stage that reshard a value for themselves.

In: the operations of a stage as one program, and the phase of each. Out: `phases_of`, the phases in which each operation
runs. One program reshards a value once for all its readers, such as weights for both passes. Pieces pass a value as it is
made, so each piece with a reader reshards it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence

from autopar.cost.collectives import collective
from autopar.ir.device_program import Buffer, Op


def phases_of(
    ops: Sequence[Op], buffers: Sequence[Buffer], phase_of: Mapping[int, str], entering: Container[int]
) -> list[tuple[str, ...]]:
    """The phases of each operation; empty for one outside the microbatch loop. The input part and the weight part of a
    backward pass share what they reshard, as most schedules run them as one piece.

    Args:
        phase_of: the phase of each node in the loop.
        entering: the nodes that bring values into the loop. What is resharded there runs in each microbatch.
    """
    needed: dict[int, set[str]] = defaultdict(set)  # buffer -> the phases that read it
    found: list[tuple[str, ...]] = []
    for op in reversed(ops):
        phases = {phase_of[op.node]} if op.node in phase_of else set[str]()
        if (phases or op.node in entering) and _reshards(op, buffers):
            phases = set[str]().union(*(needed[b] for b in op.writes)) or phases
            if not phases.isdisjoint(("input", "backward")):
                phases.discard("weight")
        for b in op.reads:
            needed[b] |= phases
        found.append(tuple(sorted(phases)))
    return found[::-1]


def _reshards(op: Op, buffers: Sequence[Buffer]) -> bool:
    """Whether an operation only makes a value that it reads into another array of it. A reduction runs where the value is
    made."""
    if op.kind == "border" or (op.collective and collective(op.collective).is_sum) or not op.writes:
        return False
    read = {buffers[b].value for b in op.reads if b >= 0}
    made = [b for b in op.writes if b not in op.reads]
    return len(made) == len(op.writes) and all(b >= 0 and (buffers[b].moved or buffers[b].value in read) for b in made)
