"""Count the arithmetic and the reads of one kernel: as the device runs it, and as XLA's cost analysis has it.

In: a kernel and the instructions it computes. Out: `Work`. XLA emits one loop over a kernel's points, so a value that
several results need at one point is computed and read once. XLA's cost analysis counts it once for each use at another
position, a reduction's included; its scheduler works with that count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.hardware.xla_estimator import EstimatorProfile
from autopar.ir.graph import Value
from autopar.rules.table import traits_of
from autopar.xla_model.kernels import Fused
from autopar.xla_model.latency_estimator import cycles
from autopar.xla_model.local_program import Instruction
from autopar.xla_model.spmd_partition import EXPANDED

#: FLOPs in the time of one float32 instruction of a CUDA core, a fused multiply-add.
_FLOPS_OF_INSTRUCTION = 2.0
#: Instructions of one element, as CUDA's float32 library and XLA's expansions have them; an instruction of the
#: special-function units takes the time of eight. `random_bits`: measured on an H100 (benchmarks/results/kernels.md).
_INSTRUCTIONS: Mapping[str, float] = {
    "convert_element_type": 2.0,
    "div": 16.0,
    "rem": 24.0,
    "exp": 13.0,
    "exp2": 9.0,
    "expm1": 22.0,
    "log": 16.0,
    "log1p": 22.0,
    "logistic": 25.0,
    "tanh": 30.0,
    "sqrt": 13.0,
    "rsqrt": 11.0,
    "cbrt": 32.0,
    "sin": 26.0,
    "cos": 26.0,
    "tan": 42.0,
    "erf": 36.0,
    "erfc": 36.0,
    "erf_inv": 36.0,
    "pow": 52.0,
    "atan2": 38.0,
    "integer_pow": 2.0,
    "random_bits": 140.0,
    "threefry2x32": 140.0,
}


#: How much longer arithmetic must take than memory traffic for a tile's shared arithmetic to matter: XLA's count differs.
_BOUND = 1.1
#: Most elements and most rows of a tile, as XLA chooses them for normalisations (benchmarks/results/gpu/programs).
_TILE_ELEMENTS, _TILE_ROWS = 128 * 128, 16
#: Elements of a tile's operands with which it fills its core's registers: half of those of its 256 threads.
_ELEMENTS_OF_REGISTERS = 256 * 128


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a kernel.

    Args:
        flops: arithmetic outside the matrix units.
        reads: position of each operand -> how often each of its elements is read.
    """

    flops: float
    reads: Mapping[int, float]


class KernelWork:
    """Counts the work of kernels over the instructions of one program."""

    def __init__(self, instructions: Sequence[Instruction], estimator: EstimatorProfile | None) -> None:
        self.instructions, self.estimator = instructions, estimator

    def emitted(self, kernel: Fused) -> Work:
        """The work of the kernel that XLA emits."""
        return self._counted(kernel, _emitted_flops, once=True)

    def analyzed(self, kernel: Fused) -> Work:
        """The work that XLA's cost analysis counts (openxla/xla, gpu_hlo_cost_analysis.cc)."""
        estimator = self.estimator
        if estimator is None:
            return self.emitted(kernel)
        return self._counted(kernel, lambda one: cycles(one.primitive, one.dtype, estimator), once=False)

    def has_scattered_rows(self, kernel: Fused, values: Sequence[Value]) -> bool:
        """Whether a tile takes one row from each of several places in memory, instead of adjacent rows.

        A tile has a power of two of rows, so it does where the number of adjacent rows is odd. XLA prefers such tiles, too,
        where something is the same at all these places, a causal mask above all: a tile then loads or computes it once for
        all its rows. It does so if that takes less time by its cost model, where a kernel takes the time of its arithmetic
        or of its memory traffic, whichever is longer. Where adjacent rows share the mask, as the heads of a group do,
        it takes these.
        """
        if not kernel.tiled or self.estimator is None:
            return False

        def rows_of(at: int) -> tuple[int, ...]:
            value = self.instructions[at].value
            return tuple(values[value].shape[-2:]) if value >= 0 and len(values[value].shape) > 1 else ()

        touched = (*kernel.operands, *kernel.members)
        most = max(self.instructions[at].elements for at in kernel.members)
        rows = {of for at in touched if self.instructions[at].elements == most and (of := rows_of(at))}
        if any(num % 2 and num * length < most for num, length in rows):
            return True
        small = [at for at in touched if self.instructions[at].elements < most and rows_of(at) in rows]
        small = [
            at for at in small if self.instructions[at].elements * rows_of(at)[1] != most
        ]  # no results for each row
        if not small or any(rows - {rows_of(at) for at in small}):
            return False
        arithmetic_s = kernel.flops / self.estimator.scalar_flops_per_s
        moved = sum(self.instructions[at].num_bytes for at in (*kernel.operands, *kernel.roots))
        is_bound = arithmetic_s > _BOUND * moved / self.estimator.memory_bytes_per_s
        return is_bound or any(at in kernel.operands for at in small)

    def fills_registers(self, kernel: Fused, values: Sequence[Value]) -> bool:
        """Whether what a tile holds while it reduces its rows takes so many registers that a core runs few of its threads:
        the gradient of a softmax over long rows does."""
        if not kernel.tiled:
            return False
        most = max(self.instructions[at].elements for at in kernel.members)
        made = [self.instructions[at].value for at in kernel.members if self.instructions[at].elements == most]
        length = next((values[value].shape[-1] for value in made if value >= 0 and values[value].shape), 1)
        tile = min(_TILE_ELEMENTS, _TILE_ROWS * 2 ** math.ceil(math.log2(max(length, 1))))
        reductions = [at for at in kernel.members if self.instructions[at].kind == "reduce"]
        return any(tile * self._num_held(kernel, at, most) >= _ELEMENTS_OF_REGISTERS for at in reductions)

    def _num_held(self, kernel: Fused, reduction: int, most: float) -> int:
        """The number of whole values that are needed before a reduction and after it."""
        after = {reduction}
        held = set[int]()
        for at in sorted(set(kernel.members)):
            if at != reduction and after.intersection(self.instructions[at].operands):
                after.add(at)
                held.update(self.instructions[at].operands)
        found = [self.instructions[at] for at in held - after]
        return sum(one.elements == most and one.dtype != "bool" for one in found)

    def _counted(self, kernel: Fused, per_element: Callable[[Instruction], float], *, once: bool) -> Work:
        """Count from the results backwards.

        Args:
            per_element: FLOPs of an element.
            once: whether a reduction computes its operand at the same points as the kernel's other results.
        """

        def flops_of(one: Instruction) -> float:
            if not one.flops or one.kind == "unfusible":
                return one.flops
            return one.elements * one.reduces * per_element(one)

        if kernel.tiled:  # it reads each row once
            whole = sum(flops_of(self.instructions[i]) for i in set(kernel.members))
            return Work(whole, {operand: min(read, 1.0) for operand, read in kernel.operands.items()})
        if len(kernel.members) == 1 and len(kernel.roots) == 1:
            one = self.instructions[kernel.roots[0]]
            expanded = EXPANDED.get(one.primitive, 1.0)
            return Work(flops_of(one), {operand: read / expanded for operand, read in kernel.operands.items()})
        inside = set(kernel.members)
        places: dict[int, set[int]] = {root: {-1} for root in kernel.roots}
        times: dict[int, float] = defaultdict(float)
        times[-1] = 1.0
        flops = 0.0
        for at in sorted(inside, reverse=True):
            if at not in places:
                continue
            one = self.instructions[at]
            here = sum(times[place] for place in places[at])
            flops += here * flops_of(one)
            moves = one.kind != "loop" or one.primitive == "cut" or bool(traits_of(one.primitive).moves)
            moves = moves and not (once and one.kind == "reduce")
            for operand, read in one.operands.items():
                read /= EXPANDED.get(one.primitive, 1.0)
                if moves or read != 1.0:  # a smaller operand is broadcast
                    places.setdefault(operand, set()).add(operand)
                    times[operand] += here * read
                else:
                    places.setdefault(operand, set()).update(places[at])
        return Work(
            flops, {operand: sum(times[place] for place in places.get(operand, ())) for operand in kernel.operands}
        )


def _emitted_flops(one: Instruction) -> float:
    return _FLOPS_OF_INSTRUCTION * _INSTRUCTIONS.get(one.primitive, 1.0)
