"""Kernels that work row by row: a value, a reduction of its rows, and what reads both (XLA's softmax rewriter).

In: `Kernels`. Out: the same, where the subtracted maximum and the division by the sum of a softmax, or a normalization, are
one kernel. Source: openxla/xla, xla/backends/gpu/transforms/softmax_rewriter_triton.cc.
"""

from __future__ import annotations

from autopar.xla_model.kernels import Kernels, is_tiled


def fuse_diamonds(kernels: Kernels) -> None:
    """Join each reduction of rows with what it reads and what reads both."""
    _SoftmaxRewriter(kernels).run()


class _SoftmaxRewriter:
    def __init__(self, kernels: Kernels) -> None:
        self.all = kernels

    def run(self) -> None:
        for i, one in enumerate(self.all.instructions):
            if one.kind != "reduce" or not one.rows or i not in self.all.kernels or len(one.operands) != 1:
                continue
            (source,) = one.operands
            chain = [i]
            while len(self.all.users[chain[-1]]) == 1 and chain[-1] not in self.all.outputs:
                (reader,) = self.all.users[chain[-1]]
                if source in self.all.instructions[reader].operands:
                    if self.all.users[source] == {i, reader} and self._closes(source, reader, chain):
                        self._close(source, reader, chain)
                    break
                if self.all.instructions[reader].kind != "loop" or len(self.all.instructions[reader].operands) > 1:
                    break
                chain.append(reader)

    def _closes(self, source: int, reader: int, chain: list[int]) -> bool:
        one = self.all.instructions[reader]
        whole = one.kind == "loop" and one.elements == self.all.instructions[source].elements
        return whole and all(is_tiled(self.all.instructions[i].primitive) for i in (*chain, reader))

    def _close(self, source: int, reader: int, chain: list[int]) -> None:
        kernel = self.all.kernels[reader]
        for i in chain:
            inner = self.all.kernels.pop(i)
            kernel.flops += inner.flops
            kernel.members += inner.members
            for operand in inner.operands:
                self.all.users[operand].discard(i)
            self.all.users[i] = set()
            kernel.operands.pop(i, None)
        kernel.operands[source] = 1.0
        self.all.users[source] = {reader}
        kernel.tiled = True
