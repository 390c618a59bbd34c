"""Prepare the operands of a matmul on one device: transpose dims into its order, mask padding, copy ragged groups.

In: a `dot_general` or `ragged_dot_general` node and its operands. Out: the prepared operands; `Gemm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.matmul_rows import Order, after_moving, gemm_of, moved_dim, order_of, row_alignment
from autopar.ir.device_program import Gemm
from autopar.ir.explicit_program import Communicate
from autopar.ir.graph import Node, Value
from autopar.rules.contraction import is_matmul
from autopar.rules.table import traits_of
from autopar.xla_model.instruction_kinds import is_outer_product
from autopar.xla_model.local_program import Instruction
from autopar.xla_model.partition_builder import PartitionBuilder
from autopar.xla_model.ragged_dot import dense_product


class DotOperands:
    """Adds the copies that matmuls need; matmuls share equal copies."""

    def __init__(self, builder: PartitionBuilder) -> None:
        self.b = builder
        #: Position of an operand, and the order of its dims in memory -> the copy.
        self.laid_out: dict[tuple[int, tuple[int, ...]], int] = {}

    def prepared(
        self, n: int, node: Node, operands: list[tuple[int, tuple[int, ...]]], shapes: Sequence[tuple[int, ...]]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """The operands of an unfusible kernel, with the copies that a matmul needs."""
        if node.primitive == "ragged_dot_general":
            return self._masked_rows(n, node, operands, shapes[0])
        if node.primitive == "dot_general":
            operands = [(self._in_order(n, node, i, at, shape), shape) for i, (at, shape) in enumerate(operands)]
            return [(self._masked(n, node, i, at, shape), shape) for i, (at, shape) in enumerate(operands)]
        return operands

    def _in_order(self, n: int, node: Node, index: int, at: int, shape: tuple[int, ...]) -> int:
        """Transpose a matmul's operand to the order that the matmul reads, once for all that read the same order."""
        order = _read_order(node, index, shape)
        if order is None:
            return self._of_transposed(n, node, index, at, shape)
        key = at, order
        if key in self.laid_out:
            return self.laid_out[key]
        # XLA assigns one layout to a chain of elementwise operations, so the copy goes where the chain is narrowest.
        chain, narrowest = [at], 0
        while (above := self._only_operand(chain[-1])) is not None:
            chain.append(above)
            if self.b.program.instructions[above].num_bytes < self.b.program.instructions[chain[narrowest]].num_bytes:
                narrowest = len(chain) - 1
        top = chain[narrowest]
        self._copied(n, top, order)
        for below in reversed(chain[:narrowest]):
            one = self.b.program.instructions[below]
            operands = {self.laid_out[top, order] if o == top else o: times for o, times in one.operands.items()}
            self.laid_out[below, order] = self.b.add(replace(one, node=n, operands=operands))
            top = below
        return self.laid_out[key]

    def _copied(self, n: int, at: int, order: tuple[int, ...]) -> int:
        """The copy of an instruction's result in another order of dims."""
        if (at, order) not in self.laid_out:
            one = self.b.program.instructions[at]
            copy = replace(one, kind="loop", node=n, primitive="transpose", operands={at: 1.0}, flops=0.0, gemm=None)
            copy.moves_rows = order[-1] != max(order)
            self.laid_out[at, order] = self.b.add(copy)
        return self.laid_out[at, order]

    def _of_transposed(self, n: int, node: Node, index: int, at: int, shape: Sequence[int]) -> int:
        """The operand that a matmul reads in place of one whose order of dims it takes. XLA transposes also this one to the
        matmul's own order: that is free, unless the operand is a transpose itself, as both become one copy."""
        one, own = self.b.program.instructions[at], _own_order(node, index, shape, is_right=index == 1)
        permutation = self.b.graph.nodes[one.node].params.get("permutation") if one.node >= 0 else None
        if permutation is None or one.value != node.operands[index] or own == sorted(own):
            return at
        (source,) = one.operands
        order = tuple(permutation[d] for d in own)
        return source if order == tuple(sorted(order)) else self._copied(n, source, order)

    def _only_operand(self, at: int) -> int | None:
        """The one full-size operand of an elementwise operation whose other operands are scalars."""
        one = self.b.program.instructions[at]
        traits = traits_of(one.primitive)
        if not (traits.casts or traits.scales) or not one.operands:
            return None
        full = [o for o in one.operands if self.b.program.instructions[o].elements == one.elements]
        small = all(o in full or self.b.program.instructions[o].elements <= 1.0 for o in one.operands)
        return full[0] if len(full) == 1 and small else None

    def _masked(self, n: int, node: Node, index: int, at: int, shape: tuple[int, ...]) -> int:
        """Add a copy of a matmul's operand with zeroed padding, where a contracting dim is sharded unevenly."""
        contracting, _ = node.params["dimension_numbers"]
        value = node.operands[index]
        assert value is not None
        whole = self.b.graph.values[value].shape
        if all(whole[d] % max(shape[d], 1) == 0 for d in contracting[index]):  # an empty batch has no padding
            return at
        source = self.b.program.instructions[at]
        copy = Instruction(
            "loop", n, source.value, "select_n", {at: 1.0}, source.elements, source.num_bytes, dtype=source.dtype
        )
        return self.b.add(copy)

    def _masked_rows(
        self, n: int, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]], result: tuple[int, ...]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Add the masked copies of a ragged dot's operands, one per group; equal copies are shared."""
        dense = dense_product(node.params, operands[0][1], operands[1][1], result)
        found: list[tuple[int, tuple[int, ...]]] = []
        for (at, shape), copies in zip(operands, (*dense.copies, *[0] * len(operands)), strict=False):
            if copies:
                source, key = self.b.program.instructions[at], ("masked rows", at, copies, operands[2][0])
                if key not in self.b.known:
                    one = replace(source, kind="loop", node=n, primitive="select_n", operands={at: float(copies)})
                    one.elements, one.num_bytes = copies * source.elements, copies * source.num_bytes
                    one.flops, one.gemm, one.collective = one.elements * self.b.cheap_flops, None, ""
                    self.b.known[key] = self.b.add(one)
                at = self.b.known[key]
                if dense.concatenated:
                    at = self.b.add(replace(self.b.program.instructions[at], primitive="transpose", operands={at: 1.0}))
                    self.b.program.instructions[at].flops = 0.0
            found.append((at, shape))
        return found

    def gemm(
        self, n: int, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]], shapes: Sequence[tuple[int, ...]]
    ) -> Gemm | None:
        """The matmul that a node computes; None for other nodes.

        Args:
            n: the node's number.
            node: the node.
            operands: position of each operand's instruction, and its local shape.
            shapes: local shapes of the results.
        """
        values: list[Value] = [self.b.graph.values[v] for v in node.operands if v is not None]
        if node.primitive == "ragged_dot_general":
            dense = dense_product(node.params, operands[0][1], operands[1][1], shapes[0])
            result = self.b.graph.values[node.results[0]].dtype
            aligned = self._aligned_bytes(n, node, operands, shapes[0])
            return Gemm(dense.batch, dense.m, dense.n, dense.k, values[0].dtype, result, aligned)
        if not is_matmul(node) or is_outer_product(node):
            return None
        dtypes = values[0].dtype, self.b.graph.values[node.results[0]].dtype
        aligned = self._aligned_bytes(n, node, operands, shapes[0])
        return gemm_of(node.params["dimension_numbers"], operands[0][1], operands[1][1], dtypes, aligned)

    def _aligned_bytes(
        self, n: int, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]], result: tuple[int, ...]
    ) -> tuple[int, int, int]:
        """The alignment of the rows of a matmul's operands and result in memory, by their local shapes."""
        values = [v for v in node.operands[:2] if v is not None]
        left, right = (
            row_alignment(shape, self._order(self.b.explicit.reads[n, i]), self.b.graph.values[value].dtype)
            for i, (value, (_, shape)) in enumerate(zip(values, operands, strict=False))
        )
        made, info = self.b.explicit.made[node.results[0]], self.b.graph.values[node.results[0]]
        order: Order = tuple(range(len(info.shape)))
        sent = self.b.explicit.sent_from.get(made, ())
        order = next((after for op in sent if (after := self._after(op, order)) != order), order)
        return left, right, row_alignment(result, order, info.dtype)

    def _order(self, array: int) -> Order:
        """The order of an array's dims in memory."""
        op, value = self.b.explicit.sent_as.get(array), self.b.explicit.arrays[array].value
        if op is not None and op.cause != "reduction" and op.operand is not None:
            return self._after(op, self._order(op.operand))
        return order_of(self.b.graph, value, lambda n: self._order(self.b.explicit.reads[n, 0]))

    def _after(self, op: Communicate, order: Order) -> Order:
        """The order of the dims of what a collective sends, or cuts, after it."""
        if op.kind in ("cut", "all-reduce"):
            return order
        if op.is_inner or op.operand is None or op.result is None or op.kind not in ("all-gather", "reduce-scatter"):
            return tuple(range(len(order)))
        before, after = (self.b.explicit.arrays[array].sharding for array in (op.operand, op.result))
        dim = moved_dim(before, after)
        return order if dim is None else after_moving(order, dim)


def _read_order(node: Node, index: int, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The order in which XLA copies the dims of a matmul's operand before the matmul; None if the matmul reads the operand
    as it is: batch dims first, and the other two groups each in order, in either sequence."""
    kept = [d for d, size in enumerate(shape) if size != 1]
    left, right = (_own_order(node, index, shape, is_right=is_right) for is_right in (False, True))
    return None if kept in (left, right) else tuple(right if index else left)


def _own_order(node: Node, index: int, shape: Sequence[int], *, is_right: bool) -> list[int]:
    """The order that XLA transposes the dims of a matmul's operand to (DotDecomposer): batch dims, then the remaining dims and
    the contracting dims, which a right operand has before the remaining ones. Dims of one element are left out."""
    contracting, batch = ([d for d in dims[index] if shape[d] != 1] for dims in node.params["dimension_numbers"])
    remaining = [d for d, size in enumerate(shape) if size != 1 and d not in (*contracting, *batch)]
    return [*batch, *contracting, *remaining] if is_right else [*batch, *remaining, *contracting]
