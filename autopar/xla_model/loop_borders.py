"""Create the instructions for values that enter and leave loops and branches on one device.

In: the border nodes of a loop in the graph. Out: `border` instructions, slices of stacked operands, and the live ranges
of values that stay in memory while a loop runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.graph import Loop, Node
from autopar.xla_model.local_program import Instruction
from autopar.xla_model.partition_builder import PartitionBuilder
from autopar.xla_model.partition_communication import Communications


class LoopBorders:
    """Creates instructions at the borders of loops and branches.

    Attributes:
        kept: border node -> the instruction whose result stays in memory while the loop runs.
    """

    def __init__(self, builder: PartitionBuilder, sent: Communications) -> None:
        self.b, self.sent = builder, sent
        self.kept: dict[int, int] = {}

    def _border(self, n: int, value: int, operands: Sequence[int], num_bytes: float, elements: float) -> int:
        dtype = self.b.graph.values[value].dtype if value >= 0 else "float32"
        reads = dict.fromkeys(operands, 0.0)
        return self.b.add(Instruction("border", n, value, "border", reads, elements, num_bytes, dtype=dtype))

    def piece(self, n: int, node: Node) -> None:
        """Add the instructions of one border node."""
        if not node.results:
            return
        value = node.results[0]
        shape = self.b.local_shape(value, self.b.sharding(value))
        elements = float(math.prod(shape))
        num_bytes = elements * self.b.graph.values[value].itemsize
        sources = [self.sent.operand(n, i)[0] for i, v in enumerate(node.operands) if v is not None]
        dtype = self.b.graph.values[value].dtype
        if node.primitive == "enter_slice":
            whole = self.b.program.instructions[sources[0]]
            stack = self._border(n, whole.value, sources, whole.num_bytes, whole.elements)
            self.kept[n] = stack
            part = {stack: elements / max(whole.elements, 1.0)}
            self.b.at[value] = self.b.add(
                Instruction("loop", n, value, "dynamic_slice", part, elements, num_bytes, dtype=dtype)
            )
        elif node.primitive == "exit_stack":
            reads = {self.kept[n]: 1.0, **dict.fromkeys(sources, 1.0)}
            last = max(loop.stop for loop in self.b.graph.loops if n in loop.stacks) - 1
            self.b.at[value] = self.b.add(
                Instruction("inplace", last, value, "dynamic_update_slice", reads, elements, num_bytes, dtype=dtype)
            )
        else:
            self.b.at[value] = self._border(n, value, sources, num_bytes, elements)
            if node.primitive == "enter_const":
                self.kept[n] = self.b.at[value]

    def allocate_stacks(self, loop: Loop) -> None:
        """Allocate the stacked results of a loop: they are live from the first iteration on."""
        for n in loop.stacks:
            value = self.b.graph.nodes[n].results[0]
            elements = float(self.b.sharding(value).local_size(self.b.graph.values[value].shape, self.b.f.mesh))
            num_bytes = elements * self.b.graph.values[value].itemsize
            self.kept[n] = self._border(loop.start, value, (), num_bytes, elements)

    def end(self, loop: Loop) -> None:
        """Add the stacked results of a loop, and keep what every iteration reads live until the last one ends."""
        for n in loop.stacks:
            self.piece(n, self.b.graph.nodes[n])
        kept = [at for n, at in self.kept.items() if loop.start <= n < loop.stop]
        if kept:
            self._border(loop.stop - 1, -1, kept, 0.0, 0.0)
