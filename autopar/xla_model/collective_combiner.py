"""Combine small collectives into larger ones as XLA's collective combiners do.

In: a `DeviceProgram`, the mesh, a combine threshold in bytes. Out: `Task`s in topological order. The dependencies and
XLA's traversal order do not depend on the threshold and are computed once. Source: openxla/xla,
xla/backends/gpu/transforms/collectives/all_reduce_combiner.cc and the combiners of the other collectives.
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
    """An operation, and the positions of the tasks that it depends on.

    The buffers do not give the dependencies: a buffer that is written in place has several writers, and only the
    program's original order tells which of them an operation reads.
    """

    op: Op
    waits_for: tuple[int, ...]


class CollectiveCombiner:
    """Combines the collectives of one program, for any threshold.

    Attributes:
        program, mesh: the program, and the mesh it runs on.
    """

    def __init__(self, program: DeviceProgram, mesh: MeshShape) -> None:
        self.program, self.mesh = program, mesh
        self._waits_for = predecessors(program.ops)
        order = _from_outputs(program, self._waits_for)
        self._mergeable = [i for i in order if program.ops[i].combinable and program.ops[i].kind == "collective"]
        self._bit = {i: 1 << n for n, i in enumerate(self._mergeable)}
        self._keys = {i: _merge_key(program.ops[i]) for i in self._mergeable}
        self._result_bytes = {i: _result_bytes(program.ops[i], mesh) for i in self._mergeable}

    def tasks(self, combine_threshold_bytes: float, *, packs: bool) -> tuple[Task, ...]:
        """The operations after combining, in topological order that otherwise keeps the program's.

        The combiner visits collectives in a post-order walk from the outputs. It combines those of one kind over the
        same axes (and of one dtype, for reductions; pipelined ones by themselves) until their results would exceed the threshold or one depends on
        another. The combined collective takes the position of its last member.

        Args:
            combine_threshold_bytes: combine threshold.
            packs: whether a combined all-reduce copies its operands into one contiguous buffer.
        """
        keys, bit = self._keys, self._bit
        combined_at: dict[int, list[int]] = {}  # last member -> members
        last_of: dict[int, int] = {}
        waiting_above = _CollectivesAbove(self._waits_for, bit)
        above, waiting = waiting_above.bits, self._mergeable
        while waiting:
            lead, size, combined = waiting[0], 0.0, []
            own = before = 0  # bits of the members, and of the collectives they depend on
            for i in waiting:
                if keys[i] != keys[lead]:
                    continue
                result = self._result_bytes[i]
                if size + result > combine_threshold_bytes and combined:
                    break
                if above[i] & own or before & bit[i]:
                    break
                combined.append(i)
                own, before, size = own | bit[i], before | above[i], size + result
                if size > combine_threshold_bytes:
                    break
            taken = set(combined)
            waiting = [i for i in waiting if i not in taken]
            if len(combined) > 1:
                last = max(combined)
                combined_at[last] = sorted(combined)
                last_of |= dict.fromkeys(combined, last)
                waiting_above.merge(combined)
        return _in_order(self.program, self._waits_for, combined_at, last_of, packs=packs)

    def at_most_merged(self) -> list[Op]:
        """The fewest collectives that any threshold could yield, dependencies aside."""
        by_key: dict[tuple[str, tuple[str, ...], str, bool], list[Op]] = {}
        for i in self._mergeable:
            by_key.setdefault(self._keys[i], []).append(self.program.ops[i])
        alone = [op for op in self.program.ops if op.kind == "collective" and not op.combinable]
        return [*alone, *(_combined(ops) if len(ops) > 1 else ops[0] for ops in by_key.values())]


def _in_order(
    program: DeviceProgram,
    waits_for: Sequence[Sequence[int]],
    combined_at: Mapping[int, list[int]],
    last_of: Mapping[int, int],
    *,
    packs: bool,
) -> tuple[Task, ...]:
    """The tasks in topological order.

    Args:
        combined_at: last member of a combined collective -> all members.
        last_of: member -> last member.
        packs: whether a combined all-reduce copies its operands into one contiguous buffer.
    """
    units = [i for i in range(len(program.ops)) if last_of.get(i, i) == i]
    needs = {
        unit: list(dict.fromkeys(last_of.get(j, j) for i in combined_at.get(unit, (unit,)) for j in waits_for[i]))
        for unit in units
    }
    tasks: list[Task] = []
    made_by: dict[int, int] = {}  # operation -> the task that produces its results

    def emit(unit: int) -> None:
        members = combined_at.get(unit, [unit])
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
        tasks.append(Task(_combined(ops) if len(ops) > 1 else ops[0], after))

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


def _merge_key(op: Op) -> tuple[str, tuple[str, ...], str, bool]:
    return op.collective, op.axes, op.dtype if collective(op.collective).is_sum else "", op.pipelined


def _result_bytes(op: Op, mesh: MeshShape) -> float:
    return op.payload_bytes / mesh.sizes(op.axes) if collective(op.collective).gives_part else op.payload_bytes


def _combined(ops: Sequence[Op]) -> Op:
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
    """A combined all-reduce with its copies: XLA packs the operands into one buffer and unpacks the results.

    Args:
        buffer: the first of two unused buffer positions.
    """
    whole = _combined(ops)
    size = whole.payload_bytes
    itemsize = {"float64": 8, "bfloat16": 2, "float16": 2}.get(whole.dtype, 4)
    into = Op("fusion", whole.node, whole.reads, (buffer,), size, size, counted_flops=6 * size / itemsize)
    out = [
        Op("fusion", op.node, (buffer + 1,), op.writes, op.payload_bytes, op.payload_bytes, num_blocks=0.0)
        for op in ops
    ]
    return [into, replace(whole, reads=(buffer,), writes=(buffer + 1, -1 - buffer)), *out]


def _from_outputs(program: DeviceProgram, waits_for: Sequence[tuple[int, ...]]) -> list[int]:
    """Operations in post-order of a walk from the outputs along dependencies."""
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
    """Tracks which combinable collectives each operation depends on while they are combined.

    Each member of a combined collective depends on what any member depends on.

    Attributes:
        bits: per operation, a bit set of collectives.
    """

    def __init__(self, waits_for: Sequence[tuple[int, ...]], bit: Mapping[int, int]) -> None:
        self._bit, self._combined_at = bit, dict[int, list[int]]()
        self._users: list[list[int]] = [[] for _ in waits_for]
        self.bits = [0] * len(waits_for)
        for i, before in enumerate(waits_for):
            for j in before:
                self.bits[i] |= self.bits[j] | bit.get(j, 0)
                self._users[j].append(i)

    def merge(self, members: list[int]) -> None:
        """Combine collectives: give all members the union of their dependencies, and propagate it to their users."""
        self._combined_at |= dict.fromkeys(members, members)
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
            for user in self._users[i]:
                add(self._combined_at.get(user, (user,)), bits)


def predecessors(ops: Sequence[Op]) -> list[tuple[int, ...]]:
    """Per operation, the operations that write the buffers it reads."""
    writer: dict[int, int] = {}
    waits_for = []
    for i, op in enumerate(ops):
        waits_for.append(tuple(dict.fromkeys(writer[b] for b in op.reads if b in writer)))
        for buffer in op.writes:
            writer[buffer] = i
    return waits_for
