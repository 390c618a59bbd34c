"""Turn the collectives of the explicit program into instructions of one device, each placed before its first user.

In: a `PartitionBuilder`. Out: the instruction of each operand after resharding and halo exchange, and the collectives
that a node itself needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cost.collectives import collective
from autopar.cost.context_method import Context, context_of
from autopar.ir.explicit_program import Array, Cause, Communicate, Extend, HaloSlice
from autopar.ir.graph import Node
from autopar.ir.sharding import TensorSharding
from autopar.rules.table import traits_of
from autopar.xla_model.local_program import Instruction
from autopar.xla_model.partition_builder import PartitionBuilder

#: The most moves of keys around a ring that the program has one by one; more are put together.
_MOST_MOVES = 8


class Communications:
    """Creates the instructions of collectives, slices and halo exchanges."""

    def __init__(self, builder: PartitionBuilder) -> None:
        self.b = builder
        self.moved: dict[int, int] = {}  # resharded array -> instruction
        self.halo_slices: dict[HaloSlice, int] = {}

    def operand(self, n: int, index: int) -> tuple[int, TensorSharding]:
        """The instruction that holds a node's operand after resharding, and the operand's sharding."""
        array = self.b.explicit.reads[n, index]
        return self.array_at(array), self.b.explicit.arrays[array].sharding

    def array_at(self, array: int) -> int:
        """The instruction that holds an array."""
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
        """The node of a collective of an instruction's result; for a loop's stacked result, the one after the loop."""
        producer = self.b.producers.get(value, -1)
        is_stack = producer >= 0 and self.b.graph.nodes[producer].primitive == "exit_stack"
        return producer if is_stack else self.b.program.instructions[at].node

    def _reordered(self, at: int, op: Communicate) -> int:
        """Add a copy to or from the order in which a collective along an inner dim concatenates the devices' shards."""
        one = self.b.program.instructions[at]
        return self.b.copied(one.node, one.value, "transpose", {at: 1.0}, one.elements, op.num_bytes / one.elements)

    def extended(self, one: Extend, at: int) -> int:
        """Add the halo exchange of an operand and the kernel that concatenates its slices; users share both."""
        parts = {at: 1.0}
        for halo in one.slices:
            if halo not in self.halo_slices:
                size = float(math.prod(halo.shape))
                cut = self.b.copied(one.node, halo.value, "slice", {at: self.b.share(size, at)}, size, halo.itemsize)
                self.halo_slices[halo] = self.b.add(
                    replace(
                        self.b.program.instructions[cut],
                        kind="collective",
                        primitive=halo.kind,
                        operands={cut: 1.0},
                        collective=halo.kind,
                        axes=halo.axes,
                        payload_bytes=halo.num_bytes,
                    )
                )
            parts[self.halo_slices[halo]] = 1.0
        key = ("extended", tuple(parts), one.window)
        if key not in self.b.known:
            size, value = float(math.prod(one.shape)), self.b.program.instructions[at].value
            if one.slices:
                self.b.known[key] = self.b.copied(one.node, value, "pad", parts, size, one.itemsize)
            else:
                self.b.known[key] = self.b.copied(
                    one.node, value, "slice", {at: self.b.share(size, at)}, size, one.itemsize
                )
        return self.b.known[key]

    def sent_by_program(self, n: int, node: Node, operands: Sequence[int]) -> list[int]:
        """Add the collectives that the user's program runs inside a `shard_map`."""
        sent: list[int] = []
        for op in self._collectives_of(n, "program"):
            size = op.num_times / node.repeat * op.num_bytes
            reads = dict.fromkeys(operands, 1.0)
            one = Instruction("collective", n, -1, op.kind, reads, size / 4, size, collective=op.kind, axes=op.axes)
            one.payload_bytes, one.combinable = size, False
            sent.append(self.b.add(one))
        return sent

    def context(self, n: int) -> Context | None:
        """How devices share the tokens of a node; None if it is no attention whose tokens are split."""
        sent = next(self._collectives_of(n, "context"), None)
        if sent is None:
            return None
        f, (decision,) = self.b.f, sent.decisions
        group = f.groups[f.decisions[decision].group]
        strategy = f.decisions[decision].strategies[self.b.explicit.choices[decision]]
        return context_of(group, strategy, f.graph, f.mesh, f.profile)

    def context_parallel(self, kernel: Instruction, context: Context) -> int:
        """Add an attention whose tokens are split: its collectives, and the calls of its kernel between them. Moves of keys around
        a ring depend on each other, and each call on the move before it, so that they overlap.

        Args:
            kernel: the whole kernel of one device, which is not added yet.

        Returns:
            The instruction of the results.
        """
        profile = self.b.f.profile
        operands = dict(kernel.operands)
        for one in context.sent:
            if not one.is_hidden and not one.is_after:
                for _ in range(one.num_times):
                    operands[self._sent(kernel, one.kind, one.num_bytes, context, kernel.operands)] = 1.0
        hidden = [one for one in context.sent if one.is_hidden]
        moves = min(_MOST_MOVES, sum(one.num_times for one in hidden))
        num_bytes = sum(one.num_bytes * one.num_times for one in hidden) / max(1, moves)
        rate = profile.matrix_rate(kernel.dtype) * kernel.matrix_efficiency
        traffic_flops = (
            context.memory_bytes / profile.memory_bytes_per_s * rate
        )  # the time of merges, as that of matmuls
        flops = ((kernel.dtype, (context.flops + traffic_flops) / (1 + moves)),)
        at = self.b.add(replace(kernel, operands=operands, matrix_flops=flops))
        source = operands
        for _ in range(moves):
            source = {self._sent(kernel, hidden[0].kind, num_bytes, context, source): 1.0}
            at = self.b.add(replace(kernel, operands={**kernel.operands, **source, at: 1.0}, matrix_flops=flops))
        for one in context.sent:
            for _ in range(one.num_times if one.is_after else 0):
                at = self._sent(kernel, one.kind, one.num_bytes, context, {at: 1.0}, kernel.num_bytes)
        return at

    def _sent(
        self,
        kernel: Instruction,
        kind: str,
        payload: float,
        context: Context,
        operands: Mapping[int, float],
        num_bytes: float | None = None,
    ) -> int:
        """Add a collective of an attention."""
        result = payload if num_bytes is None else num_bytes
        elements = kernel.elements * result / max(kernel.num_bytes, 1.0)
        one = Instruction("collective", kernel.node, kernel.value, kind, dict(operands), elements, result)
        one.collective, one.axes, one.payload_bytes, one.dtype = kind, context.axes, payload, kernel.dtype
        return self.b.add(one)

    def combine_partial_results(self, n: int, at: int) -> int:
        """Gather the devices' partial results of a node, and add the instruction that combines them."""
        sent = next(self._collectives_of(n, "region"), None)
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
        """Add the all-reduce of a small result right after the node that produces it."""
        for op in self._collectives_of(n, "reduction"):
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

    def _collectives_of(self, n: int, cause: Cause) -> Iterator[Communicate]:
        """The collectives that belong to a node, of one cause."""
        return (op for op in self.b.explicit.own_communications.get(n, ()) if op.cause == cause)
