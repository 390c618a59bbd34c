"""Additions that XLA makes no operation of: of two sums over devices, and of zeros that are scattered into.

In: an addition. Out: the instruction that stands for it. Source: openxla/xla, xla/service/all_reduce_reassociate.cc and XLA's algebraic
simplifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost.collectives import collective
from autopar.ir.graph import Node
from autopar.rules.table import traits_of
from autopar.xla_model.local_program import Instruction
from autopar.xla_model.partition_builder import PartitionBuilder
from autopar.xla_model.partition_communication import Communications


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum over devices that one operation alone reads: its instruction, and how its dims are turned until there."""

    at: int
    order: tuple[int, ...]


class AllReduceReassociate:
    """Sums over devices that are added up.

    Args:
        joins: whether they are taken as one, as XLA does where nothing else reads them.

    Attributes:
        values_of: sum of sums -> the values that they are of.
    """

    def __init__(self, builder: PartitionBuilder, sent: Communications, *, joins: bool) -> None:
        self.b, self.sent, self.joins = builder, sent, joins
        self.leaving = frozenset(builder.graph.outputs)
        self.values_of: dict[int, tuple[int, ...]] = {}

    def added_up(self, n: int, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]]) -> int | None:
        """What XLA makes of an addition, where that is not an operation of its own."""
        if not traits_of(node.primitive).adds or len(operands) != 2:
            return None
        scattered = self._scattered_sum(node, operands)
        return self._sum_of_sums(n, node) if scattered is None and self.joins else scattered

    def _scattered_sum(self, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]]) -> int | None:
        """`x + scatter(zeros, …)` scatters into x: XLA's simplifier says so where nothing else reads the scatter."""
        for (at, _), (other, _), value in (
            (*operands, node.operands[0]),
            (*reversed(operands), node.operands[1]),
        ):
            one = self.b.program.instructions[at]
            if not traits_of(one.primitive).scatters_sum or value is None or len(self.b.users.get(value, ())) != 1:
                continue
            zeros = next(iter(one.operands))
            is_uniform = traits_of(self.b.program.instructions[zeros].primitive).uniform
            if not is_uniform or zeros == other or other > at:
                continue
            del one.operands[zeros]
            one.operands = {other: 1.0, **one.operands}
            return at
        return None

    def _sum_of_sums(self, n: int, node: Node) -> int | None:
        """`sum(x) + sum(y)` over the same devices is `sum(x + y)`, in the dtype of the result: so XLA has it where nothing else
        reads either of them (openxla/xla, all_reduce_reassociate.cc)."""
        left, right = (self._sum_read_by(n, index, value) for index, value in enumerate(node.operands))
        if left is None or right is None or left.at == right.at or left.order != right.order:
            return None
        sums = [self.b.program.instructions[one.at] for one in (left, right)]
        if sums[0].axes != sums[1].axes or sums[0].elements != sums[1].elements:
            return None
        info = self.b.graph.values[node.results[0]]
        parts: dict[int, float] = {}
        for one in sums:
            source = next(iter(one.operands))
            if one.dtype != info.dtype:
                own = Instruction("loop", n, one.value, "convert_element_type", {source: 1.0}, one.elements, 0.0)
                own.num_bytes, own.dtype = one.elements * info.itemsize, info.dtype
                own.flops = one.elements * self.b.f.profile.flops_per_element(own.primitive, one.dtype)
                source = self.b.add(own)
            parts[source] = 1.0
        whole = replace(sums[0], node=n, value=node.results[0], dtype=info.dtype)
        whole.num_bytes = whole.elements * info.itemsize
        whole.payload_bytes = sums[0].payload_bytes / sums[0].num_bytes * whole.num_bytes
        flops = whole.elements * self.b.f.profile.flops_per_element(node.primitive, info.dtype)
        whole.operands = {
            self.b.add(
                replace(whole, kind="loop", primitive=node.primitive, operands=parts, flops=flops, collective="")
            ): 1.0
        }
        at = self.b.add(whole)
        self.values_of[at] = tuple(v for one in (left, right) for v in self._summed(one.at))
        for one in (left, right):
            self.values_of.pop(one.at, None)
        return at

    def _summed(self, at: int) -> tuple[int, ...]:
        return self.values_of.get(at, (self.b.program.instructions[at].value,))

    def _sum_read_by(self, n: int, index: int, value: int | None) -> _Sum | None:
        """The sum over devices that a node reads, perhaps cast or turned in between, if nothing else reads it."""
        if value is None:
            return None
        order = tuple(range(len(self.b.graph.values[value].shape)))
        while len(self.b.users.get(value, ())) == 1 and value not in self.leaving:
            at, _ = self.sent.operand(n, index)
            sent, above = self.b.program.instructions[at].collective, self._unary(value)
            if sent:
                return _Sum(at, self._turned(order, value)) if collective(sent).sums_whole else None
            if above is None or at != self.b.at[value]:
                return None
            order = _composed(order, self.b.graph.nodes[self.b.producers[value]])
            (n, index), *_ = self.b.users[above]
            value = above
        return None

    def _turned(self, order: tuple[int, ...], value: int) -> tuple[int, ...]:
        """An order of dims, in that of what a value is computed as."""
        above = self._unary(value)
        return (
            order
            if above is None
            else self._turned(_composed(order, self.b.graph.nodes[self.b.producers[value]]), above)
        )

    def _unary(self, value: int) -> int | None:
        """What a value is, cast or turned."""
        node = self.b.graph.producer(value)
        traits = traits_of(node.primitive if node is not None else "")
        return node.operands[0] if node is not None and (traits.casts or traits.permutes) else None


def _composed(order: tuple[int, ...], node: Node) -> tuple[int, ...]:
    """An order of a result's dims in that of the operand's."""
    return tuple(node.params["permutation"][d] for d in order) if traits_of(node.primitive).permutes else order
