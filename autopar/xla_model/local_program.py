"""Represent the partitioned step of one device: local shapes, with every collective as an instruction.

In: built by `spmd_partition`. Out: `LocalProgram`, the input of the fusion passes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from autopar.ir.device_program import Gemm, Reassociated

#: `alias`: a bitcast, the same memory under another shape. `loop`: computes one output element at a time. `reduce`:
#: reduces many elements to one. `inplace`: writes into its first operand. `unfusible`: a kernel that no elementwise
#: operation is fused into. `border`: a value that enters or leaves a loop or a branch, in the same memory; nothing is
#: fused across it.
InstructionKind = Literal["argument", "alias", "loop", "reduce", "inplace", "unfusible", "border", "collective"]


@dataclass(slots=True)
class Instruction:
    """One operation on one device.

    Args:
        node: the graph's node it comes from; -1 for an argument.
        value: the graph's value it produces.
        operands: position of each operand's instruction -> how often each of its elements is read.
        elements, num_bytes: size of the result.
        flops: FLOPs of the whole result outside matrix units.
        reduces: elements that a reduction combines to one.
        rows: whether it is a row reduction: over the innermost dims only.
        moves_rows: whether a transpose takes the elements of a row apart: its innermost dim changes.
        columns: for a column reduction, the number of elements it keeps minor to the reduced dims; else 0.
        matrix_flops: FLOPs inside matrix units, by dtype; a matmul has `gemm` instead.
        matrix_efficiency: share of a large matmul's rate that these reach.
        convolution: the GEMM that a convolution is, whose operands cuDNN gathers from the images.
        is_dead: whether XLA removes it, but only after its fusion pass, for which it is a user of its operands.
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
    moves_rows: bool = False
    columns: float = 0.0
    gemm: Gemm | None = None
    matrix_flops: tuple[tuple[str, float], ...] = ()
    matrix_efficiency: float = 1.0
    convolution: Gemm | None = None
    collective: str = ""
    axes: tuple[str, ...] = ()
    payload_bytes: float = 0.0
    combinable: bool = False
    dtype: str = "float32"
    is_dead: bool = False


@dataclass(slots=True)
class LocalProgram:
    """Instructions in program order.

    Attributes:
        outputs: per output, the position of its instruction; None for a literal.
        arguments: position of an input -> its instruction.
        at: value -> the instruction that holds it.
        nodes: instruction -> all nodes that compute it.
        reassociated: reductions that XLA makes of several by reassociation.
    """

    instructions: list[Instruction] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    arguments: dict[int, int] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)
    nodes: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    reassociated: tuple[Reassociated, ...] = ()
