"""Classify an equation as XLA emits it on one device: bitcast, loop, reduction, in-place update or library call.

In: a node and its operands. Out: its `InstructionKind`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.matmul_rows import swaps_halves
from autopar.ir.graph import Node
from autopar.rules.node_view import NodeView
from autopar.rules.table import RULES, rule_for, traits_of
from autopar.xla_model.local_program import InstructionKind
from autopar.xla_model.partition_builder import PartitionBuilder


class InstructionKinds:
    """Classifies a graph's nodes; the kind of some depends on their producers and users."""

    def __init__(self, builder: PartitionBuilder) -> None:
        self.b = builder

    def kind(self, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]]) -> InstructionKind:
        """The kind of a node.

        Args:
            node: the node.
            operands: position of each operand's instruction, and its local shape.
        """
        traits = traits_of(node.primitive)
        if is_outer_product(node):
            return "loop"
        if traits.library or node.effect or not node.results or self._is_opaque(node):
            return "unfusible"
        if not operands:
            return "loop"
        if traits.view:
            return "alias"
        result = self.b.graph.values[node.results[0]] if node.results else None
        first = next((self.b.graph.values[v] for v in node.operands if v is not None), None)
        if result is not None and first is not None:
            if traits.casts and result.dtype == first.dtype:
                return "alias"
            if traits.uniform and result.size == first.size:
                return "alias"
            if traits.permutes and self._is_layout(node, operands[0][1]):
                return "alias"
        if traits.reduces:
            if result is None or first is None or result.size != first.size:
                return "reduce"
            return "alias" if traits.terms else "loop"  # a reduction of dims of one element is a reshape
        if traits.in_place:
            return "inplace"
        return "loop"

    def _is_opaque(self, node: Node) -> bool:
        """Whether a node is known by its counted work alone, or not at all: it is priced as one kernel."""
        if "work" in node.params:
            return True
        return node.primitive not in RULES and rule_for(NodeView.of(node, self.b.graph)) is None

    def _is_layout(self, node: Node, shape: Sequence[int]) -> bool:
        """Whether a transpose copies nothing: it moves dims of one element alone, or a matmul is next to it, which reads
        operands and writes results in either memory layout."""
        moved = _without_units(node.params["permutation"], shape)
        if moved == sorted(moved) or self._of_outer_product(node.operands[0]):
            return True
        next_to_dot = self._from_dot(node.operands[0]) or self._feeds_dots(node.results[0])
        return next_to_dot and swaps_halves(moved)

    def _from_dot(self, value: int | None) -> bool:
        return value is not None and self.b.program.instructions[self.b.at[value]].gemm is not None

    def _of_outer_product(self, value: int | None) -> bool:
        """Whether an outer product makes a value; it may write its dims in any order."""
        if value is None:
            return False
        one = self.b.program.instructions[self.b.at[value]]
        return one.node >= 0 and one.value == value and is_outer_product(self.b.graph.nodes[one.node])

    def _feeds_dots(self, value: int) -> bool:
        """Whether all users of a value are matmuls, possibly through reshapes and transposes."""
        for n, _ in self.b.users.get(value, ()):
            user = self.b.graph.nodes[n]
            if user.primitive == "dot_general":
                continue
            traits = traits_of(user.primitive)
            if not (traits.one_to_one and (traits.view or traits.permutes)):
                return False
            if not self._feeds_dots(user.results[0]):
                return False
        return value in self.b.users


def is_outer_product(node: Node) -> bool:
    """Whether a node is a `dot_general` without contracting dims: XLA rewrites it to a multiply (DotDecomposer)."""
    return node.primitive == "dot_general" and not node.params["dimension_numbers"][0][0]


def _without_units(permutation: Sequence[int], shape: Sequence[int]) -> list[int]:
    """A permutation of the dims that have more than one element.

    >>> _without_units((3, 0, 1, 2), (64, 12, 512, 1)), _without_units((1, 2, 0), (4, 1, 8))
    ([0, 1, 2], [1, 0])
    """
    kept = [dim for dim, size in enumerate(shape) if size != 1]
    return [kept.index(dim) for dim in permutation if dim in kept]
