"""Collect the instructions of one device's program as the SPMD partitioner creates them.

In: a formulation, an explicit program. Out: `PartitionBuilder`; the partitioner's modules add instructions to it.
"""

from __future__ import annotations

from autopar.formulate.formulation import Formulation
from autopar.ir.explicit_program import ExplicitProgram
from autopar.ir.graph import Graph
from autopar.ir.sharding import TensorSharding, replicated
from autopar.xla_model.local_program import Instruction, LocalProgram


class PartitionBuilder:
    """The instructions so far, and the instruction that holds each value.

    Attributes:
        local: value -> the sharding in which it is computed.
        known: key of a computation -> its instruction (common-subexpression elimination).
        cheap_flops: FLOPs per element of the cheapest elementwise operation.
    """

    def __init__(self, f: Formulation, explicit: ExplicitProgram) -> None:
        self.f, self.explicit = f, explicit
        self.graph: Graph = f.graph
        self.program = LocalProgram()
        self.at = self.program.at
        self.cheap_flops = f.profile.flops_per_element("default", "")
        self.known: dict[tuple[object, ...], int] = {}
        self.users, self.producers = self.graph.users, self.graph.producers
        self.local = {value: explicit.arrays[array].sharding for value, array in explicit.made.items()}

    def add(self, instruction: Instruction) -> int:
        """Append an instruction and return its position."""
        self.program.instructions.append(instruction)
        return len(self.program.instructions) - 1

    def sharding(self, value: int) -> TensorSharding:
        """The sharding in which a value is computed."""
        known = self.local.get(value)
        return replicated(len(self.graph.values[value].shape)) if known is None else known

    def local_shape(self, value: int, sharding: TensorSharding) -> tuple[int, ...]:
        """The shape of a value on one device under a sharding."""
        return sharding.local_shape(self.graph.values[value].shape, self.f.mesh)

    def copied(
        self, n: int, value: int, primitive: str, operands: dict[int, float], size: float, itemsize: float
    ) -> int:
        """Add an instruction that copies, and return its position.

        Args:
            n: the node it belongs to.
            size: number of elements of the result.
        """
        dtype = self.graph.values[value].dtype
        return self.add(Instruction("loop", n, value, primitive, operands, size, size * itemsize, dtype=dtype))

    def share(self, size: float, at: int) -> float:
        """`size` elements as a fraction of an instruction's elements."""
        return size / max(self.program.instructions[at].elements, 1.0)
