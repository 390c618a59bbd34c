"""Which instructions become one kernel: XLA's priority fusion on GPUs, in outline.

In: a `LocalProgram`. Out: for each instruction that remains a kernel, what is fused into it and what it reads.

XLA fuses a producer into all its readers or into none, the most profitable first; a producer that is read by
something that cannot be fused with (a matrix product, a collective, an output of the step) is written to memory.
The profit is priced by a roofline with XLA's constants, so that an expensive function of a large value with
several readers is computed once, and a cheap one in each reader. Source: openxla/xla,
xla/backends/gpu/transforms/priority_fusion.cc and xla/service/gpu/model/gpu_performance_model_base.cc, read in
November 2026.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from autopar.cost.hardware import HardwareProfile
from autopar.lowering import LocalProgram

_LAUNCH_S = 1e-6  # what XLA charges a kernel when it weighs a fusion
_PARALLEL = 0.95  # how much of the shorter of arithmetic and traffic the longer one hides
_CACHE_SPEEDUP = 2.5  # of reading again what fits the second-level cache
_CACHE_BYTES = 50e6
_MOST_OPERANDS = 96
_LARGE_REDUCTION = 16  # elements to one; smaller ones are emitted like any loop
_MOST_COPIES = 16.0  # of one instruction's code within one kernel


@dataclass(slots=True)
class Fused:
    """One kernel: `root` is the instruction it is named for.

    Args:
        operands: positions of instructions in memory, with how often each of their elements is read.
        members: all instructions it computes.
    """

    root: int
    operands: dict[int, float]
    flops: float
    members: list[int]
    reduces: bool


def fuse(program: LocalProgram, profile: HardwareProfile) -> dict[int, Fused]:
    """Kernels by the position of their root, in program order; arguments are not among them."""
    return _Fusion(program, profile).run()


class _Fusion:
    def __init__(self, program: LocalProgram, profile: HardwareProfile) -> None:
        self.instructions = program.instructions
        self.rate, self.bandwidth = profile.vector_flops_per_s, profile.hbm_bytes_per_s
        self.kernels: dict[int, Fused] = {}
        self.users: list[set[int]] = [set() for _ in program.instructions]
        self.outputs = {at for at in program.outputs if at is not None}
        for i, one in enumerate(program.instructions):
            if one.kind == "argument":
                continue
            reduces = one.kind == "reduce" and one.reduces >= _LARGE_REDUCTION
            self.kernels[i] = Fused(i, dict(one.operands), one.flops, [i], reduces)
            for operand in one.operands:
                self.users[operand].add(i)
        self._drop_dead()
        self.times: dict[int, float] = {}
        self.version = [0] * len(program.instructions)
        self.heap: list[tuple[float, int, int]] = []

    def run(self) -> dict[int, Fused]:
        for i in self.kernels:
            self._push(i)
        while self.heap:
            _, i, version = heapq.heappop(self.heap)
            if i in self.kernels and version == self.version[i]:
                self._fuse(i)
        return dict(sorted(self.kernels.items()))

    def _drop_dead(self) -> None:
        for i in reversed(range(len(self.instructions))):
            if i in self.kernels and not self.users[i] and i not in self.outputs:
                for operand in self.kernels[i].operands:
                    self.users[operand].discard(i)
                del self.kernels[i]

    # -- prices ------------------------------------------------------------------------------

    def _read_s(self, operand: int, times: float) -> float:
        size = self.instructions[operand].num_bytes
        total = size * times
        first = min(size, total)
        again = self.bandwidth * (_CACHE_SPEEDUP if first < _CACHE_BYTES else 1.0)
        return first / self.bandwidth + (total - first) / again

    def _time(self, flops: float, operands: dict[int, float], written: float) -> float:
        arithmetic = flops / self.rate
        traffic = sum(self._read_s(o, times) for o, times in operands.items()) + written / self.bandwidth
        return arithmetic + traffic - _PARALLEL * min(arithmetic, traffic)

    def _own_time(self, i: int) -> float:
        if i not in self.times:
            k = self.kernels[i]
            self.times[i] = self._time(k.flops, k.operands, self.instructions[i].num_bytes)
        return self.times[i]

    def _merged(self, i: int, j: int) -> tuple[float, dict[int, float]]:
        """Arithmetic and reads of kernel j with i computed inside it."""
        producer, consumer = self.kernels[i], self.kernels[j]
        times = consumer.operands[i]
        operands = {o: t for o, t in consumer.operands.items() if o != i}
        for operand, read in producer.operands.items():
            read *= times
            # Read at the same place by both, it is read once.
            operands[operand] = max(operands.get(operand, 0.0), read)
        return consumer.flops + producer.flops * times, operands

    def _priority(self, i: int) -> float | None:
        """Seconds saved by fusing a producer into all its readers; None where it may not be."""
        readers = self.users[i]
        if not readers or i in self.outputs or not all(self._may_fuse(i, j) for j in readers):
            return None
        saved = _LAUNCH_S + self._own_time(i)
        for j in readers:
            flops, operands = self._merged(i, j)
            saved += self._own_time(j) - self._time(flops, operands, self.instructions[j].num_bytes)
        return saved

    def _may_fuse(self, i: int, j: int) -> bool:
        producer, consumer = self.instructions[i], self.instructions[j]
        if producer.kind not in ("loop", "reduce") or consumer.kind not in ("loop", "reduce", "inplace"):
            return False
        if consumer.kind == "inplace" and next(iter(consumer.operands)) == i:
            return False
        if self.kernels[i].reduces:  # what follows a reduction is a kernel of its own
            return False
        return len(self.kernels[i].operands) + len(self.kernels[j].operands) <= _MOST_OPERANDS

    # -- fusing ------------------------------------------------------------------------------

    def _push(self, i: int) -> None:
        self.version[i] += 1
        if i not in self.kernels or self.instructions[i].kind not in ("loop", "reduce"):
            return
        priority = self._priority(i)
        if priority is not None and priority >= 0.0:
            heapq.heappush(self.heap, (-priority, i, self.version[i]))

    def _fuse(self, i: int) -> None:
        producer = self.kernels[i]
        changed = set(producer.operands)
        readers = list(self.users[i])
        for j in readers:
            consumer = self.kernels[j]
            consumer.flops, consumer.operands = self._merged(i, j)
            consumer.reduces |= producer.reduces
            consumer.members += producer.members
            self.times.pop(j, None)
            changed |= set(consumer.operands)
            for operand in producer.operands:
                self.users[operand].add(j)
        for operand in producer.operands:
            self.users[operand].discard(i)
        self.users[i] = set()
        del self.kernels[i]
        for operand in changed:
            self._push(operand)
        for j in readers:
            self._push(j)
