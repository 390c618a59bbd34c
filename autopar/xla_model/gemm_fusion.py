"""Fuse elementwise operations into the prologue and epilogue of matmuls: a model of XLA's GEMM fusion.

In: `Kernels`. Out: the same object with prologues and epilogues inside matmuls. Source: openxla/xla,
xla/backends/gpu/transforms/gemm_fusion.cc and xla/backends/gpu/transforms/gemm_rewriter.cc.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.ir.graph import Graph
from autopar.rules.table import traits_of
from autopar.xla_model.kernels import Kernels

_TOLERATED_BYTES = 1024  # an operation may read this much more than it writes and still fuse into a matmul
#: Primitives that a matmul's prologue computes, besides casts and scalings.
_READ_THROUGH = frozenset(["abs", "max", "min", "exp", "log", "tanh", "sqrt", "rsqrt", "slice", "integer_pow"])
#: Primitives that a matmul's epilogue computes, besides sums and scalings. XLA expands others to several reads of an operand.
_EPILOGUE = frozenset(["abs", "max", "min", "exp", "log", "tanh", "sqrt", "rsqrt", "logistic", "sub"])
#: Kinds of instructions whose results are in memory when a matmul runs.
_STORED = frozenset(["argument", "collective", "reduce", "unfusible"])


def fuse_into_gemms(kernels: Kernels, graph: Graph | None) -> None:
    """Fuse prologues and epilogues into matmuls.

    A prologue (a cast to a wider dtype, a scaling) fuses unless it shrinks the operand. An epilogue fuses if it is the
    matmul's only user, does not grow the result, and reads nothing else that is still to be computed: a cast to a narrower
    dtype, an activation, the sum with a bias that is a parameter or gathered from the devices, the sum of two matmuls.
    """
    _GemmFusion(kernels, graph).run()
    kernels.drop_dead()


class _GemmFusion:
    def __init__(self, kernels: Kernels, graph: Graph | None) -> None:
        self.all, self.graph = kernels, graph

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
            self._fuse_epilogue(i)

    def _read_through(self, at: int) -> int | None:
        """The largest operand of an instruction that fuses into a matmul's prologue; None for other instructions."""
        one = self.all.instructions[at]
        traits = traits_of(one.primitive)
        if one.kind != "loop" or not (traits.casts or traits.scales or one.primitive in _READ_THROUGH):
            return None
        operands = [o for o in one.operands if not self._is_uniform(o)]
        read = sum(self.all.instructions[o].num_bytes for o in operands)
        if not operands or read - one.num_bytes > _TOLERATED_BYTES:
            return None
        return max(operands, key=lambda o: self.all.instructions[o].num_bytes)

    def _is_uniform(self, at: int) -> bool:
        """Whether all elements of an instruction's result are one scalar: XLA reads the scalar."""
        one = self.all.instructions[at]
        traits = traits_of(one.primitive)
        is_same = one.kind == "loop" and (traits.uniform or traits.casts)
        return one.elements <= 1 or (is_same and all(map(self._is_uniform, one.operands)))

    def _read_instead(self, i: int, operand: int, source: int) -> None:
        for operands in (self.all.instructions[i].operands, self.all.kernels[i].operands):
            del operands[operand]
            operands[source] = 1.0
        self.all.users[operand].discard(i)
        self.all.users[source].add(i)

    def _fuse_epilogue(self, i: int) -> None:
        """Fuse what follows a matmul: the matmul takes the place of its only user, as long as that fits."""
        self._cast_before_transpose(i)
        while (after := self.all.only_user(i)) is not None and self._fits(i, after):
            self._move(i, after)
            i = after

    def _fits(self, i: int, after: int) -> bool:
        """Whether the only user of a matmul fuses into it."""
        one, matmul = self.all.instructions[after], self.all.instructions[i]
        if one.kind != "loop" or one.num_bytes > matmul.num_bytes:
            return False
        traits = traits_of(one.primitive)
        is_slice = traits.moves == "fixed" and one.elements < matmul.elements
        if len(one.operands) == 1 and (traits.casts or is_slice):
            return True
        if self._is_scaling(after) and self._is_cast_at_once(after):
            return True
        is_computed = traits.adds or traits.scales or one.primitive in _EPILOGUE
        return is_computed and one.elements == matmul.elements and self._reads_stored(i, after)

    def _reads_stored(self, i: int, after: int) -> bool:
        """Whether an elementwise user of a matmul reads its result once, and else only literals and what is in memory already:
        whole arrays, and vectors along the innermost dim. XLA fuses no computation of another operand into a matmul."""
        if self.graph is None:
            return False
        one, matmul = self.all.instructions[after], self.all.instructions[i]
        values = [v for v in self.graph.nodes[one.node].operands if v is not None]
        if values.count(matmul.value) != 1 or len(values) != len(one.operands):
            return False
        info = self.graph.values
        for value, at in zip(values, one.operands, strict=True):
            if at == i or self._is_literal(at):
                continue
            shape, whole = info[value].shape, info[one.value].shape
            is_vector = shape[-1:] == whole[-1:] and info[value].size == math.prod(whole[-1:])
            first_matmul = next(o for o in one.operands if self.all.instructions[o].gemm is not None)
            if self.all.instructions[at].kind not in _STORED or not (is_vector or shape == whole) or first_matmul != i:
                return False
        return True

    def _is_literal(self, at: int) -> bool:
        """Whether an instruction computes nothing but a literal of the program, of any shape."""
        return self._is_uniform(at) and all(map(self._is_literal, self.all.instructions[at].operands))

    def _move(self, i: int, after: int) -> None:
        """Give a matmul the place of its user, which it computes."""
        one, matmul = self.all.instructions[after], self.all.instructions[i]
        others = {o: 1.0 for o in one.operands if o != i and not self._is_uniform(o)}
        operands = {**matmul.operands, **others}
        self.all.instructions[after] = replace(
            matmul,
            value=one.value,
            operands=operands,
            num_bytes=one.num_bytes,
            elements=one.elements,
            dtype=one.dtype,
            gemm=replace(matmul.gemm, out_dtype=one.dtype) if matmul.gemm else None,
        )
        kernel = self.all.kernels.pop(i)
        self.all.kernels[after] = replace(kernel, roots=[after], operands=dict(operands), members=[after])
        for operand in {*matmul.operands, *one.operands}:
            self.all.users[operand] -= {i, after}
        for operand in operands:
            self.all.users[operand].add(after)

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
