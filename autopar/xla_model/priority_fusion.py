"""Which instructions become one kernel: XLA's priority fusion on GPUs, in outline.

In: `Kernels`. Out: the same, fewer: of each, what is fused into it and what it reads.

XLA fuses a producer into all its readers or into none, the most profitable first; a producer that is read by
something that cannot be fused with (a matrix product, a collective, an output of the step) is written to memory.
The profit is priced by a roofline with XLA's constants, so that an expensive function of a large value with
several readers is computed once, and a cheap one in each reader. Source: openxla/xla,
xla/backends/gpu/transforms/priority_fusion.cc, read in November 2026.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from autopar.cost.hardware_profile import HardwareProfile
from autopar.xla_model.kernels import LAUNCH_S, MOST_OPERANDS, Fused, KernelPrice, Kernels, is_tiled, num_blocks


class PriorityFusion:
    """Fuses producers into readers, the most profitable first."""

    def __init__(self, kernels: Kernels, profile: HardwareProfile) -> None:
        self.instructions, self.kernels = kernels.instructions, kernels.kernels
        self.users, self.outputs = kernels.users, kernels.outputs
        self.price = KernelPrice(kernels.instructions, profile)
        self.times: dict[int, float] = {}
        self.blocks: dict[int, float] = {}  # where they do not depend on what is read
        #: Of each producer, what computing it inside a reader saves, and the readers that it may not be fused into; as
        #: long as neither kernel changes. A value with many readers is priced anew with each of them.
        self.savings: dict[int, dict[int, float]] = defaultdict(dict)
        self.barred: dict[int, set[int]] = defaultdict(set)
        self.version = [0] * len(kernels.instructions)
        self.heap: list[tuple[float, int, int]] = []

    def run(self) -> dict[int, Fused]:
        """The kernels, by the instruction whose result each writes, in order."""
        for i in self.kernels:
            self._push(i)
        while self.heap:
            _, i, version = heapq.heappop(self.heap)
            if i in self.kernels and version == self.version[i]:
                self._fuse(i)
        return dict(sorted(self.kernels.items()))

    # -- prices ------------------------------------------------------------------------------

    def _time(self, i: int, flops: float, operands: dict[int, float], written: float) -> float:
        """Seconds of a kernel whose result is instruction i."""
        blocks = self.blocks.get(i)
        if blocks is None:
            blocks = num_blocks(self.instructions, (i,), operands)
            if not self.instructions[i].columns:
                self.blocks[i] = blocks
        return self.price.seconds(blocks, flops, operands, written)

    def _own_time(self, i: int) -> float:
        if i not in self.times:
            k = self.kernels[i]
            self.times[i] = self._time(i, k.flops, k.operands, self.instructions[i].num_bytes)
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
        if not readers or i in self.outputs or self.barred[i]:
            return None
        known = self.savings[i]
        for j in readers.difference(known) if len(known) < len(readers) else ():
            saving = self._saving(i, j)
            if saving is None:
                self.barred[i].add(j)
                return None
            known[j] = saving
        return LAUNCH_S + self._own_time(i) + sum(known.values())

    def _saving(self, i: int, j: int) -> float | None:
        """Seconds less that reader j takes with i computed inside it; None where it may not be."""
        if not self._may_fuse(i, j):
            return None
        flops, operands = self._merged(i, j)
        return self._own_time(j) - self._time(j, flops, operands, self.instructions[j].num_bytes)

    def _may_fuse(self, i: int, j: int) -> bool:
        producer, consumer = self.instructions[i], self.instructions[j]
        if producer.kind not in ("loop", "reduce") or consumer.kind not in ("loop", "reduce", "inplace"):
            return False
        if consumer.kind == "inplace" and next(iter(consumer.operands)) == i:
            return False
        if self.kernels[i].tiled or self.kernels[j].tiled:
            members = (*self.kernels[i].members, *self.kernels[j].members)
            if not all(is_tiled(self.instructions[m].primitive) for m in members):
                return False
        elif self.kernels[i].reduces:  # what follows a reduction is a kernel of its own
            return False
        return len(self.kernels[i].operands) + len(self.kernels[j].operands) <= MOST_OPERANDS

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
            consumer.tiled |= producer.tiled
            consumer.members += producer.members
            self.times.pop(j, None)
            changed |= set(consumer.operands)
            for operand in producer.operands:
                self.users[operand].add(j)
            for operand in consumer.operands:
                self._forget(operand, j)
            self.savings.pop(j, None)
            self.barred.pop(j, None)
        for operand in producer.operands:
            self.users[operand].discard(i)
            self._forget(operand, i)
        self.users[i] = set()
        del self.kernels[i]
        for operand in changed:
            self._push(operand)
        for j in readers:
            self._push(j)

    def _forget(self, i: int, j: int) -> None:
        """Reader j of i is no longer what it was."""
        self.savings[i].pop(j, None)
        self.barred[i].discard(j)
