"""From a formulation and an assignment to the program of one device.

In: what the planner decided. Out: `DeviceProgram`: laid out (`lowering`), fused (`fusion`), and with a buffer for
every value that is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.hardware import HardwareProfile
from autopar.cost.kernels import column_blocks, cycles
from autopar.device_program import Buffer, DeviceProgram, Op, OpKind
from autopar.formulation import Formulation
from autopar.fusion import Fused, fuse
from autopar.lowering import Instruction, LocalProgram, local_program

_SMALL_BYTES = 256 * 1024


def device_program(f: Formulation, choices: Sequence[int], profile: HardwareProfile) -> DeviceProgram:
    """The program of one device under an assignment.

    Args:
        choices: of each decision, its strategy.
    """
    local = local_program(f, choices)
    return _Builder(local, fuse(local, profile), profile).build()


class _Builder:
    """Gives every value in memory a buffer. What writes in place shares its first operand's, if nothing reads
    that later."""

    def __init__(self, local: LocalProgram, kernels: Sequence[Fused], profile: HardwareProfile) -> None:
        self.instructions, self.kernels = local.instructions, kernels
        self.estimator = profile.xla_estimator
        self.order_of_outputs = [at for at in local.outputs if at is not None]
        self.outputs = set(self.order_of_outputs)
        self.written = {root for kernel in kernels for root in kernel.roots}
        self.last_read = {operand: n for n, kernel in enumerate(kernels) for operand in kernel.operands}
        self.buffers: list[Buffer] = []
        self.buffer_of: dict[int, int] = {}

    def build(self) -> DeviceProgram:
        for at in dict.fromkeys(at for at in self.order_of_outputs if at in self.written):
            self._own_buffer(at)
        for at, one in enumerate(self.instructions):
            if one.kind == "argument":
                self._own_buffer(at)
        ops = []
        for n, kernel in enumerate(self.kernels):
            for root in kernel.roots:
                if root in self.outputs:
                    continue
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
        moved = bool(one.collective) or one.primitive == "cut"
        self.buffers.append(Buffer(one.num_bytes, one.value, one.kind == "argument", at in self.outputs, moved))

    def _shared_with(self, root: int, n: int) -> int | None:
        one = self.instructions[root]
        if one.kind != "inplace" or root in self.outputs:
            return None
        first = next(iter(one.operands))
        free = first in self.written and first not in self.outputs and self.last_read.get(first) == n
        return first if free and self.instructions[first].num_bytes == one.num_bytes else None

    def _op(self, kernel: Fused) -> Op:
        one = self.instructions[kernel.roots[0]]
        first = again = small = 0.0
        for operand, times in kernel.operands.items():
            size = self.instructions[operand].num_bytes
            first += size * min(times, 1.0)
            if size < _SMALL_BYTES:
                small += size * max(times - 1.0, 0.0)
            else:
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
            broadcast_bytes=small,
            written_bytes=written,
            flops=self._flops(kernel),
            num_nodes=len(kernel.members),
            gemm=one.gemm,
            dtype=one.dtype,
            collective=one.collective,
            axes=one.axes,
            payload_bytes=one.payload_bytes,
            combinable=one.combinable,
            unpriced=kernel.tiled or (one.kind == "hero" and one.gemm is None),
            num_blocks=self._num_blocks(kernel),
        )

    def _num_blocks(self, kernel: Fused) -> float:
        """Of a sum down columns, which may run in few thread blocks; else 0."""
        sums = [one for root in kernel.roots if (one := self.instructions[root]).kind == "reduce"]
        if not sums or not sums[0].columns or kernel.tiled:
            return 0.0
        one = sums[0]
        sizes = [self.instructions[o] for o in kernel.operands if self.instructions[o].elements > 1.0]
        itemsize = min((i.num_bytes / i.elements for i in sizes), default=4.0)
        return column_blocks(one.reduces, one.columns, max(itemsize, 1.0), max(one.elements / one.columns, 1.0))

    def _flops(self, kernel: Fused) -> float:
        if self.estimator is None:
            return kernel.flops
        total = 0.0
        for member in kernel.members:
            one = self.instructions[member]
            if one.flops:
                total += one.elements * one.reduces * cycles(one.primitive, one.dtype, self.estimator)
        return total


def _kind(one: Instruction) -> OpKind:
    if one.kind == "collective":
        return "collective"
    if one.gemm is not None:
        return "gemm"
    if one.primitive == "conv_general_dilated":
        return "convolution"
    return "other" if one.kind == "hero" else "fusion"
