"""Kernels over the same points joined to one with several results: XLA's multi-output fusion, in outline.

In: kernels, each by the instruction whose result it writes. Out: kernels, each after those whose results it reads. Source:
openxla/xla, xla/backends/gpu/transforms/multi_output_fusion.cc and xla/service/gpu/gpu_fusible.cc, read in November 2026.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from autopar.cost.hardware_profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.rules.table import traits_of
from autopar.xla_model.kernels import LAUNCH_S, MOST_OPERANDS, Fused, KernelPrice, num_blocks
from autopar.xla_model.local_program import LocalProgram

_MOST_SUMS = 8  # of one kernel
_SHARED_BYTES, _COLUMN_CACHE_BYTES, _ROW_CACHE_BYTES = 49152, 32 * 129 * 4, 32 * 4  # of a thread block; of a sum
_WORTH_SEPARATING_S = 5e-6


class _Computed:
    """Which nodes are computed in a kernel."""

    def __init__(self, program: LocalProgram, graph: Graph) -> None:
        self.program, self.graph = program, graph

    def nodes(self, kernel: Fused) -> tuple[int, ...]:
        """From what lies in memory to the kernel's results, in order; nothing where it computes what no node does, as
        the cut of a value to each device's part."""
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
    """Joins kernels over the same points to one with several results, as XLA does: those that read the same value,
    whatever that costs, and a loop with a reader of its result, where no third kernel stands between the two and it
    pays. From the last value to the first. Source: openxla/xla, xla/service/gpu/transforms/multi_output_fusion.cc and
    xla/service/gpu/gpu_fusible.cc, read in November 2026."""

    def __init__(
        self, program: LocalProgram, kernels: dict[int, Fused], profile: HardwareProfile, graph: Graph | None
    ) -> None:
        self.instructions = program.instructions
        self.price = KernelPrice(program.instructions, profile)
        self.kernels = kernels
        self.computed = _Computed(program, graph) if graph else None
        self.outputs = {at for at in program.outputs if at is not None}
        self.home = {i: i for i in kernels}  # instruction in memory -> the kernel that writes it
        self.users: dict[int, set[int]] = defaultdict(set)
        for i, kernel in kernels.items():
            for operand in kernel.operands:
                self.users[operand].add(i)
        self.above: dict[int, int] = {}  # kernel -> bits of all kernels that it waits for
        for i, kernel in kernels.items():
            bits = 0
            for operand in kernel.operands:
                if operand in kernels:
                    bits |= self.above[operand] | 1 << operand
            self.above[i] = bits

    def run(self) -> list[Fused]:
        for source in reversed(range(len(self.instructions))):
            if self.instructions[source].elements > 1.0 and len(self.users[source]) > 1:
                self._join_readers(source)
            if source in self.kernels:
                self._join_with_reader(source)
        return self._ordered()

    def _alike(self, a: int, b: int) -> bool:
        """Whether two kernels run over the same points: reductions only if they reduce the same dims."""
        one, other = self._points(a), self._points(b)
        if one is None or other is None or one[0] != other[0]:
            return False
        if "reduce" in (one[1], other[1]) and "transpose" in (one[1], other[1]):
            return False
        return one == other if one[1] == other[1] else True

    def _points(self, i: int) -> tuple[float, str, float] | None:
        """How many points a kernel runs over, by what of it decides how it is emitted, and how many of them make one
        result of a reduction; None where it cannot be joined."""
        kernel = self.kernels[i]
        if kernel.tiled:
            return None
        roots = [self.instructions[root] for root in kernel.roots]
        hero = next((one for one in roots if one.kind == "reduce"), roots[0])
        if hero.kind == "reduce":
            return hero.elements * hero.reduces, "reduce", hero.reduces
        if hero.kind == "loop":
            return hero.elements, "transpose" if traits_of(hero.primitive).permutes else "loop", 1.0
        return None

    def _independent(self, a: int, b: int) -> bool:
        return not (self.above[a] >> b & 1 or self.above[b] >> a & 1)

    def _preferred(self, readers: Iterable[int]) -> list[int]:
        """Kernels in the order in which others are joined to them: those with several results first."""

        def rank(i: int) -> int:
            return -2 if len(self.kernels[i].roots) > 1 else -1 if len(self.kernels[i].members) > 1 else 0

        return sorted(sorted(readers), key=rank)

    def _join_readers(self, source: int) -> None:
        readers = self._preferred({self.home[user] for user in self.users[source]})
        for n, a in enumerate(readers):
            for b in readers[n + 1 :]:
                if self._may_join(a, b) and self._independent(a, b) and not self._separate(a, b):
                    self._join(a, b)

    def _may_join(self, a: int, b: int) -> bool:
        is_open = all(self.home[i] == i and not self.kernels[i].separate for i in (a, b))
        return is_open and self._alike(a, b) and self._fits(a, b)

    def _separate(self, a: int, b: int) -> bool:
        """Whether the one of two kernels that sums down columns is better kept from the other, which would have to do
        with as few thread blocks."""
        sums = [i for i in (a, b) if all(self.instructions[root].columns for root in self.kernels[i].roots)]
        if self.computed is None or len(sums) != 1:
            return False
        if self._seconds_joined(a, b) <= self._seconds(a) + self._seconds(b) + _WORTH_SEPARATING_S:
            return False
        self.kernels[sums[0]].separate = self.computed.nodes(self.kernels[sums[0]])
        return bool(self.kernels[sums[0]].separate)

    def _join_with_reader(self, source: int) -> None:
        kernel, one = self.kernels[source], self.instructions[source]
        moves = any(traits_of(self.instructions[i].primitive).permutes for i in kernel.members)
        if one.kind != "loop" or kernel.reduces or len(kernel.roots) > 1 or moves:
            return
        readers = self._preferred({self.home[user] for user in self.users[source]})
        if len(readers) == 1 and source not in self.outputs and len(self.kernels[readers[0]].roots) == 1:
            return  # fusing the two was weighed before
        for reader in readers:
            if not self._may_join(source, reader):
                continue
            between = any(
                self.above[self.home[o]] >> source & 1
                for o in self.kernels[reader].operands
                if o in self.home and self.home[o] != source
            )
            if not between and self._pays(source, reader):
                self._join(source, reader)
                return

    def _pays(self, source: int, reader: int) -> bool:
        """Whether a loop and a reader of its result take no longer as one kernel: it may have few thread blocks."""
        joined = self._seconds_joined(source, reader)
        return joined <= self._seconds(source) + self._seconds(reader) + LAUNCH_S

    def _seconds(self, i: int) -> float:
        kernel = self.kernels[i]
        written = sum(self.instructions[root].num_bytes for root in kernel.roots)
        blocks = num_blocks(self.instructions, kernel.roots, kernel.operands)
        return self.price.seconds(blocks, kernel.flops, kernel.operands, written)

    def _seconds_joined(self, a: int, b: int) -> float:
        """Those of one kernel for both; where b reads what a makes, it computes that for itself."""
        above, below = self.kernels[a], self.kernels[b]
        written = sum(self.instructions[root].num_bytes for root in (*above.roots, *below.roots))
        operands = {o: times for o, times in below.operands.items() if o not in above.roots}
        again = above.flops if len(operands) < len(below.operands) else 0.0
        for operand, times in above.operands.items():
            operands[operand] = operands.get(operand, 0.0) + times
        blocks = num_blocks(self.instructions, (*below.roots, *above.roots), operands)
        return self.price.seconds(blocks, above.flops + again + below.flops, operands, written)

    def _fits(self, a: int, b: int) -> bool:
        """Whether one kernel has room for the operands, the results and the sums of two."""
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

    def _join(self, a: int, b: int) -> None:
        """Into a, what b computes."""
        one, other = self.kernels[a], self.kernels.pop(b)
        for operand, times in other.operands.items():
            self.users[operand].discard(b)
            if operand not in one.roots:
                one.operands[operand] = max(one.operands.get(operand, 0.0), times)
                self.users[operand].add(a)
        shared = set(one.members)
        again = sum(self.instructions[i].flops for i in other.members if i in shared)
        one.flops += max(other.flops - again, 0.0)
        one.roots += other.roots
        one.members += [i for i in other.members if i not in shared]
        one.reduces |= other.reduces
        for root in other.roots:
            self.home[root] = a
        both = 1 << a | 1 << b
        self.above[a] = (self.above[a] | self.above.pop(b)) & ~both
        bits, last = self.above[a] | both, [a]
        while last:  # down from the two, as far as anything is new: what waits for a kernel has all that it waits for
            for root in self.kernels[last.pop()].roots:
                for reader in {self.home[user] for user in self.users[root]}:
                    if bits & ~self.above[reader]:
                        self.above[reader] |= bits
                        last.append(reader)

    def _ordered(self) -> list[Fused]:
        """Each kernel as early as the first of its results stood, but after all it reads."""
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
