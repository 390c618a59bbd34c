"""Kernels of one device's program: which instructions each computes, what it reads, and what it takes by XLA's roofline.

In: a `LocalProgram`. Out: `Kernels`, which the fusion passes change, and `KernelPrice`, by which they weigh. Source:
openxla/xla, xla/service/gpu/model/gpu_performance_model_base.cc, read in November 2026.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.hardware_profile import HardwareProfile
from autopar.cost.kernel_time import column_blocks
from autopar.rules.table import traits_of
from autopar.xla_model.local_program import Instruction, LocalProgram

LAUNCH_S = 1e-6  # what XLA charges a kernel when it weighs a fusion
MOST_OPERANDS = 96
_PARALLEL = 0.95  # how much of the shorter of arithmetic and traffic the longer one hides
_NEAR_CACHE_SPEEDUP, _CACHE_SPEEDUP = 20.0, 2.5  # what fits them is read again so much faster, as XLA takes it
_LARGE_REDUCTION = 16  # elements to one; smaller ones are emitted like any loop
#: What no kernel can do that works row by row, beside what `is_tiled` knows by traits.
_NOT_TILED = frozenset(["cut", "slice", "rev", "threefry2x32", "random_bits", "reduce_precision", "sort"])


@dataclass(slots=True)
class Fused:
    """One kernel.

    Args:
        roots: positions of the instructions whose results it writes.
        operands: positions of instructions in memory, with how often each of their elements is read.
        members: all instructions it computes, some perhaps in other kernels too.
        reduces: whether a large reduction is among them.
        tiled: whether it works row by row, so that a reduction of a row and what uses it share a kernel.
        separate: nodes that are computed for it alone, behind a barrier, lest XLA join it with another; mostly none.
    """

    roots: list[int]
    operands: dict[int, float]
    flops: float
    members: list[int]
    reduces: bool
    tiled: bool = False
    separate: tuple[int, ...] = ()


class Kernels:
    """The kernels of a program, at first one for each instruction.

    Attributes:
        kernels: by the position of the instruction whose result a kernel writes.
        users: of each instruction, the kernels that read it. outputs: positions that leave the step.
        renamed: outputs that another instruction makes now.
    """

    def __init__(self, program: LocalProgram) -> None:
        self.instructions = program.instructions
        self.kernels: dict[int, Fused] = {}
        self.users: list[set[int]] = [set() for _ in program.instructions]
        self.outputs = {at for at in program.outputs if at is not None}
        self.renamed: dict[int, int] = {}
        for i, one in enumerate(program.instructions):
            if one.kind == "argument":
                continue
            reduces = one.kind == "reduce" and one.reduces >= _LARGE_REDUCTION
            self.kernels[i] = Fused([i], dict(one.operands), one.flops, [i], reduces)
            for operand in one.operands:
                self.users[operand].add(i)
        self.drop_dead()

    def drop_dead(self) -> None:
        """Drop kernels whose results nobody reads."""
        for i in reversed(range(len(self.instructions))):
            effect = self.instructions[i].value < 0
            if i in self.kernels and not self.users[i] and i not in self.outputs and not effect:
                for operand in self.kernels[i].operands:
                    self.users[operand].discard(i)
                del self.kernels[i]

    def only_reader(self, i: int) -> int | None:
        """What alone reads an instruction; None where several do, or the step returns it."""
        return next(iter(self.users[i])) if len(self.users[i]) == 1 and i not in self.outputs else None


def is_tiled(primitive: str) -> bool:
    """Whether a kernel that works row by row can compute an operation."""
    traits = traits_of(primitive)
    moves = traits.in_place or traits.joins or traits.moves == "indexed" or traits.reduces in ("position", "running")
    return not moves and primitive not in _NOT_TILED


def num_blocks(instructions: Sequence[Instruction], roots: Sequence[int], operands: Iterable[int]) -> float:
    """Thread blocks that a kernel runs in, as XLA's emitters choose them; 0: as many as the device can use."""
    one = instructions[roots[0]]
    if traits_of(one.primitive).in_place == "scatter":
        return max(1.0, max((instructions[o].elements for o in list(one.operands)[1:]), default=1.0) // 128)
    sums = [one for root in roots if (one := instructions[root]).kind == "reduce"]
    if not sums:
        return max(1.0, -(-one.elements // (512 if one.elements % 4 == 0 else 128)))
    one = sums[0]
    if not one.columns:
        return 0.0
    read = [instructions[o] for o in operands if instructions[o].elements > 64.0]
    itemsize = min((i.num_bytes / i.elements for i in read), default=4.0)
    return column_blocks(one.reduces, one.columns, max(itemsize, 1.0), max(one.elements / one.columns, 1.0))


class KernelPrice:
    """XLA's roofline of a kernel: few thread blocks reach neither the memory's rate nor the arithmetic's."""

    def __init__(self, instructions: Sequence[Instruction], profile: HardwareProfile) -> None:
        self.instructions = instructions
        self.rate, self.bandwidth = profile.vector_flops_per_s, profile.hbm_bytes_per_s
        estimator = profile.xla_estimator
        self.block_bandwidth = estimator.block_bytes_per_s if estimator else math.inf
        self.num_cores = estimator.num_cores if estimator else 1
        self.sizes: list[float] = []
        self.again: list[float] = []  # bytes per second at which a value is read again
        caches = ((profile.near_cache_bytes, _NEAR_CACHE_SPEEDUP), (profile.cache_bytes, _CACHE_SPEEDUP))
        for one in instructions:
            speedup = next((faster for fits, faster in caches if one.num_bytes < fits), 1.0)
            self.sizes.append(one.num_bytes)
            self.again.append(self.bandwidth * speedup)

    def seconds(self, blocks: float, flops: float, operands: Mapping[int, float], written: float) -> float:
        rate, most = self.rate, math.inf
        if blocks:
            rate *= min(1.0, blocks / self.num_cores)
            most = blocks * self.block_bandwidth
        arithmetic = flops / rate
        traffic = written / self.bandwidth
        sizes, again = self.sizes, self.again
        memory = min(self.bandwidth, most)
        for operand, times in operands.items():
            size = sizes[operand]
            if times <= 1.0:
                traffic += size * times / memory
            else:
                cached = again[operand]
                traffic += size / memory + size * (times - 1.0) / (cached if cached < most else most)
        return arithmetic + traffic - _PARALLEL * min(arithmetic, traffic)
