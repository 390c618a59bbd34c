"""What one device runs: the planned step as kernels and collectives, the way XLA's GPU compiler makes them.

In: a formulation and an assignment. Out: `DeviceProgram`: operations in the order they run, over buffers of
known size. Both predictions of a plan are read off it: the peak of memory (which buffers are live together) and
the step time (what each kernel takes, and what of the collectives no kernel hides).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.cost.hardware import HardwareProfile
from autopar.formulation import Formulation
from autopar.fusion import Fused, fuse
from autopar.lowering import Gemm, Instruction, LocalProgram, local_program

OpKind = Literal["gemm", "convolution", "fusion", "collective", "other"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory on one device.

    Args:
        num_bytes: its size.
        value: the graph's value that is in it.
        argument: whether it is an argument of the step, and so held throughout.
        output: whether it leaves the step.
    """

    num_bytes: float
    value: int
    argument: bool = False
    output: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel or one collective.

    Args:
        kind: what runs it.
        node: the graph's node that names it: the last one it computes.
        reads, writes: positions of buffers.
        read_bytes, written_bytes: what it moves from and to device memory (a slice reads part of a buffer).
        reread_bytes: what it reads a second time, from a cache if it fits one.
        flops: arithmetic outside matrix units, weighted by XLA's cycles (for a convolution: inside them).
        num_nodes: how many of the graph's nodes are fused in it.
        gemm: for a matrix product.
        collective: kind as in `cost.collectives.KINDS`, for a collective.
        axes: mesh axes of a collective.
        payload_bytes: of a collective, by the convention of `cost.collectives`.
        combinable: whether XLA merges it with its like.
        unpriced: XLA's estimator takes it for free (a Triton normalisation, a copy, a sort).
        reread_bytes: what it reads again, out of a cache.
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
    reread_bytes: float = 0.0
    num_blocks: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """Operations in the order they run, and the buffers they read and write."""

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]


def device_program(f: Formulation, choices: Sequence[int], profile: HardwareProfile) -> DeviceProgram:
    """The program of one device under an assignment.

    Args:
        choices: of each decision, its strategy.
    """
    local = local_program(f, choices)
    return _Builder(local, fuse(local, profile)).build()


class _Builder:
    """Gives every value in memory a buffer. What writes in place shares its first operand's, if nothing reads
    that later."""

    def __init__(self, local: LocalProgram, kernels: Sequence[Fused]) -> None:
        self.instructions, self.kernels = local.instructions, kernels
        self.outputs = {at for at in local.outputs if at is not None}
        self.written = {root for kernel in kernels for root in kernel.roots}
        self.last_read = {operand: n for n, kernel in enumerate(kernels) for operand in kernel.operands}
        self.buffers: list[Buffer] = []
        self.buffer_of: dict[int, int] = {}

    def build(self) -> DeviceProgram:
        for at, one in enumerate(self.instructions):
            if one.kind == "argument":
                self._own_buffer(at)
        ops = []
        for n, kernel in enumerate(self.kernels):
            for root in kernel.roots:
                shared = self._shared_with(root, n)
                if shared is None:
                    self._own_buffer(root)
                else:
                    self.buffer_of[root] = self.buffer_of[shared]
            ops.append(self._op(kernel))
        return DeviceProgram(tuple(ops), tuple(self.buffers))

    def _own_buffer(self, at: int) -> None:
        one = self.instructions[at]
        self.buffer_of[at] = len(self.buffers)
        self.buffers.append(Buffer(one.num_bytes, one.value, one.kind == "argument", at in self.outputs))

    def _shared_with(self, root: int, n: int) -> int | None:
        one = self.instructions[root]
        if one.kind != "inplace" or root in self.outputs:
            return None
        first = next(iter(one.operands))
        free = first in self.written and first not in self.outputs and self.last_read.get(first) == n
        return first if free and self.instructions[first].num_bytes == one.num_bytes else None

    def _op(self, kernel: Fused) -> Op:
        one = self.instructions[kernel.roots[0]]
        first = again = 0.0
        for operand, times in kernel.operands.items():
            size = self.instructions[operand].num_bytes
            first += size * min(times, 1.0)
            again += size * max(times - 1.0, 0.0)
        written = sum(self.instructions[root].num_bytes for root in kernel.roots)
        if one.kind == "inplace":  # reads and writes what it changes, not the whole
            target = next(iter(one.operands))
            first -= min(self.instructions[target].num_bytes, first)
            written = min(written, 2 * first)
        return Op(
            kind=_kind(one),
            node=one.node,
            reads=tuple(self.buffer_of[o] for o in kernel.operands),
            writes=tuple(self.buffer_of[root] for root in kernel.roots),
            read_bytes=first,
            reread_bytes=again,
            written_bytes=written,
            flops=kernel.flops,
            num_nodes=len(kernel.members),
            gemm=one.gemm,
            dtype=one.dtype,
            collective=one.collective,
            axes=one.axes,
            payload_bytes=one.payload_bytes,
            combinable=one.combinable,
        )


def _kind(one: Instruction) -> OpKind:
    if one.kind == "collective":
        return "collective"
    if one.gemm is not None:
        return "gemm"
    if one.primitive == "conv_general_dilated":
        return "convolution"
    return "other" if one.kind == "hero" else "fusion"


def peak_of_temporaries(program: DeviceProgram) -> float:
    """Bytes that are live besides arguments and outputs, at most."""
    change: dict[int, float] = defaultdict(float)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, op in enumerate(program.ops):
        for buffer in (*op.reads, *op.writes):
            first.setdefault(buffer, at)
            last[buffer] = at
    for buffer, at in first.items():
        one = program.buffers[buffer]
        if not one.argument and not one.output:
            change[at] += one.num_bytes
            change[last[buffer] + 1] -= one.num_bytes
    peak = live = 0.0
    for at in sorted(change):
        live += change[at]
        peak = max(peak, live)
    return peak
