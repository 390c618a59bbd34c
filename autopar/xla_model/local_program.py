"""The step as one device sees it: local shapes, and every collective an instruction of its own.

In: made by `spmd_partition`. Out: `LocalProgram`, which the fusion passes read.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from autopar.ir.device_program import Gemm

#: `alias`: the same memory under another shape. `loop`: one output element at a time. `reduce`: many elements
#: to one. `inplace`: writes into its first operand. `hero`: a kernel of its own that nothing is fused with. `border`: the
#: same memory on the other side of a loop's or a branch's border; nothing is fused across it.
InstructionKind = Literal["argument", "alias", "loop", "reduce", "inplace", "hero", "border", "collective"]


@dataclass(slots=True)
class Instruction:
    """One operation on one device.

    Args:
        node: the graph's node it comes from; -1 for an argument.
        value: the graph's value it makes.
        operands: positions of instructions, with how often each of their elements is read.
        elements, num_bytes: of the result.
        rows: for a reduction, whether it is along the innermost dims alone.
        columns: for any other, how many elements it keeps innermost; 0 for none.
        flops: of the whole result, outside matrix units. matrix_flops: inside, by dtype; not of a product (`gemm`).
    """

    kind: InstructionKind
    node: int
    value: int
    primitive: str
    operands: dict[int, float]
    elements: float
    num_bytes: float
    flops: float = 0.0
    reduces: float = 1.0
    rows: bool = False
    columns: float = 0.0
    gemm: Gemm | None = None
    matrix_flops: tuple[tuple[str, float], ...] = ()
    collective: str = ""
    axes: tuple[str, ...] = ()
    payload_bytes: float = 0.0
    combinable: bool = False
    dtype: str = "float32"


@dataclass(slots=True)
class LocalProgram:
    """Instructions in program order; `outputs` holds the position of each output's instruction (None: a literal). Of sums over
    devices that XLA takes as one, since they are added up, `joined` holds the values."""

    instructions: list[Instruction] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    arguments: dict[int, int] = field(default_factory=dict)  # input position -> instruction
    at: dict[int, int] = field(default_factory=dict)  # value -> the instruction that it is read from
    nodes: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # instruction -> all that compute it
    joined: tuple[tuple[int, ...], ...] = ()
