"""Fuse softmax and normalization diamonds into tiled kernels, as XLA's softmax rewriter does.

In: `Kernels`. Out: the same object with each diamond fused: a value, the reduction of its rows, and the operation that
uses both. Source: openxla/xla, xla/backends/gpu/transforms/softmax_rewriter_triton.cc.
"""

from __future__ import annotations

from autopar.xla_model.kernels import LONGEST_ROW, Kernels, is_tiled


def fuse_diamonds(kernels: Kernels) -> None:
    """Fuse each row reduction with the operation that uses both its result and its operand."""
    _SoftmaxRewriter(kernels).run()


class _SoftmaxRewriter:
    def __init__(self, kernels: Kernels) -> None:
        self.all = kernels

    def run(self) -> None:
        for i, one in enumerate(self.all.instructions):
            is_row_sum = one.kind == "reduce" and one.rows and one.reduces <= LONGEST_ROW
            if not is_row_sum or i not in self.all.kernels or len(one.operands) != 1:
                continue
            (source,) = one.operands
            chain = [i]
            while len(self.all.users[chain[-1]]) == 1 and chain[-1] not in self.all.outputs:
                (user,) = self.all.users[chain[-1]]
                if source in self.all.instructions[user].operands:
                    if self.all.users[source] == {i, user} and self._closes(source, user, chain):
                        self._close(source, user, chain)
                    break
                if self.all.instructions[user].kind != "loop" or len(self.all.instructions[user].operands) > 1:
                    break
                chain.append(user)

    def _closes(self, source: int, user: int, chain: list[int]) -> bool:
        one = self.all.instructions[user]
        whole = one.kind == "loop" and one.elements == self.all.instructions[source].elements
        return whole and all(is_tiled(self.all.instructions[i].primitive) for i in (*chain, user))

    def _close(self, source: int, user: int, chain: list[int]) -> None:
        kernel = self.all.kernels[user]
        for i in chain:
            inner = self.all.kernels.pop(i)
            kernel.flops += inner.flops
            kernel.members += inner.members
            for operand in inner.operands:
                self.all.users[operand].discard(i)
            self.all.users[i] = set()
            kernel.operands.pop(i, None)
        kernel.operands[source] = 1.0
        self.all.users[source] = {user}
        kernel.tiled, kernel.tile_row = True, self.all.instructions[chain[0]].reduces
