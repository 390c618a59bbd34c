"""Which instructions become one kernel: XLA's priority fusion on GPUs, in outline.

In: a `LocalProgram`. Out: for each instruction that remains a kernel, what is fused into it and what it reads.

XLA fuses a producer into all its readers or into none, the most profitable first; a producer that is read by
something that cannot be fused with (a matrix product, a collective, an output of the step) is written to memory.
The profit is priced by a roofline with XLA's constants, so that an expensive function of a large value with
several readers is computed once, and a cheap one in each reader. Source: openxla/xla,
xla/backends/gpu/transforms/priority_fusion.cc and xla/service/gpu/model/gpu_performance_model_base.cc, read in
November 2026.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.hardware_profile import HardwareProfile
from autopar.cost.kernel_time import column_blocks
from autopar.ir.graph import Graph
from autopar.xla_model.spmd_partition import Instruction, LocalProgram

_LAUNCH_S = 1e-6  # what XLA charges a kernel when it weighs a fusion
_PARALLEL = 0.95  # how much of the shorter of arithmetic and traffic the longer one hides
_NEAR_CACHE_SPEEDUP, _CACHE_SPEEDUP = 20.0, 2.5  # what fits them is read again so much faster, as XLA takes it
_MOST_OPERANDS = 96
_MOST_SUMS = 8  # of one kernel
_SHARED_BYTES, _COLUMN_CACHE_BYTES, _ROW_CACHE_BYTES = 49152, 32 * 129 * 4, 32 * 4  # of a thread block; of a sum
_WORTH_SEPARATING_S = 5e-6
_LARGE_REDUCTION = 16  # elements to one; smaller ones are emitted like any loop
#: What no kernel can do that works row by row.
_NOT_TILED = frozenset(
    [
        "cut",
        "pad",
        "gather",
        "concatenate",
        "slice",
        "dynamic_slice",
        "scatter-add",
        "scatter",
        "rev",
        "threefry2x32",
        "random_bits",
        "reduce_precision",
        "dynamic_update_slice",
        "argmax",
        "argmin",
        "cumsum",
        "sort",
    ]
)
_TOLERATED_BYTES = 1024  # by which a product's operand may be larger before what it takes in than after
#: What a product's kernel computes as it reads an operand.
_READ_THROUGH = frozenset(
    [
        "convert_element_type",
        "mul",
        "div",
        "neg",
        "abs",
        "max",
        "min",
        "exp",
        "log",
        "tanh",
        "sqrt",
        "rsqrt",
        "slice",
        "integer_pow",
    ]
)


@dataclass(slots=True)
class Fused:
    """One kernel.

    Args:
        roots: positions of the instructions whose results it writes.
        operands: positions of instructions in memory, with how often each of their elements is read.
        members: all instructions it computes, some perhaps in other kernels too.
        reduces: whether a large reduction is among them.
        tiled: whether it works row by row, so that a reduction of a row and what uses it share a kernel.
        separate: nodes that are computed for it alone, behind a barrier, lest XLA join it with another; mostly none.
    """

    roots: list[int]
    operands: dict[int, float]
    flops: float
    members: list[int]
    reduces: bool
    tiled: bool = False
    separate: tuple[int, ...] = ()


def fuse(program: LocalProgram, profile: HardwareProfile, graph: Graph | None = None) -> list[Fused]:
    """The kernels, each after those whose results it reads; arguments are not among them.

    Args:
        graph: what the program is of; without it no sum is kept from the others.
    """
    fusion = _Fusion(program, profile)
    kernels = fusion.run()
    program.outputs = [at if at is None else fusion.renamed.get(at, at) for at in program.outputs]
    return _Siblings(program, kernels, profile, graph).run()


def num_blocks(instructions: Sequence[Instruction], roots: Sequence[int], operands: Iterable[int]) -> float:
    """Thread blocks that a kernel runs in, as XLA's emitters choose them; 0: as many as the device can use."""
    one = instructions[roots[0]]
    if one.primitive.startswith("scatter"):
        return max(1.0, max((instructions[o].elements for o in list(one.operands)[1:]), default=1.0) // 128)
    sums = [one for root in roots if (one := instructions[root]).kind == "reduce"]
    if not sums:
        return max(1.0, -(-one.elements // (512 if one.elements % 4 == 0 else 128)))
    one = sums[0]
    if not one.columns:
        return 0.0
    read = [instructions[o] for o in operands if instructions[o].elements > 64.0]
    itemsize = min((i.num_bytes / i.elements for i in read), default=4.0)
    return column_blocks(one.reduces, one.columns, max(itemsize, 1.0), max(one.elements / one.columns, 1.0))


class _Price:
    """XLA's roofline of a kernel: few thread blocks reach neither the memory's rate nor the arithmetic's."""

    def __init__(self, instructions: Sequence[Instruction], profile: HardwareProfile) -> None:
        self.instructions = instructions
        self.rate, self.bandwidth = profile.vector_flops_per_s, profile.hbm_bytes_per_s
        estimator = profile.xla_estimator
        self.block_bandwidth = estimator.block_bytes_per_s if estimator else math.inf
        self.num_cores = estimator.num_cores if estimator else 1
        self.sizes: list[float] = []
        self.again: list[float] = []  # bytes per second at which a value is read again
        caches = ((profile.near_cache_bytes, _NEAR_CACHE_SPEEDUP), (profile.cache_bytes, _CACHE_SPEEDUP))
        for one in instructions:
            speedup = next((faster for fits, faster in caches if one.num_bytes < fits), 1.0)
            self.sizes.append(one.num_bytes)
            self.again.append(self.bandwidth * speedup)

    def seconds(self, blocks: float, flops: float, operands: Mapping[int, float], written: float) -> float:
        rate, most = self.rate, math.inf
        if blocks:
            rate *= min(1.0, blocks / self.num_cores)
            most = blocks * self.block_bandwidth
        arithmetic = flops / rate
        traffic = written / self.bandwidth
        sizes, again = self.sizes, self.again
        memory = min(self.bandwidth, most)
        for operand, times in operands.items():
            size = sizes[operand]
            if times <= 1.0:
                traffic += size * times / memory
            else:
                cached = again[operand]
                traffic += size / memory + size * (times - 1.0) / (cached if cached < most else most)
        return arithmetic + traffic - _PARALLEL * min(arithmetic, traffic)


class _Fusion:
    def __init__(self, program: LocalProgram, profile: HardwareProfile) -> None:
        self.instructions = program.instructions
        self.kernels: dict[int, Fused] = {}
        self.users: list[set[int]] = [set() for _ in program.instructions]
        self.outputs = {at for at in program.outputs if at is not None}
        self.renamed: dict[int, int] = {}
        for i, one in enumerate(program.instructions):
            if one.kind == "argument":
                continue
            reduces = one.kind == "reduce" and one.reduces >= _LARGE_REDUCTION
            self.kernels[i] = Fused([i], dict(one.operands), one.flops, [i], reduces)
            for operand in one.operands:
                self.users[operand].add(i)
        self._drop_dead()
        self._fuse_into_products()
        self._drop_dead()
        self._fuse_diamonds()
        self.price = _Price(program.instructions, profile)
        self.times: dict[int, float] = {}
        self.blocks: dict[int, float] = {}  # where they do not depend on what is read
        #: Of each producer, what computing it inside a reader saves, and the readers that it may not be fused into; as
        #: long as neither kernel changes. A value with many readers is priced anew with each of them.
        self.savings: dict[int, dict[int, float]] = defaultdict(dict)
        self.barred: dict[int, set[int]] = defaultdict(set)
        self.version = [0] * len(program.instructions)
        self.heap: list[tuple[float, int, int]] = []

    def run(self) -> dict[int, Fused]:
        for i in self.kernels:
            self._push(i)
        while self.heap:
            _, i, version = heapq.heappop(self.heap)
            if i in self.kernels and version == self.version[i]:
                self._fuse(i)
        return dict(sorted(self.kernels.items()))

    def _drop_dead(self) -> None:
        for i in reversed(range(len(self.instructions))):
            effect = self.instructions[i].value < 0
            if i in self.kernels and not self.users[i] and i not in self.outputs and not effect:
                for operand in self.kernels[i].operands:
                    self.users[operand].discard(i)
                del self.kernels[i]

    # -- matrix products ---------------------------------------------------------------------

    def _fuse_into_products(self) -> None:
        """A product takes in what does not make its operands smaller to read (a cast to a wider dtype, a scaling),
        and writes its result as its one reader wants it, where that is smaller (a cast to a narrower dtype)."""
        for i, one in enumerate(self.instructions):
            if one.gemm is None or i not in self.kernels:
                continue
            for operand in list(one.operands):
                source = operand
                while (above := self._read_through(source)) is not None:
                    source = above
                if source != operand:
                    self._read_instead(i, operand, source)
            self._write_smaller(i)

    def _read_through(self, at: int) -> int | None:
        """The one large operand of an instruction that a product computes as it reads."""
        one = self.instructions[at]
        if one.kind != "loop" or one.primitive not in _READ_THROUGH:
            return None
        read = sum(self.instructions[o].num_bytes for o in one.operands)
        if not one.operands or read - one.num_bytes > _TOLERATED_BYTES:
            return None
        return max(one.operands, key=lambda o: self.instructions[o].num_bytes)

    def _read_instead(self, i: int, operand: int, source: int) -> None:
        for operands in (self.instructions[i].operands, self.kernels[i].operands):
            del operands[operand]
            operands[source] = 1.0
        self.users[operand].discard(i)
        self.users[source].add(i)

    def _write_smaller(self, i: int) -> None:
        """Give a product the size of its only reader's result, where that is a cast to fewer bytes, perhaps of the
        product scaled."""
        self._cast_before_transpose(i)
        while (reader := self._only_reader(i)) is not None:
            one = self.instructions[reader]
            narrower = one.primitive in ("convert_element_type", "slice") and len(one.operands) == 1
            scaled = self._is_scaling(reader) and self._is_cast_at_once(reader)
            if one.kind != "loop" or not (narrower or scaled) or one.num_bytes > self.instructions[i].num_bytes:
                return
            product = self.instructions[i]
            gemm = replace(product.gemm, out_dtype=one.dtype) if product.gemm else None
            self.instructions[i] = replace(
                product, num_bytes=one.num_bytes, elements=one.elements, dtype=one.dtype, gemm=gemm
            )
            for user in list(self.users[reader]):
                for operands in (self.instructions[user].operands, self.kernels[user].operands):
                    if reader in operands:
                        operands[i] = operands.pop(reader)
                self.users[i].add(user)
            self.users[i].discard(reader)
            for scalar in one.operands.keys() - {i}:
                self.users[scalar].discard(reader)
            self.users[reader] = set()
            del self.kernels[reader]
            if reader in self.outputs:
                self.outputs.discard(reader)
                self.outputs.add(i)
                self.renamed[reader] = i

    def _cast_before_transpose(self, i: int) -> None:
        """A product's result that is transposed, perhaps scaled, and then narrowed is narrowed before it is transposed:
        a transpose is a layout."""
        chain = [i]
        while (after := self._only_reader(chain[-1])) is not None and (
            self.instructions[after].primitive == "transpose" or self._is_scaling(after)
        ):
            chain.append(after)
        if after is None or not self._narrows(after):
            return
        places = [*chain[1:], after]
        moved = [at for at in places if self.instructions[at].primitive == "transpose"]
        order = [at for at in places if at not in moved] + moved
        read = dict(zip(places, chain, strict=True))
        cast, ones = self.instructions[after], [(at, self.instructions[at], self.kernels[at].flops) for at in order]
        for at, (was, one, flops) in zip(places, ones, strict=True):
            operands = {read[at] if o == read[was] else o: count for o, count in one.operands.items()}
            for scalar in operands.keys() - {read[at]}:
                self.users[scalar] = self.users[scalar] - {was} | {at}
            narrow = {"num_bytes": cast.num_bytes, "dtype": cast.dtype} if one.primitive == "transpose" else {}
            self.instructions[at] = replace(one, operands=operands, **narrow)
            self.kernels[at].flops, self.kernels[at].operands = flops, dict(operands)

    def _only_reader(self, i: int) -> int | None:
        """What alone reads an instruction; None where several do, or the step returns it."""
        return next(iter(self.users[i])) if len(self.users[i]) == 1 and i not in self.outputs else None

    def _is_scaling(self, i: int) -> bool:
        """Whether an instruction scales its one large operand by a number, which may be computed."""
        one = self.instructions[i]
        large = [o for o in one.operands if self.instructions[o].elements > 1]
        return one.kind == "loop" and one.primitive in ("mul", "div", "neg") and len(large) == 1

    def _is_cast_at_once(self, i: int) -> bool:
        """Whether nothing reads an instruction but a cast to fewer bytes, or a scaling that is cast so."""
        after = self._only_reader(i)
        return after is not None and (
            self._narrows(after) or (self._is_scaling(after) and self._is_cast_at_once(after))
        )

    def _narrows(self, i: int) -> bool:
        """Whether an instruction is a cast to fewer bytes."""
        one = self.instructions[i]
        is_cast = one.kind == "loop" and one.primitive == "convert_element_type" and len(one.operands) == 1
        return is_cast and one.num_bytes < sum(self.instructions[o].num_bytes for o in one.operands)

    # -- softmax -----------------------------------------------------------------------------

    def _fuse_diamonds(self) -> None:
        """A value, a reduction of its rows, and what reads both are one kernel that works row by row
        (XLA's softmax rewriter): the subtracted maximum, the division by the sum."""
        for i, one in enumerate(self.instructions):
            if one.kind != "reduce" or not one.rows or i not in self.kernels or len(one.operands) != 1:
                continue
            (source,) = one.operands
            chain = [i]
            while len(self.users[chain[-1]]) == 1 and chain[-1] not in self.outputs:
                (reader,) = self.users[chain[-1]]
                if source in self.instructions[reader].operands:
                    if self.users[source] == {i, reader} and self._closes(source, reader, chain):
                        self._close(source, reader, chain)
                    break
                if self.instructions[reader].kind != "loop" or len(self.instructions[reader].operands) > 1:
                    break
                chain.append(reader)

    def _closes(self, source: int, reader: int, chain: list[int]) -> bool:
        one = self.instructions[reader]
        whole = one.kind == "loop" and one.elements == self.instructions[source].elements
        return whole and all(self.instructions[i].primitive not in _NOT_TILED for i in (*chain, reader))

    def _close(self, source: int, reader: int, chain: list[int]) -> None:
        kernel = self.kernels[reader]
        for i in chain:
            inner = self.kernels.pop(i)
            kernel.flops += inner.flops
            kernel.members += inner.members
            for operand in inner.operands:
                self.users[operand].discard(i)
            self.users[i] = set()
            kernel.operands.pop(i, None)
        kernel.operands[source] = 1.0
        self.users[source] = {reader}
        kernel.tiled = True

    # -- prices ------------------------------------------------------------------------------

    def _time(self, i: int, flops: float, operands: dict[int, float], written: float) -> float:
        """Seconds of a kernel whose result is instruction i."""
        blocks = self.blocks.get(i)
        if blocks is None:
            blocks = num_blocks(self.instructions, (i,), operands)
            if not self.instructions[i].columns:
                self.blocks[i] = blocks
        return self.price.seconds(blocks, flops, operands, written)

    def _own_time(self, i: int) -> float:
        if i not in self.times:
            k = self.kernels[i]
            self.times[i] = self._time(i, k.flops, k.operands, self.instructions[i].num_bytes)
        return self.times[i]

    def _merged(self, i: int, j: int) -> tuple[float, dict[int, float]]:
        """Arithmetic and reads of kernel j with i computed inside it."""
        producer, consumer = self.kernels[i], self.kernels[j]
        times = consumer.operands[i]
        operands = {o: t for o, t in consumer.operands.items() if o != i}
        for operand, read in producer.operands.items():
            read *= times
            # Read at the same place by both, it is read once.
            operands[operand] = max(operands.get(operand, 0.0), read)
        return consumer.flops + producer.flops * times, operands

    def _priority(self, i: int) -> float | None:
        """Seconds saved by fusing a producer into all its readers; None where it may not be."""
        readers = self.users[i]
        if not readers or i in self.outputs or self.barred[i]:
            return None
        known = self.savings[i]
        for j in readers.difference(known) if len(known) < len(readers) else ():
            saving = self._saving(i, j)
            if saving is None:
                self.barred[i].add(j)
                return None
            known[j] = saving
        return _LAUNCH_S + self._own_time(i) + sum(known.values())

    def _saving(self, i: int, j: int) -> float | None:
        """Seconds less that reader j takes with i computed inside it; None where it may not be."""
        if not self._may_fuse(i, j):
            return None
        flops, operands = self._merged(i, j)
        return self._own_time(j) - self._time(j, flops, operands, self.instructions[j].num_bytes)

    def _may_fuse(self, i: int, j: int) -> bool:
        producer, consumer = self.instructions[i], self.instructions[j]
        if producer.kind not in ("loop", "reduce") or consumer.kind not in ("loop", "reduce", "inplace"):
            return False
        if consumer.kind == "inplace" and next(iter(consumer.operands)) == i:
            return False
        if self.kernels[i].tiled or self.kernels[j].tiled:
            members = (*self.kernels[i].members, *self.kernels[j].members)
            if any(self.instructions[m].primitive in _NOT_TILED for m in members):
                return False
        elif self.kernels[i].reduces:  # what follows a reduction is a kernel of its own
            return False
        return len(self.kernels[i].operands) + len(self.kernels[j].operands) <= _MOST_OPERANDS

    # -- fusing ------------------------------------------------------------------------------

    def _push(self, i: int) -> None:
        self.version[i] += 1
        if i not in self.kernels or self.instructions[i].kind not in ("loop", "reduce"):
            return
        priority = self._priority(i)
        if priority is not None and priority >= 0.0:
            heapq.heappush(self.heap, (-priority, i, self.version[i]))

    def _fuse(self, i: int) -> None:
        producer = self.kernels[i]
        changed = set(producer.operands)
        readers = list(self.users[i])
        for j in readers:
            consumer = self.kernels[j]
            consumer.flops, consumer.operands = self._merged(i, j)
            consumer.reduces |= producer.reduces
            consumer.tiled |= producer.tiled
            consumer.members += producer.members
            self.times.pop(j, None)
            changed |= set(consumer.operands)
            for operand in producer.operands:
                self.users[operand].add(j)
            for operand in consumer.operands:
                self._forget(operand, j)
            self.savings.pop(j, None)
            self.barred.pop(j, None)
        for operand in producer.operands:
            self.users[operand].discard(i)
            self._forget(operand, i)
        self.users[i] = set()
        del self.kernels[i]
        for operand in changed:
            self._push(operand)
        for j in readers:
            self._push(j)

    def _forget(self, i: int, j: int) -> None:
        """Reader j of i is no longer what it was."""
        self.savings[i].pop(j, None)
        self.barred[i].discard(j)


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


class _Siblings:
    """Joins kernels over the same points to one with several results, as XLA does: those that read the same value,
    whatever that costs, and a loop with a reader of its result, where no third kernel stands between the two and it
    pays. From the last value to the first. Source: openxla/xla, xla/service/gpu/transforms/multi_output_fusion.cc and
    xla/service/gpu/gpu_fusible.cc, read in November 2026."""

    def __init__(
        self, program: LocalProgram, kernels: dict[int, Fused], profile: HardwareProfile, graph: Graph | None
    ) -> None:
        self.instructions = program.instructions
        self.price = _Price(program.instructions, profile)
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
            return hero.elements, "transpose" if hero.primitive == "transpose" else "loop", 1.0
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
        moves = any(self.instructions[i].primitive == "transpose" for i in kernel.members)
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
        return joined <= self._seconds(source) + self._seconds(reader) + _LAUNCH_S

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
            sum(len(k.operands) + len(k.roots) for k in kernels) <= _MOST_OPERANDS
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
