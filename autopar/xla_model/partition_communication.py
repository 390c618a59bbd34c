"""Collectives of the explicit program as instructions of one device, each made where it is first read.

In: a `PartitionBuilder`. Out: the instruction that an operand is read from, after resharding and halos; what a node sends itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.cost.collectives import collective
from autopar.ir.explicit_program import Array, Cause, Communicate, Extend, Strip
from autopar.ir.graph import Node
from autopar.ir.sharding import TensorSharding
from autopar.rules.table import traits_of
from autopar.xla_model.local_program import Instruction
from autopar.xla_model.partition_builder import PartitionBuilder


class Communications:
    """Instructions of collectives, slices and halos."""

    def __init__(self, builder: PartitionBuilder) -> None:
        self.b = builder
        self.moved: dict[int, int] = {}  # array that is sent -> instruction
        self.strips: dict[Strip, int] = {}

    def operand(self, n: int, index: int) -> tuple[int, TensorSharding]:
        """The instruction that a node's operand is read from, after any resharding."""
        array = self.b.explicit.reads[n, index]
        return self.array_at(array), self.b.explicit.arrays[array].sharding

    def array_at(self, array: int) -> int:
        """The instruction that an array is read from."""
        op = self.b.explicit.sent_as.get(array)
        if op is None or op.cause == "reduction":
            return self.b.at[self.b.explicit.arrays[array].value]
        if array not in self.moved:
            assert op.operand is not None
            self.moved[array] = self._moved(op, self.array_at(op.operand), self.b.explicit.arrays[array])
        return self.moved[array]

    def _moved(self, op: Communicate, start: int, array: Array) -> int:
        info = self.b.graph.values[array.value]
        if op.is_inner and op.kind == "reduce-scatter":
            start = self._reordered(start, op)
        elements = array.sharding.local_size(info.shape, self.b.f.mesh)
        source = self.b.program.instructions[start]
        is_cut = op.kind == "cut"
        at = self.b.add(
            Instruction(
                "loop" if is_cut else "collective",
                self._node_of(start, array.value),
                array.value,
                op.kind,
                {start: elements / max(source.elements, 1.0) if is_cut else 1.0},
                elements,
                elements * info.itemsize,
                collective="" if is_cut else op.collective,
                axes=op.axes,
                payload_bytes=op.num_bytes,
                combinable=not is_cut and collective(op.collective).is_merged,
                dtype=info.dtype,
            )
        )
        return self._reordered(at, op) if op.is_inner and op.kind == "all-gather" else at

    def _node_of(self, at: int, value: int) -> int:
        """The node that an instruction's result is sent at: a loop writes a stack inside, and the whole is sent behind it."""
        producer = self.b.producers.get(value, -1)
        is_stack = producer >= 0 and self.b.graph.nodes[producer].primitive == "exit_stack"
        return producer if is_stack else self.b.program.instructions[at].node

    def _reordered(self, at: int, op: Communicate) -> int:
        """A copy in the order that devices' parts lie in, or from that."""
        one = self.b.program.instructions[at]
        return self.b.copied(one.node, one.value, "transpose", {at: 1.0}, one.elements, op.num_bytes / one.elements)

    def extended(self, one: Extend, at: int) -> int:
        """An operand with the strips that neighbours send, put together by a kernel; once for all who read the same."""
        parts = {at: 1.0}
        for strip in one.strips:
            if strip not in self.strips:
                size = float(math.prod(strip.shape))
                cut = self.b.copied(one.node, strip.value, "slice", {at: self.b.share(size, at)}, size, strip.itemsize)
                self.strips[strip] = self.b.add(
                    replace(
                        self.b.program.instructions[cut],
                        kind="collective",
                        primitive=strip.kind,
                        operands={cut: 1.0},
                        collective=strip.kind,
                        axes=strip.axes,
                        payload_bytes=strip.num_bytes,
                    )
                )
            parts[self.strips[strip]] = 1.0
        key = ("extended", tuple(parts), one.window)
        if key not in self.b.known:
            size, value = float(math.prod(one.shape)), self.b.program.instructions[at].value
            if one.strips:
                self.b.known[key] = self.b.copied(one.node, value, "pad", parts, size, one.itemsize)
            else:
                self.b.known[key] = self.b.copied(
                    one.node, value, "slice", {at: self.b.share(size, at)}, size, one.itemsize
                )
        return self.b.known[key]

    def sent_by_program(self, n: int, node: Node, operands: Sequence[int]) -> list[int]:
        """What the program itself sends, inside a `shard_map`."""
        sent: list[int] = []
        for op in self._beside(n, "program"):
            size = op.num_times / node.repeat * op.num_bytes
            reads = dict.fromkeys(operands, 1.0)
            one = Instruction("collective", n, -1, op.kind, reads, size / 4, size, collective=op.kind, axes=op.axes)
            one.payload_bytes, one.combinable = size, False
            sent.append(self.b.add(one))
        return sent

    def joined_parts(self, n: int, at: int) -> int:
        """What a node makes of its parts: it gathers what each has found, and finishes from that."""
        sent = next(self._beside(n, "region"), None)
        if sent is None:
            return at
        own = self.b.program.instructions[at]
        gathered = self.b.add(
            Instruction(
                "collective",
                n,
                own.value,
                sent.kind,
                {at: sent.num_elements / max(own.elements, 1.0) / self.b.f.mesh.sizes(sent.axes)},
                sent.num_elements,
                sent.num_bytes,
                collective=sent.collective,
                axes=sent.axes,
                payload_bytes=sent.num_bytes,
                combinable=True,
                dtype=own.dtype,
            )
        )
        if traits_of(own.primitive).reduces == "running":
            return self.b.add(
                replace(own, kind="loop", primitive="add", operands={at: 1.0, gathered: 1.0}, reduces=1.0)
            )
        return self.b.add(replace(own, operands={gathered: 1.0}, reduces=1.0, flops=own.elements * self.b.cheap_flops))

    def reduce(self, n: int) -> None:
        """Sum the few elements that a node makes, where they are made."""
        for op in self._beside(n, "reduction"):
            self._reduced(op)

    def _reduced(self, op: Communicate) -> None:
        assert op.operand is not None and op.result is not None
        value = self.b.explicit.arrays[op.result].value
        source, info = self.b.at[value], self.b.graph.values[value]
        one = Instruction(
            "collective", self.b.program.instructions[source].node, value, op.kind, {source: 1.0}, info.size, 0.0
        )
        one.num_bytes = one.payload_bytes = op.num_bytes
        one.collective, one.axes, one.combinable, one.dtype = op.kind, op.axes, True, info.dtype
        self.b.at[value], self.b.local[value] = self.b.add(one), self.b.explicit.arrays[op.result].sharding

    def _beside(self, n: int, cause: Cause) -> Iterator[Communicate]:
        """What a node sends itself."""
        return (op for op in self.b.explicit.beside.get(n, ()) if op.cause == cause)
