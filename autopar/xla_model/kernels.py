"""Represent the kernels of one device's program, and price a kernel by XLA's roofline model.

In: a `LocalProgram`. Out: `Kernels`, which the fusion passes rewrite, and `KernelPrice`, their cost model. Source:
openxla/xla, xla/service/gpu/model/gpu_performance_model_base.cc, read in November 2026.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.hardware.profile import HardwareProfile
from autopar.rules.table import traits_of
from autopar.xla_model.latency_estimator import MOST_ROWS, column_blocks
from autopar.xla_model.local_program import Instruction, LocalProgram

LAUNCH_S = 1e-6  # launch overhead of a kernel in XLA's cost model of fusions
MOST_OPERANDS = 96
_PARALLEL = 0.95  # the fraction of the shorter of compute and memory time that overlaps with the longer
_NEAR_CACHE_SPEEDUP, _CACHE_SPEEDUP = 20.0, 2.5  # XLA's speedup of repeated reads that hit the L1 and the L2 cache
#: Elements of the longest row that a tiled kernel computes at once, and that a row reduction reduces in one kernel.
LONGEST_ROW = 1 << 14
_LARGE_REDUCTION = 16  # elements reduced to one; XLA emits a smaller reduction like a loop
#: Primitives that a tiled (Triton) kernel does not compute, besides those that `is_tiled` excludes by traits.
_NOT_TILED = frozenset(["cut", "slice", "rev", "threefry2x32", "random_bits", "reduce_precision", "sort"])


@dataclass(slots=True)
class Fused:
    """One kernel.

    Args:
        roots: positions of the instructions whose results it writes.
        operands: position of each instruction it reads from memory -> how often it reads each element.
        members: positions of all instructions it computes; other kernels may compute them too.
        reduces: whether it computes a large reduction.
        tiled: whether it processes one row at a time, so that the reduction of a row and its users share the kernel.
        row: elements of the row that each element of its result is the reduction of; 1 if it does not reduce rows.
        tile_row: elements of the rows that a tiled kernel processes; 1 if it is not tiled.
        separate: nodes to compute for this kernel alone, behind an optimization barrier, so that XLA does not fuse it
            with another kernel; usually empty.
    """

    roots: list[int]
    operands: dict[int, float]
    flops: float
    members: list[int]
    reduces: bool
    tiled: bool = False
    row: float = 1.0
    tile_row: float = 1.0
    separate: tuple[int, ...] = ()


class Kernels:
    """The kernels of a program: initially one per instruction.

    Attributes:
        kernels: position of the instruction whose result a kernel writes -> kernel.
        users: per instruction, the kernels that read it.
        outputs: positions of the step's outputs.
    """

    def __init__(self, program: LocalProgram) -> None:
        self.instructions = program.instructions
        self.kernels: dict[int, Fused] = {}
        self.users: list[set[int]] = [set() for _ in program.instructions]
        self.outputs = {at for at in program.outputs if at is not None}
        for i, one in enumerate(program.instructions):
            if one.kind == "argument":
                continue
            reduces = one.kind == "reduce" and one.reduces >= _LARGE_REDUCTION
            row = one.reduces if reduces and one.rows else 1.0
            self.kernels[i] = Fused([i], dict(one.operands), one.flops, [i], reduces, row=row)
            for operand in one.operands:
                self.users[operand].add(i)
        self.drop_dead()

    def drop_dead(self, *, even_late: bool = False) -> None:
        """Remove kernels whose results are unused.

        Args:
            even_late: whether to remove those that XLA removes only after its fusion pass.
        """
        for i in reversed(range(len(self.instructions))):
            one = self.instructions[i]
            is_kept = i in self.outputs or one.value < 0 or (one.is_dead and not even_late)
            if i in self.kernels and not self.users[i] and not is_kept:
                for operand in self.kernels[i].operands:
                    self.users[operand].discard(i)
                del self.kernels[i]

    def only_user(self, i: int) -> int | None:
        """The single user of an instruction; None where it has several, or is an output of the step."""
        return next(iter(self.users[i])) if len(self.users[i]) == 1 and i not in self.outputs else None


def is_tiled(primitive: str) -> bool:
    """Whether a tiled kernel can compute an operation."""
    traits = traits_of(primitive)
    moves = traits.in_place or traits.joins or traits.moves == "indexed" or traits.reduces in ("position", "running")
    return not moves and primitive not in _NOT_TILED


def num_blocks(instructions: Sequence[Instruction], roots: Sequence[int], operands: Iterable[int]) -> float:
    """The number of thread blocks that XLA's emitters launch a kernel with; 0 where they occupy the whole device."""
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


def num_launches(instructions: Sequence[Instruction], roots: Sequence[int]) -> int:
    """The number of kernels: a reduction of many rows, or of long ones, has a second one, which adds the parts."""
    reductions = (instructions[root] for root in roots if instructions[root].kind == "reduce")
    return 2 if any(one.reduces > (MOST_ROWS if one.columns else LONGEST_ROW) for one in reductions) else 1


class KernelPrice:
    """XLA's roofline model of a kernel: few thread blocks reach neither peak bandwidth nor peak FLOP/s."""

    def __init__(self, instructions: Sequence[Instruction], profile: HardwareProfile) -> None:
        self.instructions = instructions
        estimator = profile.xla_estimator
        self.rate = estimator.scalar_flops_per_s if estimator else profile.vector_flops_per_s
        self.bandwidth = profile.hbm_bytes_per_s
        self.block_bandwidth = estimator.block_bytes_per_s if estimator else math.inf
        self.num_cores = estimator.num_cores if estimator else 1
        self.sizes: list[float] = []
        self.reread_bytes_per_s: list[float] = []  # of each instruction's result, once it is in a cache
        caches = ((profile.near_cache_bytes, _NEAR_CACHE_SPEEDUP), (profile.cache_bytes, _CACHE_SPEEDUP))
        for one in instructions:
            speedup = next((faster for fits, faster in caches if one.num_bytes < fits), 1.0)
            self.sizes.append(one.num_bytes)
            self.reread_bytes_per_s.append(self.bandwidth * speedup)

    def seconds(self, blocks: float, flops: float, operands: Mapping[int, float], written: float) -> float:
        """Seconds of a kernel, by thread blocks (0: enough for the device), FLOPs, reads per operand, bytes written."""
        rate, most = self.rate, math.inf
        if blocks:
            rate *= min(1.0, blocks / self.num_cores)
            most = blocks * self.block_bandwidth
        arithmetic = flops / rate
        traffic = written / self.bandwidth
        sizes, reread = self.sizes, self.reread_bytes_per_s
        memory = min(self.bandwidth, most)
        for operand, times in operands.items():
            size = sizes[operand]
            if times <= 1.0:
                traffic += size * times / memory
            else:
                cached = reread[operand]
                traffic += size / memory + size * (times - 1.0) / (cached if cached < most else most)
        return arithmetic + traffic - _PARALLEL * min(arithmetic, traffic)
