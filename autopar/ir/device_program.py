"""Define the planned step on one device: the kernels and collectives that XLA's GPU compiler makes of it.

In: built by `xla_model`. Out: `DeviceProgram`: operations in the order they run, over buffers of known size. It yields
both predictions of a plan: peak memory (from the live ranges of buffers) and step time (from the time of each
kernel and the exposed communication).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

#: A `view` renames or reshapes a buffer for free (a bitcast). At a `border` a value enters or leaves a loop or a branch:
#: it is free, and nothing is fused across it. A `loop` stands for a whole loop, whose body is scheduled by itself.
OpKind = Literal["gemm", "convolution", "fusion", "collective", "other", "view", "border", "loop"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """One GEMM on one device: `batch` times [m, k] @ [k, n], in the operands' dtype.

    Args:
        aligned_bytes: for both operands and the result, the largest power of two, up to 16, that divides the bytes of a row
            in memory.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    aligned_bytes: tuple[int, int, int] = (16, 16, 16)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory on one device.

    Args:
        num_bytes: size.
        value: value of the graph that it holds.
        argument: whether it is an argument of the step, and so live throughout.
        output: whether it is an output of the step.
        moved: whether it holds the value resharded.
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
        kind: kind of operation.
        node: node of the graph that names it, the last one that it computes.
        reads, writes: positions of buffers.
        read_bytes, written_bytes: device memory traffic (a slice reads part of a buffer).
        indexed_bytes: sectors that a scatter reads and writes at once to add to them; its traffic is at least this. XLA's
            estimator does not count it.
        reread_bytes, broadcast_bytes: repeated reads from a cache, of operands above and below a quarter of a MiB.
        scattered_rows: whether its thread blocks read and write one row in each of several places.
        fills_registers: whether it holds so many values at once that a core runs few of its threads.
        recounted_bytes: further reads that XLA's cost analysis counts: from memory and from either cache.
        spared_bytes: untouched bytes of a buffer that it updates in place; XLA's estimator counts them as read and
            written.
        flops: arithmetic outside matrix units, weighted by the instructions per element of each primitive;
            `counted_flops` is that of XLA's cost analysis.
        matrix_flops: arithmetic inside matrix units by operand dtype; for a GEMM see `gemm`.
        matrix_efficiency: share of a large matmul's rate that it reaches.
        num_nodes: number of the graph's nodes that are fused in it.
        gemm: shape of a GEMM.
        collective: kind of a collective, as in `cost.collectives.KINDS`.
        axes: mesh axes of a collective.
        payload_bytes: payload of a collective, by the convention of `cost.collectives`.
        combinable: whether XLA merges it with others of its kind.
        pipelined: whether it is a collective that runs one iteration of a loop ahead.
        unpriced: whether XLA's estimator counts it as free (a Triton normalisation, a copy, a sort).
        num_blocks: number of thread blocks if too few to fill the device; 0 otherwise.
        num_launches: number of kernels that it runs as.
        overwrites: the buffers it reads in whose memory it may write a result of equal size, if nothing reads them later.
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
    pipelined: bool = False
    unpriced: bool = False
    broadcast_bytes: float = 0.0
    num_blocks: float = 0.0
    num_launches: int = 1
    spared_bytes: float = 0.0
    matrix_flops: tuple[tuple[str, float], ...] = ()
    matrix_efficiency: float = 1.0
    overwrites: tuple[int, ...] = ()
    recounted_bytes: tuple[float, float, float] = (0.0, 0.0, 0.0)
    counted_flops: float = 0.0
    scattered_rows: bool = False
    fills_registers: bool = False
    indexed_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class LoopSpan:
    """A loop with its trip count `count`: it runs the operations of the graph's nodes [start, stop).

    Args:
        first: operations before the loop that gather the weights of the first iteration, if each iteration gathers those
            of the next.
        prefetched: per array that an iteration gathers for the next, its buffer, and that of the loop's state.
    """

    start: int
    stop: int
    count: float
    first: tuple[Op, ...] = ()
    prefetched: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Reassociated:
    """A reduction over devices that XLA makes of several whose results are added.

    Args:
        kind, axes: what each of them is, and over which mesh axes.
        values: the values that they reduce.
        num_bytes: its payload, by the convention of `cost.collectives`.
    """

    kind: str
    axes: tuple[str, ...]
    values: tuple[int, ...]
    num_bytes: float


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """The operations of one device in execution order, and the buffers they read and write.

    Attributes:
        loops: inner loops first.
        separate: per kernel to keep out of fusion with another, the nodes to compute for it alone.
        reassociated: reductions that XLA makes of several by reassociation.
    """

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    loops: tuple[LoopSpan, ...] = ()
    unfused: tuple[tuple[int, ...], ...] = ()
    reassociated: tuple[Reassociated, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """A value that is in memory over the nodes [start, end); values inside kernels never are."""

    value: int
    start: int
    end: int


def stored_values(program: DeviceProgram) -> tuple[Stored, ...]:
    """The live range of each temporary in its producer's sharding, in the graph's order of nodes."""
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
    """Peak memory of temporaries in bytes; the arguments are those of `live_temporaries`."""
    return max(live_temporaries(program, ops), default=0.0)


def live_temporaries(program: DeviceProgram, ops: Sequence[Op] | None = None) -> list[float]:
    """Bytes of live temporaries (neither arguments nor outputs) while each operation runs.

    Args:
        ops: operations in another order than the program's; buffers outside the program count as empty.
    """
    ops = program.ops if ops is None else ops
    change = [0.0] * (len(ops) + 1)
    for buffer, (first, last) in _spans(program, ops).items():
        change[first] += program.buffers[buffer].num_bytes
        change[last + 1] -= program.buffers[buffer].num_bytes
    return list(itertools.accumulate(change))[:-1]


def buffers_at_peak(program: DeviceProgram, ops: Sequence[Op] | None = None) -> tuple[int, tuple[Buffer, ...]]:
    """The position of the operation at peak memory, and the temporaries live during it, largest first.

    The arguments are those of `live_temporaries`.
    """
    ops = program.ops if ops is None else ops
    live = live_temporaries(program, ops)
    instant = max(range(len(live)), key=live.__getitem__, default=0)
    there = [program.buffers[b] for b, (first, last) in _spans(program, ops).items() if first <= instant <= last]
    return instant, tuple(sorted(there, key=lambda buffer: -buffer.num_bytes))


def _spans(program: DeviceProgram, ops: Sequence[Op]) -> dict[int, tuple[int, int]]:
    """The live range of each temporary buffer: the first and the last operation that reads or writes it.

    A buffer that an operation overwrites ends before it.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    runs: dict[int, tuple[int, int]] = {}  # per operation that may overwrite: its start and its end
    for at, op in enumerate(ops):
        for buffer in (*op.reads, *op.writes):
            first.setdefault(buffer, at)
            last[buffer] = at
        if op.overwrites:
            runs[id(op)] = runs.get(id(op), (at, at))[0], at
    count, buffers = len(program.buffers), program.buffers
    spans = {
        buffer: (at, last[buffer])
        for buffer, at in first.items()
        if 0 <= buffer < count and not (buffers[buffer].argument or buffers[buffer].output)
    }
    for start, end in runs.values():
        made = [b for b in ops[start].writes if b in spans and spans[b][0] == start]
        for dying in [b for b in ops[start].overwrites if b in spans and spans[b][1] == end]:
            same = next((b for b in made if buffers[b].num_bytes == buffers[dying].num_bytes), None)
            if same is not None and spans[dying][0] < start:
                made.remove(same)
                spans[dying] = spans[dying][0], start - 1
    return spans
