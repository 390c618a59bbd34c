"""Fuse producers into their users, most profitable first: a model of XLA's priority fusion on GPUs.

In: `Kernels`. Out: fewer kernels, each with the instructions fused into it and its operands.

XLA fuses a producer into all its users or into none. It writes a producer to memory if a user cannot fuse with it (a
matmul, a collective, an output of the step). A roofline model with XLA's constants gives the profit, so XLA computes an
expensive function of a large value once, and a cheap one again in each user. Source: openxla/xla,
xla/backends/gpu/transforms/priority_fusion.cc, read in November 2026.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from autopar.hardware.profile import HardwareProfile
from autopar.xla_model.kernels import LAUNCH_S, MOST_OPERANDS, KernelPrice, Kernels, is_tiled, num_blocks


class PriorityFusion:
    """Fuses producers into users, the most profitable first."""

    def __init__(self, kernels: Kernels, profile: HardwareProfile) -> None:
        self.instructions, self.kernels = kernels.instructions, kernels.kernels
        self.users, self.outputs = kernels.users, kernels.outputs
        self.price = KernelPrice(kernels.instructions, profile)
        self.times: dict[int, float] = {}
        self.blocks: dict[int, float] = {}  # thread blocks, where they do not depend on the operands
        #: Per producer: the seconds that fusing it into each user saves, and the users it cannot fuse with. An entry is
        #: valid until either kernel changes.
        self.savings: dict[int, dict[int, float]] = defaultdict(dict)
        self.barred: dict[int, set[int]] = defaultdict(set)
        self.version = [0] * len(kernels.instructions)
        self.heap: list[tuple[float, int, int]] = []

    def run(self) -> None:
        """Fuse, in place."""
        for i in self.kernels:
            self._push(i)
        while self.heap:
            _, i, version = heapq.heappop(self.heap)
            if i in self.kernels and version == self.version[i]:
                self._fuse(i)

    # -- prices ------------------------------------------------------------------------------

    def _time(self, i: int, flops: float, operands: dict[int, float], written: float) -> float:
        """Seconds of a kernel that computes instruction i."""
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
        """FLOPs and operand reads of kernel j with kernel i fused into it."""
        producer, consumer = self.kernels[i], self.kernels[j]
        times = consumer.operands[i]
        row = max(consumer.tile_row, producer.tile_row, producer.row)
        is_tiled = producer.tiled or consumer.tiled
        if is_tiled and times >= row:  # a tile holds whole rows, so it computes what has one element per row once
            times = max(1.0, times / row)
        operands = {o: t for o, t in consumer.operands.items() if o != i}
        for operand, read in producer.operands.items():
            read *= times
            # Both read the same elements, so the fused kernel reads them once.
            operands[operand] = max(operands.get(operand, 0.0), read)
        if is_tiled:
            operands = {o: read / row if read >= row > 1.0 else read for o, read in operands.items()}
        return consumer.flops + producer.flops * times, operands

    def _priority(self, i: int) -> float | None:
        """Seconds saved by fusing a producer into all its users; None where that is not allowed."""
        users = self.users[i]
        if not users or i in self.outputs or self.barred[i]:
            return None
        known = self.savings[i]
        for j in users.difference(known) if len(known) < len(users) else ():
            saving = self._saving(i, j)
            if saving is None:
                self.barred[i].add(j)
                return None
            known[j] = saving
        return LAUNCH_S + self._own_time(i) + sum(known.values())

    def _saving(self, i: int, j: int) -> float | None:
        """Seconds that user j saves with kernel i fused into it; None where that is not allowed."""
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
            members = [self.instructions[m] for k in (i, j) for m in self.kernels[k].members]
            if any(one.moves_rows or not is_tiled(one.primitive) for one in members):
                return False
        elif self.kernels[i].reduces:  # XLA does not fuse a large reduction into its user
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
        users = list(self.users[i])
        for j in users:
            consumer = self.kernels[j]
            if consumer.operands[i] <= 1.0:
                consumer.row = max(consumer.row, producer.row)
            consumer.flops, consumer.operands = self._merged(i, j)
            consumer.reduces |= producer.reduces
            consumer.tiled |= producer.tiled
            consumer.tile_row = max(consumer.tile_row, producer.tile_row)
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
        for j in users:
            self._push(j)

    def _forget(self, i: int, j: int) -> None:
        """Discard cached prices of fusing i into j, after j has changed."""
        self.savings[i].pop(j, None)
        self.barred[i].discard(j)
