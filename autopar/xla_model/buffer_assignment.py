"""Build the program of one device from a plan, and assign buffers as XLA's buffer assignment does.

In: a formulation, an explicit program. Out: `DeviceProgram`: partitioned (`spmd_partition`), fused (`fusion_pipeline`),
with a buffer for every value in memory. Source: openxla/xla, xla/service/buffer_assignment.cc.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.cost.scatter_traffic import SECTOR_BYTES, accessed_bytes
from autopar.formulate.formulation import Formulation
from autopar.hardware.profile import HardwareProfile
from autopar.ir.device_program import Buffer, DeviceProgram, LoopSpan, Op, OpKind
from autopar.ir.explicit_program import ExplicitProgram
from autopar.ir.graph import Graph
from autopar.rules.table import traits_of
from autopar.xla_model.dot_merger import merge_dots
from autopar.xla_model.fusion_pipeline import fuse
from autopar.xla_model.kernel_work import KernelWork, Work
from autopar.xla_model.kernels import Fused, num_blocks, num_launches
from autopar.xla_model.operand_copies import share_copies
from autopar.xla_model.spmd_partition import Instruction, LocalProgram, local_program

_READS, _WRITES = operator.attrgetter("reads"), operator.attrgetter("writes")


def device_program(f: Formulation, explicit: ExplicitProgram, *, reassociate: bool = True) -> DeviceProgram:
    """The program of one device.

    Args:
        reassociate: whether to apply XLA's reassociation of reductions.
    """
    local, profile = local_program(f, explicit, reassociate=reassociate), f.profile
    loops = tuple(LoopSpan(loop.start, loop.stop, loop.num_iterations) for loop in f.graph.loops)
    if profile.platform == "gpu":
        merge_dots(local, f.graph)
        share_copies(local, f.graph)
    kernels = fuse(local, profile, f.graph)
    inner_axes = _inner_axes(f, explicit, local) if profile.platform == "gpu" else {}
    made = _Builder(local, kernels, profile, loops, f.graph, inner_axes).build()
    separate = tuple(kernel.separate for kernel in kernels if kernel.separate)
    return replace(made, ops=_with_whole_barriers(made.ops, f.graph), unfused=separate, reassociated=local.reassociated)


def _inner_axes(f: Formulation, explicit: ExplicitProgram, local: LocalProgram) -> dict[int, set[str]]:
    """The mesh axes that split an inner dim of updated state, by the position of the instruction that updates it.

    A dim is inner if a device has more than one element outside it; the solver prices copies by the same rule
    (`cost.resharding_matrix`).
    """
    found = dict[int, set[str]]()
    for _, after in f.graph.carried:
        array, at = explicit.outputs[after], local.outputs[after]
        if array is None or at is None:
            continue
        state = explicit.arrays[array]
        shape = state.sharding.local_shape(f.graph.values[state.value].shape, f.mesh)
        inner = (axes for dim, axes in enumerate(state.sharding.dims) if math.prod(shape[:dim]) > 1)
        found[at] = {axis for axes in inner for axis in axes}
    return found


def _with_whole_barriers(ops: Sequence[Op], graph: Graph) -> tuple[Op, ...]:
    """Merge the pieces of each optimization barrier: all its operands are computed before any user of a result runs."""
    of_node = {node: n for n, (start, stop) in enumerate(graph.barriers) for node in range(start, stop)}
    first: dict[int, int] = {}
    barrier: dict[int, int] = {}  # piece -> first piece of its barrier
    for n, op in enumerate(ops):
        if op.kind == "border" and op.node in of_node:
            barrier[n] = first.setdefault(of_node[op.node], n)
    if not barrier:
        return tuple(ops)
    pieces: dict[int, list[int]] = defaultdict(list)
    for n in range(len(ops)):
        pieces[barrier.get(n, n)].append(n)
    written: dict[int, int] = {}
    needs: dict[int, list[int]] = defaultdict(list)
    for n, op in enumerate(ops):
        needs[barrier.get(n, n)] += [written[b] for b in (*op.reads, *op.writes) if b in written]
        written |= dict.fromkeys(op.writes, barrier.get(n, n))
    out: list[Op] = []
    seen: set[int] = set()

    def add(unit: int) -> None:
        if unit in seen:
            return
        seen.add(unit)
        for needed in needs[unit]:
            add(needed)
        parts = [ops[n] for n in pieces[unit]]
        reads, writes = (dict.fromkeys(b for op in parts for b in all_of(op)) for all_of in (_READS, _WRITES))
        out.append(parts[0] if len(parts) == 1 else replace(parts[-1], reads=tuple(reads), writes=tuple(writes)))

    for n in range(len(ops)):
        if n == pieces[barrier.get(n, n)][-1]:
            add(barrier.get(n, n))
    return tuple(out)


class _Builder:
    """Assigns a buffer to every value in memory.

    An in-place operation shares the buffer of its first operand if nothing reads that later: a temporary, or carried
    state that the operation updates.
    """

    def __init__(
        self,
        local: LocalProgram,
        kernels: Sequence[Fused],
        profile: HardwareProfile,
        loops: tuple[LoopSpan, ...],
        graph: Graph,
        inner_axes: Mapping[int, Collection[str]],
    ) -> None:
        self.instructions, self.kernels, self.loops = local.instructions, kernels, loops
        self.inner_axes = inner_axes
        self.profile = profile
        self.work = KernelWork(local.instructions, profile.xla_estimator) if profile.platform == "gpu" else None
        self.graph, self.values = graph, graph.values
        self.order_of_outputs = [at for at in local.outputs if at is not None]
        self.outputs = set(self.order_of_outputs)
        self.home = {root: n for n, kernel in enumerate(kernels) for root in kernel.roots}
        self.last_read = {operand: n for n, kernel in enumerate(kernels) for operand in kernel.operands}
        self.in_place_roots = self._in_place_roots(local, graph.carried)
        self.buffers: list[Buffer] = []
        self.buffer_of: dict[int, int] = {}

    def build(self) -> DeviceProgram:
        for at in dict.fromkeys(at for at in self.order_of_outputs if at in self.home):
            self._own_buffer(at)
        for at, one in enumerate(self.instructions):
            if one.kind == "argument":
                self._own_buffer(at)
        ops = []
        for n, kernel in enumerate(self.kernels):
            for root in kernel.roots:
                if root in self.outputs:
                    continue
                shared = self._shared_with(root, n)
                if shared is None:
                    self._own_buffer(root)
                else:
                    self.buffer_of[root] = self.buffer_of[shared]
            op = self._op(kernel, n)
            ops += self._with_copies(op, kernel) if self._transposes_state(kernel) else [op]
        return DeviceProgram(tuple(ops), tuple(self.buffers), self.loops)

    def _own_buffer(self, at: int) -> None:
        one = self.instructions[at]
        self.buffer_of[at] = len(self.buffers)
        moved = bool(one.collective) or one.primitive == "cut"
        self.buffers.append(Buffer(one.num_bytes, one.value, one.kind == "argument", at in self.outputs, moved))

    def _transposes_state(self, kernel: Fused) -> bool:
        """Whether a kernel updates state from a gradient that was scattered along an inner dim of the state.

        A reduce-scatter leaves the scattered dim outermost in memory.
        """
        split = set().union(*(self.inner_axes.get(root, ()) for root in kernel.roots))
        read = [self.instructions[operand] for operand in kernel.operands]
        return any(one.collective == "reduce-scatter" and not split.isdisjoint(one.axes) for one in read)

    def _with_copies(self, op: Op, kernel: Fused) -> list[Op]:
        """The kernel, and a copy of each result: XLA lets no transposing kernel write into the buffers that it reads."""
        own, copies = [], []
        for root, output in zip(kernel.roots, op.writes, strict=True):
            one = self.instructions[root]
            own.append(len(self.buffers))
            self.buffers.append(Buffer(one.num_bytes, one.value))
            size = one.num_bytes
            copies.append(Op("fusion", one.node, (own[-1],), (output,), size, size, dtype=one.dtype, unpriced=True))
        return [replace(op, writes=tuple(own)), *copies]

    def _shared_with(self, root: int, n: int) -> int | None:
        one = self.instructions[root]
        if one.kind == "border" and one.operands and one.value >= 0:
            return next(iter(one.operands))
        return next(iter(one.operands)) if root not in self.outputs and self._is_in_place(root, n) else None

    def _is_in_place(self, root: int, n: int) -> bool:
        """Whether kernel n writes into its first operand's buffer instead of a copy."""
        one = self.instructions[root]
        if one.kind != "inplace":
            return False
        if root in self.in_place_roots:
            return True
        first = next(iter(one.operands))
        is_free = first in self.home and first not in self.outputs
        return is_free and self.instructions[first].num_bytes == one.num_bytes and self.last_read[first] == n

    def _in_place_roots(self, local: LocalProgram, carried: Sequence[tuple[int, int]]) -> set[int]:
        """The in-place writes between carried state and its updated output. A chain of them counts only if none needs a
        copy, since the last result has to be in the state's buffer."""
        found: set[int] = set()
        for before, after in carried:
            at, chain, is_free = local.outputs[after], list[int](), True
            while at is not None and (one := self.instructions[at]).kind in ("inplace", "border") and one.operands:
                first = next(iter(one.operands))
                is_free &= one.kind == "border" or self.last_read[first] == self.home[at]
                chain += [at] if one.kind == "inplace" else []
                at = first
            if is_free and at is not None and at == local.arguments.get(before):
                found |= set(chain)
        return found

    def _read(self, work: Work) -> tuple[float, float, float]:
        """Bytes read from memory, again from the device's cache, and again from the cores' caches."""
        first = again = near = 0.0
        for operand, times in work.reads.items():
            size = self.instructions[operand].num_bytes
            first += size * min(times, 1.0)
            rest = size * max(times - 1.0, 0.0)
            if size < self.profile.near_cache_bytes:
                near += rest
            elif size < self.profile.cache_bytes:
                again += rest
            else:
                first += rest
        return first, again, near

    def _op(self, kernel: Fused, n: int) -> Op:
        one = self.instructions[kernel.roots[0]]
        work = analyzed = Work(kernel.flops, kernel.operands)
        if self.work is not None:
            work, analyzed = self.work.emitted(kernel), self.work.analyzed(kernel)
        first, reread, small = emitted = self._read(work)
        recounted = tuple(counted - read for counted, read in zip(self._read(analyzed), emitted, strict=True))
        written = sum(self.instructions[root].num_bytes for root in kernel.roots)
        in_place = traits_of(one.primitive).in_place
        if in_place == "slice":  # XLA's estimator counts the updated slice only
            target = next(iter(one.operands))
            first -= min(self.instructions[target].num_bytes, first)
            written = min(written, 2 * first)
        if in_place == "window":  # zeros, then a sector read and written for each element that is scattered
            source = self.instructions[list(one.operands)[-1]]
            written += max(written, 2 * SECTOR_BYTES * source.elements)
        spared = indexed = 0.0
        if in_place == "scatter" and (updates := self.graph.nodes[one.node].operands[-1]) is not None:
            per_element = accessed_bytes(self.graph.nodes[one.node], self.graph.values[updates])
            indexed = per_element * self.instructions[list(one.operands)[-1]].elements
        if in_place == "scatter" and self._is_in_place(kernel.roots[0], n):
            target, *others = (self.instructions[operand].num_bytes for operand in one.operands)
            changed = min(target, others[1] if len(others) > 1 else 0.0)  # operands: target, indices, updates
            first, written, spared = max(first - target, 0.0) + changed, changed, target - changed
        return Op(
            kind=_kind(one),
            node=one.node,
            reads=tuple(self.buffer_of[o] for o in kernel.operands),
            writes=tuple(self.buffer_of[root] for root in kernel.roots),
            read_bytes=first,
            reread_bytes=reread,
            broadcast_bytes=small,
            recounted_bytes=(recounted[0], recounted[1], recounted[2]),
            written_bytes=written,
            spared_bytes=spared,
            indexed_bytes=indexed,
            flops=work.flops,
            counted_flops=analyzed.flops,
            scattered_rows=self.work is not None and self.work.has_scattered_rows(kernel, self.values),
            fills_registers=self.work is not None and self.work.fills_registers(kernel, self.values),
            matrix_flops=one.matrix_flops,
            matrix_efficiency=one.matrix_efficiency,
            num_nodes=len(kernel.members),
            gemm=one.gemm or one.convolution,
            dtype=one.dtype,
            collective=one.collective,
            axes=one.axes,
            payload_bytes=one.payload_bytes,
            combinable=one.combinable,
            unpriced=kernel.tiled or (_kind(one) == "other"),
            num_launches=num_launches(self.instructions, kernel.roots),
            num_blocks=0.0 if kernel.tiled else num_blocks(self.instructions, kernel.roots, kernel.operands),
            overwrites=tuple(self.buffer_of[o] for o in kernel.operands if self._may_overwrite(o, kernel)),
        )

    def _may_overwrite(self, operand: int, kernel: Fused) -> bool:
        """Whether a kernel may write a result into an operand's memory, as XLA's alias analysis decides.

        All that the kernel computes from the operand has to be elementwise, but for one reduction, which a kernel
        computes first. An all-reduce runs in place.
        """
        one = self.instructions[operand]
        if self.profile.platform != "gpu" or operand not in self.home or operand in self.outputs or kernel.tiled:
            return False
        if self.instructions[kernel.roots[0]].collective:
            return self.instructions[kernel.roots[0]].collective == "all-reduce"
        computed, sums = {operand}, 0
        for at in sorted(set(kernel.members)):
            made = self.instructions[at]
            above = [self.instructions[o] for o in made.operands if o in computed]
            if not above:
                continue
            if made.kind == "reduce":
                sums += 1
                continue
            traits = traits_of(made.primitive)
            has_its_shape = all(each.elements == made.elements for each in above)
            if made.kind != "loop" or not traits.elementwise or not has_its_shape:
                return False
            computed.add(at)
        return sums <= 1 and any(
            root in computed and self.instructions[root].num_bytes == one.num_bytes for root in kernel.roots
        )


def _kind(one: Instruction) -> OpKind:
    if one.kind in ("collective", "border"):
        return one.kind
    if one.gemm is not None:
        return "gemm"
    if one.primitive == "conv_general_dilated":
        return "convolution"
    return "other" if one.kind == "unfusible" else "fusion"
