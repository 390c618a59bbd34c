"""What one device runs: the planned step as kernels and collectives, the way XLA's GPU compiler makes them.

In: built by `on_device`. Out: `DeviceProgram`: operations in the order they run, over buffers of known size. Both
predictions of a plan are read off it: the peak of memory (which buffers are live together) and
the step time (what each kernel takes, and what of the collectives no kernel hides).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: A `view` gives what it reads another name or shape, for nothing; a program may go without. A `border` is where a
#: value enters or leaves a loop or a branch: it costs nothing, and nothing is fused across it. A `loop` stands for one
#: that is scheduled by itself.
OpKind = Literal["gemm", "convolution", "fusion", "collective", "other", "view", "border", "loop"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """One matrix product on one device: `batch` times [m, k] @ [k, n], in the operands' dtype."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory on one device.

    Args:
        num_bytes: its size.
        value: the graph's value that is in it.
        argument: whether it is an argument of the step, and so held throughout.
        output: whether it leaves the step.
        moved: whether it holds the value otherwise split than it is made.
    """

    num_bytes: float
    value: int
    argument: bool = False
    output: bool = False
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel or one collective.

    Args:
        kind: what runs it.
        node: the graph's node that names it: the last one it computes.
        reads, writes: positions of buffers.
        read_bytes, written_bytes: what it moves from and to device memory (a slice reads part of a buffer).
        reread_bytes, broadcast_bytes: what it reads again, out of a cache: of large operands, and of those
            under a quarter of a MiB.
        spared_bytes: of what it writes into in place, all that it neither reads nor writes; XLA's estimator takes it
            to do both.
        flops: arithmetic outside matrix units, weighted by what an element of each operation counts as.
        matrix_flops: arithmetic inside matrix units, by the dtype that is multiplied; of a matrix product, see `gemm`.
        num_nodes: how many of the graph's nodes are fused in it.
        gemm: for a matrix product.
        collective: kind as in `cost.collectives.KINDS`, for a collective.
        axes: mesh axes of a collective.
        payload_bytes: of a collective, by the convention of `cost.collectives`.
        combinable: whether XLA merges it with its like.
        unpriced: XLA's estimator takes it for free (a Triton normalisation, a copy, a sort).
        num_blocks: thread blocks it runs in, where they are too few for the whole device; 0: enough.
    """

    kind: OpKind
    node: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    read_bytes: float
    written_bytes: float
    reread_bytes: float = 0.0
    flops: float = 0.0
    num_nodes: int = 1
    gemm: Gemm | None = None
    dtype: str = "float32"
    collective: str = ""
    axes: tuple[str, ...] = ()
    payload_bytes: float = 0.0
    combinable: bool = False
    unpriced: bool = False
    broadcast_bytes: float = 0.0
    num_blocks: float = 0.0
    spared_bytes: float = 0.0
    matrix_flops: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Trips:
    """A loop: the operations of the graph's nodes from `start` until before `stop` run so many times."""

    start: int
    stop: int
    count: float


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """The operations of one device in execution order, and the buffers they read and write.

    Attributes:
        loops: inner loops first.
        separate: per kernel to keep out of fusion with another, the nodes to compute for it alone.
        reassociated: per all-reduce that XLA makes of several by reassociation, the values they reduce.
    """

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    loops: tuple[Trips, ...] = ()
    separate: tuple[tuple[int, ...], ...] = ()
    reassociated: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """A value that is in memory from node `start` until before node `end`; what stays inside kernels never is."""

    value: int
    start: int
    end: int


def stored_values(program: DeviceProgram) -> tuple[Stored, ...]:
    """What is in memory as it is made, besides arguments and outputs, in the graph's order of nodes."""
    spans: dict[int, tuple[int, int]] = {}
    for op in program.ops:
        for buffer in (*op.reads, *op.writes):
            start, end = spans.get(buffer, (op.node, op.node))
            spans[buffer] = (min(start, op.node), max(end, op.node))
    stored = []
    for position, (start, end) in sorted(spans.items()):
        buffer = program.buffers[position]
        if not (buffer.argument or buffer.output or buffer.moved):
            stored.append(Stored(buffer.value, start, end + 1))
    return tuple(stored)


def peak_of_temporaries(program: DeviceProgram, ops: Sequence[Op] | None = None) -> float:
    """Bytes that are live besides arguments and outputs, at most; arguments as of `live_temporaries`."""
    return max(live_temporaries(program, ops), default=0.0)


def live_temporaries(program: DeviceProgram, ops: Sequence[Op] | None = None) -> list[float]:
    """Bytes that are live besides arguments and outputs while each operation runs.

    Args:
        ops: the operations in another order than the program's. They may have buffers of their own, which count
            for nothing.
    """
    ops = program.ops if ops is None else ops
    change = [0.0] * (len(ops) + 1)
    for buffer, (first, last) in _spans(program, ops).items():
        change[first] += program.buffers[buffer].num_bytes
        change[last + 1] -= program.buffers[buffer].num_bytes
    return list(itertools.accumulate(change))[:-1]


def buffers_at_peak(program: DeviceProgram, ops: Sequence[Op] | None = None) -> tuple[int, tuple[Buffer, ...]]:
    """The operation at which most is live besides arguments and outputs, and what is, the largest first; arguments as
    of `live_temporaries`."""
    ops = program.ops if ops is None else ops
    live = live_temporaries(program, ops)
    instant = max(range(len(live)), key=live.__getitem__, default=0)
    there = [program.buffers[b] for b, (first, last) in _spans(program, ops).items() if first <= instant <= last]
    return instant, tuple(sorted(there, key=lambda buffer: -buffer.num_bytes))


def _spans(program: DeviceProgram, ops: Sequence[Op]) -> dict[int, tuple[int, int]]:
    """Of each temporary buffer, the first and the last of the operations that read or write it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, op in enumerate(ops):
        for buffer in (*op.reads, *op.writes):
            first.setdefault(buffer, at)
            last[buffer] = at
    count, buffers = len(program.buffers), program.buffers
    return {
        buffer: (at, last[buffer])
        for buffer, at in first.items()
        if 0 <= buffer < count and not (buffers[buffer].argument or buffers[buffer].output)
    }
