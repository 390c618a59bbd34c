"""Fold additions as XLA does: reassociate the sum of two reductions over devices, and scatter into an addend.

In: an addition. Out: the instruction that replaces it. Source: openxla/xla, xla/service/all_reduce_reassociate.cc,
xla/service/reduce_scatter_reassociate.cc and XLA's algebraic simplifier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cost.collectives import collective
from autopar.ir.device_program import Reassociated
from autopar.ir.graph import Node
from autopar.rules.table import traits_of
from autopar.xla_model.local_program import Instruction
from autopar.xla_model.partition_builder import PartitionBuilder
from autopar.xla_model.partition_communication import Communications


@dataclass(frozen=True, slots=True)
class _Sum:
    """A reduction over devices with a single user.

    Args:
        at: position of its instruction.
        transposes: permutations of dims between the reduction and that user. XLA moves equal ones behind the sum.
    """

    at: int
    transposes: tuple[tuple[int, ...], ...]


class ReduceReassociate:
    """Folds additions into reductions and scatters.

    Args:
        reassociate: whether `all_reduce(x) + all_reduce(y)` becomes `all_reduce(x + y)` where nothing else uses either, and
            the same for reduce-scatters.

    Attributes:
        made: position of a reassociated reduction -> what it is made of.
    """

    def __init__(self, builder: PartitionBuilder, sent: Communications, *, reassociate: bool) -> None:
        self.b, self.sent, self.reassociate = builder, sent, reassociate
        self.leaving = frozenset(builder.graph.outputs)
        self.made: dict[int, Reassociated] = {}

    def added_up(self, n: int, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]]) -> int | None:
        """The instruction that an addition is folded into; None where XLA keeps the addition."""
        if not traits_of(node.primitive).adds or len(operands) != 2:
            return None
        scattered = self._scattered_sum(node, operands)
        return self._sum_of_sums(n, node) if scattered is None and self.reassociate else scattered

    def _scattered_sum(self, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]]) -> int | None:
        """Rewrite `x + scatter(zeros, …)` to `scatter(x, …)` if nothing else uses the scatter, as XLA does."""
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
        """Rewrite `all_reduce(x) + all_reduce(y)` over the same devices to `all_reduce(x + y)` in the result's dtype, and the same
        for reduce-scatters of one dtype."""
        left, right = (self._single_use_sum(n, index, value) for index, value in enumerate(node.operands))
        if left is None or right is None or left.at == right.at or left.transposes != right.transposes:
            return None
        sums = [self.b.program.instructions[one.at] for one in (left, right)]
        if any(getattr(sums[0], name) != getattr(sums[1], name) for name in ("collective", "axes", "elements")):
            return None
        info = self.b.graph.values[node.results[0]]
        if collective(sums[0].collective).gives_part and {one.dtype for one in sums} != {info.dtype}:
            return None
        elements = sums[0].payload_bytes / sums[0].num_bytes * sums[0].elements  # of one term, on one device
        parts: dict[int, float] = {}
        for one in sums:
            source = next(iter(one.operands))
            if one.dtype != info.dtype:
                own = Instruction("loop", n, one.value, "convert_element_type", {source: 1.0}, elements, 0.0)
                own.num_bytes, own.dtype = elements * info.itemsize, info.dtype
                own.flops = elements * self.b.f.profile.flops_per_element(own.primitive, one.dtype)
                source = self.b.add(own)
            parts[source] = 1.0
        whole = replace(sums[0], node=n, value=node.results[0], dtype=info.dtype)
        whole.num_bytes = whole.elements * info.itemsize
        whole.payload_bytes = sums[0].payload_bytes / sums[0].num_bytes * whole.num_bytes
        total = replace(whole, kind="loop", primitive=node.primitive, operands=parts, elements=elements, collective="")
        total.num_bytes = elements * info.itemsize
        total.flops = elements * self.b.f.profile.flops_per_element(node.primitive, info.dtype)
        whole.operands = {self.b.add(total): 1.0}
        at = self.b.add(whole)
        values = tuple(v for one in (left, right) for v in self._summed(one.at))
        self.made[at] = Reassociated(whole.collective, whole.axes, values, whole.payload_bytes)
        for one in (left, right):
            self.made.pop(one.at, None)
        return at

    def _summed(self, at: int) -> tuple[int, ...]:
        return self.made[at].values if at in self.made else (self.b.program.instructions[at].value,)

    def _single_use_sum(self, n: int, index: int, value: int | None) -> _Sum | None:
        """The reduction that a node reads, possibly through casts and transposes, if nothing else uses it; a reduce-scatter
        through transposes only."""
        if value is None:
            return None
        transposes: list[tuple[int, ...]] = []
        dtype = self.b.graph.values[value].dtype
        while len(self.b.users.get(value, ())) == 1 and value not in self.leaving:
            at, _ = self.sent.operand(n, index)
            sent, above = self.b.program.instructions[at].collective, self._unary(value)
            if sent:
                is_taken = collective(sent).sums_whole or (
                    collective(sent).is_sum and self.b.graph.values[value].dtype == dtype
                )
                return _Sum(at, (*transposes, *self._transposes_above(value))) if is_taken else None
            if above is None or at != self.b.at[value]:
                return None
            transposes += self._transpose(value)
            (n, index), *_ = self.b.users[above]
            value = above
        return None

    def _transposes_above(self, value: int) -> Iterator[tuple[int, ...]]:
        """The transposes of a value, possibly between casts, from the last to the first: XLA moves them behind the reduction."""
        while (above := self._unary(value)) is not None:
            yield from self._transpose(value)
            value = above

    def _transpose(self, value: int) -> list[tuple[int, ...]]:
        """The permutation of the transpose that produces a value; none for another producer."""
        node = self.b.graph.nodes[self.b.producers[value]]
        return [tuple(node.params["permutation"])] if traits_of(node.primitive).permutes else []

    def _unary(self, value: int) -> int | None:
        """The operand of the cast or transpose that produces a value; None for other producers."""
        node = self.b.graph.producer(value)
        traits = traits_of(node.primitive if node is not None else "")
        return node.operands[0] if node is not None and (traits.casts or traits.permutes) else None
