"""Run the all-gathers of scans one iteration ahead, as XLA's collective pipeliner does.

In: a `DeviceProgram`, its graph. Out: the program in which each iteration gathers the weights that the next one reads.
Source: openxla/xla, xla/service/collective_pipeliner.cc (backward), xla/service/copy_insertion.cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.device_program import Buffer, DeviceProgram, LoopSpan, Op
from autopar.ir.graph import Graph
from autopar.xla_model.collective_combiner import Task
from autopar.xla_model.latency_hiding_scheduler import ScheduleNodes

#: Kinds of operations that may precede a gather that moves: those that slice and convert the weights.
_FORMATTING = ("fusion", "view")


def pipeline_gathers(program: DeviceProgram, graph: Graph) -> DeviceProgram:
    """The program with gathers that depend on nothing but the slices of an iteration moved to the iteration before.

    The first iteration's gathers run before the loop. The gathered arrays become state of the loop: one copy is read
    while the next is gathered. XLA peels off the last iteration, which gathers nothing; here it gathers once more.
    """
    ops, buffers = list(program.ops), list(program.buffers)
    loops, inner = list[LoopSpan](), set[int]()
    for loop in program.loops:
        nodes = set(range(loop.start, loop.stop)) - inner
        own = [i for i, op in enumerate(ops) if op.node in nodes]
        inner |= nodes
        moved = _moved([ops[i] for i in own], graph) if loop.count > 1 else _Moved((), ())
        if not moved.gathered:
            loops.append(loop)
            continue
        kept = {b: len(buffers) + n for n, b in enumerate(moved.gathered)}
        buffers += [replace(buffers[b], moved=True) for b in kept]
        alone = {id(op) for op in moved.ops}
        for i in own:
            ops[i] = _pipelined(ops[i]) if id(ops[i]) in alone else _reading(ops[i], kept)
        loops.append(replace(loop, first=_first(moved.ops, kept, buffers), prefetched=tuple(kept.items())))
        ops[own[-1] : own[-1]] = [_copy(b, state, loop.stop - 1, buffers) for b, state in kept.items()]
    return replace(program, ops=tuple(ops), buffers=tuple(buffers), loops=tuple(loops))


def gathered_bytes(program: DeviceProgram) -> float:
    """Bytes that an iteration gathers for the next one, the most of any loop."""
    sizes = [sum(program.buffers[b].num_bytes for b, _ in loop.prefetched) for loop in program.loops]
    return max(sizes, default=0.0)


@dataclass(frozen=True, slots=True)
class _Moved:
    """The operations that run one iteration ahead, and the buffers that the next iteration reads."""

    ops: tuple[Op, ...]
    gathered: tuple[int, ...]


def _moved(body: Sequence[Op], graph: Graph) -> _Moved:
    """What moves of a loop's body."""
    entering = {
        b for op in body if _enters(op, graph, "enter_slice") or _enters(op, graph, "enter_const") for b in op.writes
    }
    entering -= {b for op in body if op.kind != "border" for b in op.writes}
    sliced = {b for op in body if _enters(op, graph, "enter_slice") for b in op.writes} & entering
    known, producers = entering, dict[int, Op]()
    for op in body:
        if op.reads and known.issuperset(op.reads) and (op.kind in _FORMATTING or op.collective == "all-gather"):
            known = known | set(op.writes)
            producers |= dict.fromkeys(op.writes, op)
            sliced |= set(op.writes) if sliced.intersection(op.reads) else set()
    gathers = [op for op in dict.fromkeys(producers.values()) if op.collective and sliced.intersection(op.reads)]
    chains = [_chain(op, producers) for op in gathers]
    while True:  # an operation with a user that stays cannot move
        ops = {id(op) for chain in chains for op in chain}
        read = {b for op in body if id(op) not in ops for b in op.reads}
        movable = [c for c in chains if all(read.isdisjoint(op.writes) for op in c if not op.collective)]
        if len(movable) == len(chains):
            break
        chains = movable
    moved = tuple(op for op in body if id(op) in ops)
    return _Moved(moved, tuple(b for op in moved if op.collective for b in op.writes if b in read))


def _enters(op: Op, graph: Graph, primitive: str) -> bool:
    return op.kind == "border" and graph.nodes[op.node].primitive == primitive


def _chain(gather: Op, producers: Mapping[int, Op]) -> list[Op]:
    """A gather and the operations that it depends on, in reverse order."""
    found = [gather]
    for op in found:
        found += [producers[b] for b in op.reads if b in producers and producers[b] not in found]
    return found


def _pipelined(op: Op) -> Op:
    return replace(op, pipelined=True) if op.collective else op


def _reading(op: Op, kept: Mapping[int, int]) -> Op:
    """The operation, reading what the iteration before gathered."""
    if kept.keys().isdisjoint(op.reads):
        return op
    overwrites = tuple(b for b in op.overwrites if b not in kept)
    return replace(op, reads=tuple(kept.get(b, b) for b in op.reads), overwrites=overwrites)


def _first(ops: Sequence[Op], kept: Mapping[int, int], buffers: list[Buffer]) -> tuple[Op, ...]:
    """The gathers before the first iteration, with buffers of their own."""
    own, found = dict(kept), list[Op]()
    for op in ops:
        for b in op.writes:
            if b not in own:
                own[b] = len(buffers)
                buffers.append(buffers[b])
        reads, writes = (tuple(own.get(b, b) for b in those) for those in (op.reads, op.writes))
        found.append(replace(_pipelined(op), reads=reads, writes=writes, overwrites=()))
    return tuple(found)


def _copy(gathered: int, state: int, node: int, buffers: Sequence[Buffer]) -> Op:
    size = buffers[gathered].num_bytes
    return Op("fusion", node, (gathered,), (state,), size, size, unpriced=True)


def elided_copies(
    nodes: ScheduleNodes, tasks: Sequence[Task], order: Sequence[int], prefetched: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """The nodes that copy a gathered array into the loop's state, of the gathers that start after the last read of that
    state: XLA lets these write into it.

    Args:
        order: the scheduled order of the nodes.
        prefetched: pairs of a gathered buffer and the loop's state.
    """
    found = list[int]()
    for gathered, state in prefetched:
        started = last_read = copied = -1
        for at, node in enumerate(order):
            op = tasks[nodes.tasks[node]].op
            if gathered in op.writes and nodes.is_start[node]:
                started = at
            elif state in op.writes:
                copied = node
            elif state in op.reads:
                last_read = at
        if started > last_read:
            found.append(copied)
    return tuple(found)
