"""The program of one device while it is made.

In: a formulation, an explicit program. Out: `PartitionBuilder`, which the parts of the SPMD partitioner add instructions to.
"""

from __future__ import annotations

from autopar.formulate.formulation import Formulation
from autopar.ir.explicit_program import ExplicitProgram
from autopar.ir.graph import Graph
from autopar.ir.sharding import TensorSharding, replicated
from autopar.xla_model.local_program import Instruction, LocalProgram


class PartitionBuilder:
    """Instructions made so far, and where each value is read from.

    Attributes:
        local: value -> how it is made. known: what was computed already, XLA computes once.
        cheap_flops: operations of one element of what costs least.
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
        """Its position."""
        self.program.instructions.append(instruction)
        return len(self.program.instructions) - 1

    def sharding(self, value: int) -> TensorSharding:
        """How a value is made."""
        known = self.local.get(value)
        return replicated(len(self.graph.values[value].shape)) if known is None else known

    def local_shape(self, value: int, sharding: TensorSharding) -> tuple[int, ...]:
        """The shape of a value on one device."""
        return sharding.local_shape(self.graph.values[value].shape, self.f.mesh)

    def copied(
        self, n: int, value: int, primitive: str, operands: dict[int, float], size: float, itemsize: float
    ) -> int:
        """The position of a kernel that copies.

        Args:
            n: node. size: elements of the result.
        """
        dtype = self.graph.values[value].dtype
        return self.add(Instruction("loop", n, value, primitive, operands, size, size * itemsize, dtype=dtype))

    def share(self, size: float, at: int) -> float:
        """The part of an instruction's elements that so many are."""
        return size / max(self.program.instructions[at].elements, 1.0)
