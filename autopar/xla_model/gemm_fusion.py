"""Fuse casts and scalings into the prologue and epilogue of matmuls: a model of XLA's GEMM fusion.

In: `Kernels`. Out: the same object with casts and scalings inside matmuls. Source: openxla/xla,
xla/backends/gpu/transforms/gemm_fusion.cc and xla/backends/gpu/transforms/gemm_rewriter.cc.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.rules.table import traits_of
from autopar.xla_model.kernels import Kernels

_TOLERATED_BYTES = 1024  # an operation may read this much more than it writes and still fuse into a matmul
#: Primitives that a matmul's prologue computes, besides casts and scalings.
_READ_THROUGH = frozenset(["abs", "max", "min", "exp", "log", "tanh", "sqrt", "rsqrt", "slice", "integer_pow"])


def fuse_into_gemms(kernels: Kernels) -> None:
    """Fuse prologues and epilogues into matmuls.

    A prologue (a cast to a wider dtype, a scaling) fuses unless it shrinks the operand. An epilogue fuses if it is the
    matmul's only user and shrinks the result (a cast to a narrower dtype).
    """
    _GemmFusion(kernels).run()
    kernels.drop_dead()


class _GemmFusion:
    def __init__(self, kernels: Kernels) -> None:
        self.all = kernels

    def run(self) -> None:
        for i, one in enumerate(self.all.instructions):
            if one.gemm is None or i not in self.all.kernels:
                continue
            for operand in list(one.operands):
                source = operand
                while (above := self._read_through(source)) is not None:
                    source = above
                if source != operand:
                    self._read_instead(i, operand, source)
            self._write_smaller(i)

    def _read_through(self, at: int) -> int | None:
        """The largest operand of an instruction that fuses into a matmul's prologue; None for other instructions."""
        one = self.all.instructions[at]
        traits = traits_of(one.primitive)
        if one.kind != "loop" or not (traits.casts or traits.scales or one.primitive in _READ_THROUGH):
            return None
        read = sum(self.all.instructions[o].num_bytes for o in one.operands)
        if not one.operands or read - one.num_bytes > _TOLERATED_BYTES:
            return None
        return max(one.operands, key=lambda o: self.all.instructions[o].num_bytes)

    def _read_instead(self, i: int, operand: int, source: int) -> None:
        for operands in (self.all.instructions[i].operands, self.all.kernels[i].operands):
            del operands[operand]
            operands[source] = 1.0
        self.all.users[operand].discard(i)
        self.all.users[source].add(i)

    def _write_smaller(self, i: int) -> None:
        """Fuse the epilogue of a matmul: casts to fewer bytes, possibly of the scaled result."""
        self._cast_before_transpose(i)
        while (epilogue := self.all.only_user(i)) is not None:
            one = self.all.instructions[epilogue]
            narrower = (traits_of(one.primitive).casts or one.primitive == "slice") and len(one.operands) == 1
            scaled = self._is_scaling(epilogue) and self._is_cast_at_once(epilogue)
            if one.kind != "loop" or not (narrower or scaled) or one.num_bytes > self.all.instructions[i].num_bytes:
                return
            matmul = self.all.instructions[i]
            gemm = replace(matmul.gemm, out_dtype=one.dtype) if matmul.gemm else None
            self.all.instructions[i] = replace(
                matmul, num_bytes=one.num_bytes, elements=one.elements, dtype=one.dtype, gemm=gemm
            )
            for user in list(self.all.users[epilogue]):
                for operands in (self.all.instructions[user].operands, self.all.kernels[user].operands):
                    if epilogue in operands:
                        operands[i] = operands.pop(epilogue)
                self.all.users[i].add(user)
            self.all.users[i].discard(epilogue)
            for scalar in one.operands.keys() - {i}:
                self.all.users[scalar].discard(epilogue)
            self.all.users[epilogue] = set()
            del self.all.kernels[epilogue]
            if epilogue in self.all.outputs:
                self.all.outputs.discard(epilogue)
                self.all.outputs.add(i)
                self.all.renamed[epilogue] = i

    def _cast_before_transpose(self, i: int) -> None:
        """Move a narrowing cast of a matmul's result in front of transposes, which become layouts."""
        chain = [i]
        while (after := self.all.only_user(chain[-1])) is not None and (
            self._is_transpose(after) or self._is_scaling(after)
        ):
            chain.append(after)
        if after is None or not self._narrows(after):
            return
        places = [*chain[1:], after]
        moved = [at for at in places if self._is_transpose(at)]
        order = [at for at in places if at not in moved] + moved
        read = dict(zip(places, chain, strict=True))
        cast, ones = (
            self.all.instructions[after],
            [(at, self.all.instructions[at], self.all.kernels[at].flops) for at in order],
        )
        for at, (was, one, flops) in zip(places, ones, strict=True):
            operands = {read[at] if o == read[was] else o: count for o, count in one.operands.items()}
            for scalar in operands.keys() - {read[at]}:
                self.all.users[scalar] = self.all.users[scalar] - {was} | {at}
            narrow = {"num_bytes": cast.num_bytes, "dtype": cast.dtype} if was in moved else {}
            self.all.instructions[at] = replace(one, operands=operands, **narrow)
            self.all.kernels[at].flops, self.all.kernels[at].operands = flops, dict(operands)

    def _is_transpose(self, i: int) -> bool:
        return traits_of(self.all.instructions[i].primitive).permutes

    def _is_scaling(self, i: int) -> bool:
        """Whether an instruction scales one large operand by a scalar."""
        one = self.all.instructions[i]
        large = [o for o in one.operands if self.all.instructions[o].elements > 1]
        return one.kind == "loop" and traits_of(one.primitive).scales and len(large) == 1

    def _is_cast_at_once(self, i: int) -> bool:
        """Whether the only user of an instruction is a cast to fewer bytes, or a scaling followed by one."""
        after = self.all.only_user(i)
        return after is not None and (
            self._narrows(after) or (self._is_scaling(after) and self._is_cast_at_once(after))
        )

    def _narrows(self, i: int) -> bool:
        """Whether an instruction is a cast to fewer bytes."""
        one = self.all.instructions[i]
        is_cast = one.kind == "loop" and traits_of(one.primitive).casts and len(one.operands) == 1
        return is_cast and one.num_bytes < sum(self.all.instructions[o].num_bytes for o in one.operands)
