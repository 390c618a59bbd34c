"""Simulate a piece with the collectives that reshard what it sends and receives.

In: the figures of a planned stage, and its `Passed` values. Out: `added_s`, the seconds that they add to a piece. Most of
them wait for all of it or are waited for, but a piece with a whole backward pass sends a gradient before it is done with
its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.device_program import Buffer, Op
from autopar.pipeline.search.estimates import StageFigures


@dataclass(frozen=True, slots=True)
class Passed:
    """A value that a piece reshards before it sends it, or before it reads it.

    Args:
        value: its number inside the microbatch loop.
        collectives: kind, mesh axes and payload of each.
    """

    value: int
    is_sent: bool
    collectives: tuple[tuple[str, tuple[str, ...], float], ...]


def added_s(figures: StageFigures, phases: Sequence[str], passed: Sequence[Passed]) -> float:
    """The seconds that these values add to the piece of some phases."""
    ops, buffers = figures.ops_of(*phases), list(figures.candidate.parts.device.buffers)
    alone = figures.timeline_of(ops, buffers).step_time_s if ops else 0.0
    for one in passed:
        ops = _with(one, figures, ops, buffers)
    return max(0.0, figures.timeline_of(ops, buffers).step_time_s - alone)


def _with(one: Passed, figures: StageFigures, ops: Sequence[Op], buffers: list[Buffer]) -> list[Op]:
    """Operations with the collectives of a value, whose buffers are added."""
    entering = figures.layout.trace.producers.get(one.value, -1)
    if one.is_sent:
        written = (b for op in reversed(ops) for b in op.writes if b >= 0 and buffers[b].value == one.value)
    else:
        device = figures.candidate.parts.device
        written = (b for op in device.ops if op.node == entering and op.kind == "border" for b in op.writes)
    source, added = next(written, -1), list[Op]()
    node = figures.layout.loop.exit[0] if one.is_sent else entering  # outside the stage's own loops
    for kind, axes, payload_bytes in one.collectives:
        buffers.append(Buffer(payload_bytes, one.value, moved=True))
        reads = (source,) if source >= 0 or added else ()
        source = len(buffers) - 1
        moved = Op("collective", node, reads, (source,), read_bytes=0.0, written_bytes=0.0)
        added.append(replace(moved, collective=kind, axes=axes, payload_bytes=payload_bytes))
    if one.is_sent or not added:
        return [*ops, *added]
    before = added[0].reads
    return [*added, *(replace(op, reads=tuple(source if b in before else b for b in op.reads)) for op in ops)]
