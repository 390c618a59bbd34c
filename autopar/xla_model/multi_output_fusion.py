"""Fuse kernels over the same iteration space into one with several outputs: a model of XLA's multi-output fusion.

In: kernels, keyed by the instruction whose result each writes. Out: kernels in topological order. Source: openxla/xla,
xla/backends/gpu/transforms/multi_output_fusion.cc and xla/service/gpu/gpu_fusible.cc, read in November 2026.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.rules.table import traits_of
from autopar.xla_model.kernel_work import KernelWork
from autopar.xla_model.kernels import LAUNCH_S, MOST_OPERANDS, Fused, KernelPrice, num_blocks
from autopar.xla_model.local_program import Instruction, LocalProgram

_MOST_SUMS = 8  # reductions in one kernel
#: Shared memory of a thread block, and what a column and a row reduction take of it.
_SHARED_BYTES, _COLUMN_CACHE_BYTES, _ROW_CACHE_BYTES = 49152, 32 * 129 * 4, 32 * 4
_WORTH_SEPARATING_S = 5e-6


class _Computed:
    """Finds the graph's nodes that a kernel computes."""

    def __init__(self, program: LocalProgram, graph: Graph) -> None:
        self.program, self.graph = program, graph

    def nodes(self, kernel: Fused) -> tuple[int, ...]:
        """The nodes between a kernel's operands and its results, in order; empty where the kernel also computes
        something without a node, such as the slice of a value to a device's shard."""
        producers = self.graph.producers
        inside, found = set(kernel.members), set[int]()
        left = [n for root in kernel.roots for n in self.program.nodes[root]]
        while left:
            n = left.pop()
            if n in found:
                continue
            found.add(n)
            for value in self.graph.nodes[n].operands:
                at = None if value is None else self.program.at.get(value)
                if value is None or at in kernel.operands:
                    continue
                if at not in inside or value not in producers or self.graph.nodes[producers[value]].effect:
                    return ()
                left.append(producers[value])
        return tuple(sorted(found))


class MultiOutputFusion:
    """Fuses kernels over the same iteration space, from the last value to the first.

    Siblings (kernels that read the same value) fuse at any price. A loop fuses with a user of its result if no third
    kernel lies on a path between them and the fusion takes no longer.
    """

    def __init__(
        self, program: LocalProgram, kernels: dict[int, Fused], profile: HardwareProfile, graph: Graph | None
    ) -> None:
        self.instructions = program.instructions
        self.price = KernelPrice(program.instructions, profile)
        self.work = KernelWork(program.instructions, profile.xla_estimator)
        self.kernels = kernels
        self.computed = _Computed(program, graph) if graph else None
        self.outputs = {at for at in program.outputs if at is not None}
        self.home = {i: i for i in kernels}  # instruction in memory -> the kernel that writes it
        self.users: dict[int, set[int]] = defaultdict(set)
        for i, kernel in kernels.items():
            for operand in kernel.operands:
                self.users[operand].add(i)
        self.above: dict[int, int] = {}  # kernel -> bit set of all kernels that it depends on
        for i, kernel in kernels.items():
            bits = 0
            for operand in kernel.operands:
                if operand in kernels:
                    bits |= self.above[operand] | 1 << operand
            self.above[i] = bits

    def run(self) -> list[Fused]:
        for source in reversed(range(len(self.instructions))):
            one = self.instructions[source]
            if one.elements > 1.0 and one.gemm is None and len(self.users[source]) > 1:  # not users of a Triton matmul
                self._fuse_siblings(source)
            if source in self.kernels:
                self._fuse_with_user(source)
        return self._ordered()

    def _same_points(self, a: int, b: int) -> bool:
        """Whether two kernels have the same iteration space; two reductions must also reduce the same dims."""
        one, other = self._points(a), self._points(b)
        if one is None or other is None or one[0] != other[0]:
            return False
        if "reduce" in (one[1], other[1]) and "transpose" in (one[1], other[1]):
            return False
        return one == other if one[1] == other[1] else True

    def _points(self, i: int) -> tuple[float, str, float] | None:
        """The size of a kernel's iteration space, the emitter of its main root, and the points per result of a
        reduction; None where multi-output fusion does not apply."""
        kernel = self.kernels[i]
        if kernel.tiled:
            return None
        roots = [self.instructions[root] for root in kernel.roots]
        main = next((one for one in roots if one.kind == "reduce"), roots[0])
        if main.kind == "reduce":
            return main.elements * main.reduces, "reduce", main.reduces
        if main.kind == "loop":
            return main.elements, "transpose" if traits_of(main.primitive).permutes else "loop", 1.0
        return None

    def _independent(self, a: int, b: int) -> bool:
        return not (self.above[a] >> b & 1 or self.above[b] >> a & 1)

    def _preferred(self, users: Iterable[int]) -> list[int]:
        """Kernels in the order in which XLA fuses others into them: those with several outputs first."""

        def rank(i: int) -> int:
            return -2 if len(self.kernels[i].roots) > 1 else -1 if len(self.kernels[i].members) > 1 else 0

        return sorted(sorted(users), key=rank)

    def _fuse_siblings(self, source: int) -> None:
        siblings = self._preferred({self.home[user] for user in self.users[source]})
        for n, a in enumerate(siblings):
            for b in siblings[n + 1 :]:
                if not self._may_fuse(a, b) or self._read_apart(a, b, source):
                    continue
                if self._independent(a, b) and not self._separate(a, b):
                    self._fuse(a, b)

    def _may_fuse(self, a: int, b: int) -> bool:
        is_open = all(self.home[i] == i and not self.kernels[i].separate for i in (a, b))
        return is_open and self._same_points(a, b) and self._fits(a, b)

    def _read_apart(self, a: int, b: int, source: int) -> bool:
        """Whether two kernels read a value through one slice each, and the slices do not overlap."""
        one, other = self._slice(a, source), self._slice(b, source)
        if one is None or other is None or one is other:
            return False
        ranges = [self._range(each) for each in (one, other)]
        if not all(ranges):  # a split, or a merged matmul's results
            return True
        dims = zip(*ranges, strict=True)
        return any(max(start, begin) >= min(stop, end) for (start, stop), (begin, end) in dims)

    def _slice(self, i: int, source: int) -> Instruction | None:
        """The slice through which alone a kernel reads a value; None where there is another reader, or several."""
        readers = [one for at in self.kernels[i].members if source in (one := self.instructions[at]).operands]
        if len(readers) != 1 or readers[0].operands[source] >= 1.0:
            return None
        traits = traits_of(readers[0].primitive)
        return readers[0] if traits.moves == "fixed" and traits.linear == "one" else None

    def _range(self, one: Instruction) -> list[tuple[int, int]]:
        """The first index and the stop of each dim of a slice in the user's program; empty for others."""
        params = self.computed.graph.nodes[one.node].params if self.computed else {}
        starts, stops = params.get("start_indices"), params.get("limit_indices")
        return list(zip(starts, stops, strict=True)) if starts is not None and stops is not None else []

    def _separate(self, a: int, b: int) -> bool:
        """Whether to keep a column reduction out of fusion with a kernel that would then get as few thread blocks."""
        sums = [i for i in (a, b) if all(self.instructions[root].columns for root in self.kernels[i].roots)]
        if self.computed is None or len(sums) != 1:
            return False
        if self._fused_seconds(a, b) <= self._seconds(a) + self._seconds(b) + _WORTH_SEPARATING_S:
            return False
        self.kernels[sums[0]].separate = self.computed.nodes(self.kernels[sums[0]])
        return bool(self.kernels[sums[0]].separate)

    def _fuse_with_user(self, source: int) -> None:
        kernel, one = self.kernels[source], self.instructions[source]
        moves = any(traits_of(self.instructions[i].primitive).permutes for i in kernel.members)
        if one.kind != "loop" or kernel.reduces or len(kernel.roots) > 1 or moves:
            return
        users = self._preferred({self.home[user] for user in self.users[source]})
        if len(users) == 1 and source not in self.outputs and len(self.kernels[users[0]].roots) == 1:
            return  # priority fusion decided against fusing the two
        for user in users:
            if not self._may_fuse(source, user):
                continue
            between = any(
                self.above[self.home[o]] >> source & 1
                for o in self.kernels[user].operands
                if o in self.home and self.home[o] != source
            )
            if not between and self._pays(source, user):
                self._fuse(source, user)
                return

    def _pays(self, source: int, user: int) -> bool:
        """Whether a loop and a user of its result take no longer as one kernel, which may have few thread blocks."""
        fused = self._fused_seconds(source, user)
        return fused <= self._seconds(source) + self._seconds(user) + LAUNCH_S

    def _seconds(self, i: int) -> float:
        kernel = self.kernels[i]
        written = sum(self.instructions[root].num_bytes for root in kernel.roots)
        blocks = num_blocks(self.instructions, kernel.roots, kernel.operands)
        return self.price.seconds(blocks, kernel.flops, kernel.operands, written)

    def _fused_seconds(self, a: int, b: int) -> float:
        """Seconds of a and b as one kernel, which computes a's result for each of b's uses at another position."""
        above, below = self.kernels[a], self.kernels[b]
        written = sum(self.instructions[root].num_bytes for root in (*above.roots, *below.roots))
        operands = {o: times for o, times in below.operands.items() if o not in above.roots}
        reads = self.work.analyzed(below).reads
        computed = max(1.0, *(reads.get(root, 0.0) for root in above.roots))
        for operand, times in above.operands.items():
            operands[operand] = operands.get(operand, 0.0) + times
        blocks = num_blocks(self.instructions, (*below.roots, *above.roots), operands)
        return self.price.seconds(blocks, computed * above.flops + below.flops, operands, written)

    def _fits(self, a: int, b: int) -> bool:
        """Whether the operands, outputs and reductions of two kernels fit into one."""
        kernels = self.kernels[a], self.kernels[b]
        sums = [
            self.instructions[root] for k in kernels for root in k.roots if self.instructions[root].kind == "reduce"
        ]
        shared = sum(_COLUMN_CACHE_BYTES if one.columns else _ROW_CACHE_BYTES for one in sums)
        return (
            sum(len(k.operands) + len(k.roots) for k in kernels) <= MOST_OPERANDS
            and len(sums) <= _MOST_SUMS
            and shared <= _SHARED_BYTES
        )

    def _fuse(self, a: int, b: int) -> None:
        """Fuse kernel b into a."""
        one, other = self.kernels[a], self.kernels.pop(b)
        for operand, times in other.operands.items():
            self.users[operand].discard(b)
            if operand not in one.roots:
                one.operands[operand] = max(one.operands.get(operand, 0.0), times)
                self.users[operand].add(a)
        shared = set(one.members)
        recomputed = sum(self.instructions[i].flops for i in other.members if i in shared)
        one.flops += max(other.flops - recomputed, 0.0)
        one.roots += other.roots
        one.members += [i for i in other.members if i not in shared]
        one.reduces |= other.reduces
        for root in other.roots:
            self.home[root] = a
        both = 1 << a | 1 << b
        self.above[a] = (self.above[a] | self.above.pop(b)) & ~both
        bits, last = self.above[a] | both, [a]
        while last:  # propagate the union of dependencies to the users, as far as it adds any
            for root in self.kernels[last.pop()].roots:
                for user in {self.home[at] for at in self.users[root]}:
                    if bits & ~self.above[user]:
                        self.above[user] |= bits
                        last.append(user)

    def _ordered(self) -> list[Fused]:
        """The kernels in topological order, each as close as possible to the position of its first result."""
        done: set[int] = set()
        ordered: list[Fused] = []
        for first in sorted(self.kernels):
            stack = [first]
            while stack:
                i = stack[-1]
                missing = [
                    self.home[o] for o in self.kernels[i].operands if o in self.home and self.home[o] not in done
                ]
                if i in done or not missing:
                    stack.pop()
                    if i not in done:
                        done.add(i)
                        ordered.append(self.kernels[i])
                else:
                    stack += missing
        return ordered
