"""A device's program with its collectives merged, as XLA's combiners merge them.

In: a `DeviceProgram`, the mesh, the bytes that are merged into one. Out: `Task`s, each after what it waits for. What no limit
changes is worked out once: which operation waits for which, and the order in which XLA walks over them.
Source: openxla/xla, xla/backends/gpu/transforms/collectives/all_reduce_combiner.cc and those of its like.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.collectives import collective
from autopar.ir.device_program import DeviceProgram, Op
from autopar.ir.mesh import MeshShape


@dataclass(frozen=True, slots=True)
class Task:
    """An operation, and the positions of the tasks that it comes after.

    They are kept apart from the buffers, for a buffer that is written in place has several writers: which of them is
    read is known only in the program's own order.
    """

    op: Op
    waits_for: tuple[int, ...]


class Merging:
    """A program whose collectives can be merged up to any limit.

    Attributes:
        program, mesh: as given.
    """

    def __init__(self, program: DeviceProgram, mesh: MeshShape) -> None:
        self.program, self.mesh = program, mesh
        self._waits_for = predecessors(program.ops)
        order = _from_outputs(program, self._waits_for)
        self._mergeable = [i for i in order if program.ops[i].combinable and program.ops[i].kind == "collective"]
        self._bit = {i: 1 << n for n, i in enumerate(self._mergeable)}
        self._keys = {i: _merge_key(program.ops[i]) for i in self._mergeable}
        self._result_bytes = {i: _result_bytes(program.ops[i], mesh) for i in self._mergeable}

    def tasks(self, merge_bytes: float, *, packs: bool) -> tuple[Task, ...]:
        """The operations with combinable collectives of a kind merged, each after what it waits for, otherwise as they
        stood.

        In the order in which a walk from the outputs meets them, collectives of one kind over the same axes
        (and of one dtype, where they add) join until their results would exceed the limit, or one waits for another.
        The merged one stands where its last member stood.

        Args:
            packs: whether merged all-reduces copy what they add to one buffer.
        """
        keys, bit = self._keys, self._bit
        together: dict[int, list[int]] = {}  # by its last member
        last_of: dict[int, int] = {}
        waiting_above = _CollectivesAbove(self._waits_for, bit)
        above, waiting = waiting_above.bits, self._mergeable
        while waiting:
            lead, size, joined = waiting[0], 0.0, []
            own = before = 0  # of those joined: their bits, and those of what they wait for
            for i in waiting:
                if keys[i] != keys[lead]:
                    continue
                result = self._result_bytes[i]
                if size + result > merge_bytes and joined:
                    break
                if above[i] & own or before & bit[i]:
                    break
                joined.append(i)
                own, before, size = own | bit[i], before | above[i], size + result
                if size > merge_bytes:
                    break
            taken = set(joined)
            waiting = [i for i in waiting if i not in taken]
            if len(joined) > 1:
                last = max(joined)
                together[last] = sorted(joined)
                last_of |= dict.fromkeys(joined, last)
                waiting_above.merge(joined)
        return _in_order(self.program, self._waits_for, together, last_of, packs=packs)

    def at_most_merged(self) -> list[Op]:
        """The collectives in the fewest that any limit could make of them, whatever waits for what."""
        alike: dict[tuple[str, tuple[str, ...], str], list[Op]] = {}
        for i in self._mergeable:
            alike.setdefault(self._keys[i], []).append(self.program.ops[i])
        alone = [op for op in self.program.ops if op.kind == "collective" and not op.combinable]
        return [*alone, *(_joined(ops) if len(ops) > 1 else ops[0] for ops in alike.values())]


def _in_order(
    program: DeviceProgram,
    waits_for: Sequence[Sequence[int]],
    together: Mapping[int, list[int]],
    last_of: Mapping[int, int],
    *,
    packs: bool,
) -> tuple[Task, ...]:
    """Tasks, each after those it waits for.

    Args:
        together: members of merged collectives, by the last. last_of: the reverse. packs: whether merged all-reduces
            copy what they add to one buffer.
    """
    units = [i for i in range(len(program.ops)) if last_of.get(i, i) == i]
    needs = {
        unit: list(dict.fromkeys(last_of.get(j, j) for i in together.get(unit, (unit,)) for j in waits_for[i]))
        for unit in units
    }
    tasks: list[Task] = []
    made_by: dict[int, int] = {}  # by operation, the task that has its results

    def emit(unit: int) -> None:
        members = together.get(unit, [unit])
        after = tuple(dict.fromkeys(made_by[j] for i in members for j in waits_for[i] if j in made_by))
        ops = [program.ops[i] for i in members]
        if len(ops) > 1 and packs and collective(ops[0].collective).sums_whole:
            into, whole, *out = _packed(ops, len(program.buffers) + 2 * unit)
            first = len(tasks)
            tasks.append(Task(into, after))
            tasks.append(Task(whole, (first,)))
            for i, op in zip(members, out, strict=True):
                made_by[i] = len(tasks)
                tasks.append(Task(op, (first + 1,)))
            return
        made_by.update(dict.fromkeys(members, len(tasks)))
        tasks.append(Task(_joined(ops) if len(ops) > 1 else ops[0], after))

    seen: set[int] = set()
    for root in units:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(needs[root]))]
        while stack:
            unit, rest = stack[-1]
            following = next((j for j in rest if j not in seen), None)
            if following is None:
                emit(unit)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(needs[following])))
    return tuple(tasks)


def _merge_key(op: Op) -> tuple[str, tuple[str, ...], str]:
    return op.collective, op.axes, op.dtype if collective(op.collective).is_sum else ""


def _result_bytes(op: Op, mesh: MeshShape) -> float:
    return op.payload_bytes / mesh.sizes(op.axes) if collective(op.collective).gives_part else op.payload_bytes


def _joined(ops: Sequence[Op]) -> Op:
    last = ops[-1]
    return Op(
        kind="collective",
        node=last.node,
        reads=tuple(b for op in ops for b in op.reads),
        writes=tuple(b for op in ops for b in op.writes),
        read_bytes=sum(op.read_bytes for op in ops),
        written_bytes=sum(op.written_bytes for op in ops),
        num_nodes=sum(op.num_nodes for op in ops),
        dtype=last.dtype,
        collective=last.collective,
        axes=last.axes,
        payload_bytes=sum(op.payload_bytes for op in ops),
    )


def _packed(ops: Sequence[Op], buffer: int) -> list[Op]:
    """Merged all-reduces: XLA copies what they add to one buffer, and from that to each one's own.

    Args:
        buffer: a free position, and the one after it.
    """
    whole = _joined(ops)
    size = whole.payload_bytes
    itemsize = {"float64": 8, "bfloat16": 2, "float16": 2}.get(whole.dtype, 4)
    into = Op("fusion", whole.node, whole.reads, (buffer,), size, size, flops=6 * size / itemsize)
    out = [
        Op("fusion", op.node, (buffer + 1,), op.writes, op.payload_bytes, op.payload_bytes, num_blocks=0.0)
        for op in ops
    ]
    return [into, replace(whole, reads=(buffer,), writes=(buffer + 1, -1 - buffer)), *out]


def _from_outputs(program: DeviceProgram, waits_for: Sequence[tuple[int, ...]]) -> list[int]:
    """Operations in the order of a walk from the outputs, those that one waits for before it."""
    writer = {buffer: i for i, op in enumerate(program.ops) for buffer in op.writes}
    roots = [writer[b] for b, buffer in enumerate(program.buffers) if buffer.output and b in writer]
    order, seen = [], set()
    for root in [*roots, *range(len(program.ops))]:
        stack = [(root, iter(waits_for[root]))]
        if root in seen:
            continue
        seen.add(root)
        while stack:
            node, rest = stack[-1]
            following = next((i for i in rest if i not in seen), None)
            if following is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(waits_for[following])))
    return order


class _CollectivesAbove:
    """Of each operation, the bits of the combinable collectives that it waits for, while they are merged: a merged
    collective stands at several places, and waits at each for what it waits for at any.

    Attributes:
        bits: by operation.
    """

    def __init__(self, waits_for: Sequence[tuple[int, ...]], bit: Mapping[int, int]) -> None:
        self._bit, self._together = bit, dict[int, list[int]]()
        self._readers: list[list[int]] = [[] for _ in waits_for]
        self.bits = [0] * len(waits_for)
        for i, before in enumerate(waits_for):
            for j in before:
                self.bits[i] |= self.bits[j] | bit.get(j, 0)
                self._readers[j].append(i)

    def merge(self, members: list[int]) -> None:
        """Have some collectives wait for what any of them waits for, and whatever waits for them too."""
        self._together |= dict.fromkeys(members, members)
        heap: list[int] = []
        queued: set[int] = set()

        def add(to: Sequence[int], bits: int) -> None:
            for i in to:
                both = self.bits[i] | bits
                if both != self.bits[i]:
                    self.bits[i] = both
                    if i not in queued:
                        queued.add(i)
                        heapq.heappush(heap, i)

        add(members, functools.reduce(operator.or_, (self.bits[i] for i in members)))
        while heap:
            i = heapq.heappop(heap)
            queued.discard(i)
            bits = self.bits[i] | self._bit.get(i, 0)
            for reader in self._readers[i]:
                add(self._together.get(reader, (reader,)), bits)


def predecessors(ops: Sequence[Op]) -> list[tuple[int, ...]]:
    """Of each operation, those that write what it reads."""
    writer: dict[int, int] = {}
    waits_for = []
    for i, op in enumerate(ops):
        waits_for.append(tuple(dict.fromkeys(writer[b] for b in op.reads if b in writer)))
        for buffer in op.writes:
            writer[buffer] = i
    return waits_for
