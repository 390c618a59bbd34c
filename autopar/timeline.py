"""When the operations of a device's program run, and what of its collectives nothing hides.

In: a `DeviceProgram`, the mesh, a hardware profile. Out: `Timeline`. Kernels run one after another on
one stream, collectives one after another beside them, in the order that XLA's latency hiding scheduler
would choose (openxla/xla, latency_hiding_scheduler.cc): from the last operation to the first, always
the one that is ready and least in the way of a collective that has to be hidden.
"""

from __future__ import annotations

import functools
import heapq
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from autopar.cost.hardware import HardwareProfile
from autopar.cost.kernels import is_small, op_seconds
from autopar.device_program import DeviceProgram, Op, peak_of_temporaries
from autopar.mesh import MeshShape

#: The scheduler takes this long to pass between two kernels at the least.
_BETWEEN_S = 1e-6
#: Collectives that may be in flight together: those of the library, and those XLA writes itself.
_IN_FLIGHT = {"library": 1, "kernel": 2}


class Ran(NamedTuple):
    """An operation and when it runs.

    Args:
        exposed_s: of a collective, what no kernel hides.
        trips: how often a step runs it; from `start_s` to `end_s` are all its trips together, as if they were one.
    """

    op: Op
    start_s: float
    end_s: float
    exposed_s: float = 0.0
    trips: float = 1.0

    def within(self, at_s: float, count: float) -> Ran:
        """The same in a loop of so many trips that begins at `at_s`."""
        return Ran(
            self.op,
            at_s + count * self.start_s,
            at_s + count * self.end_s,
            count * self.exposed_s,
            count * self.trips,
        )


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one step on one device.

    Args:
        step_time_s: from the first operation to the last.
        compute_s: kernels alone, with what it takes to start and end collectives.
        exposed_s: by kind of collective, what no kernel hides; above zero only.
        num_collectives: by kind, after merging.
        temporary_bytes: what is live in this order besides arguments and outputs, at most.
        ran: the operations as they start; a collective that runs in no time is left out.
        order: the operations in this order, loops laid open; of a collective its start and its end.
    """

    step_time_s: float
    compute_s: float
    exposed_s: Mapping[str, float] = field(hash=False)
    num_collectives: Mapping[str, int] = field(hash=False)
    temporary_bytes: float = 0.0
    ran: tuple[Ran, ...] = field(default=(), repr=False)
    order: tuple[Op, ...] = field(default=(), repr=False)


def simulate(program: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> Timeline:
    """Schedule a program, and time it.

    Only GPUs hide collectives. A profile with `xla_estimator` gives XLA's own estimate of the step; any other, what the profile's
    rates make of it.
    """
    ops, done = list(program.ops), dict[int, _Body]()
    for loop in program.loops:
        inside = [i for i, op in enumerate(ops) if loop.start <= op.node < loop.stop]
        if not inside:
            continue
        body, skipped, last = [ops[i] for i in inside], set(inside), inside[-1]
        done[loop.start] = _Body(_scheduled(replace(program, ops=tuple(body)), done, mesh, profile), loop.count)
        before = [op for i, op in enumerate(ops[:last]) if i not in skipped]
        ops = [*before, _as_one(body, loop.start), *ops[last + 1 :]]
    timeline = _scheduled(replace(program, ops=tuple(ops)), done, mesh, profile)
    return replace(timeline, temporary_bytes=peak_of_temporaries(program, timeline.order))


def _one_after_another(ops: Sequence[Op], mesh: MeshShape, profile: HardwareProfile) -> Timeline:
    """Elsewhere than on GPUs XLA waits for each collective where it starts."""
    compute = clock = 0.0
    exposed: dict[str, float] = defaultdict(float)
    numbers: dict[str, int] = defaultdict(int)
    ran: list[Ran] = []
    for op in ops:
        seconds = op_seconds(op, mesh, profile)
        waits = op.kind == "collective"
        if waits:
            exposed[op.collective] += seconds
            numbers[op.collective] += 1
        else:
            compute += seconds
        ran.append(Ran(op, clock, clock + seconds, seconds if waits else 0.0))
        clock += seconds
    return Timeline(
        compute + sum(exposed.values()),
        compute,
        dict(sorted(exposed.items())),
        dict(sorted(numbers.items())),
        ran=tuple(ran),
        order=tuple(ops),
    )


# -- loops -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Body:
    """One trip of a loop, and the number of trips."""

    timeline: Timeline
    count: float


def _scheduled(
    program: DeviceProgram, done: Mapping[int, _Body], mesh: MeshShape, profile: HardwareProfile
) -> Timeline:
    """Schedule operations; the loops among them run as they have been scheduled, all their trips, and nothing beside
    them: XLA takes a loop for one short operation."""
    tasks = merge_collectives(program, mesh, profile)
    if profile.platform == "gpu":
        issue = profile.xla_estimator.issue_s / 2 if profile.xla_estimator else 0.0
        nodes = _Nodes.of(tasks, mesh, profile, issue)
        timeline = _timed(nodes, _schedule(nodes), tasks)
    else:
        timeline = _one_after_another([task.op for task in tasks], mesh, profile)
    return _with_bodies(timeline, done)


def _with_bodies(timeline: Timeline, done: Mapping[int, _Body]) -> Timeline:
    """Loops laid open where each stands."""
    bodies = [done[op.node] for op in timeline.order if op.kind == "loop"]
    if not bodies:
        return timeline

    def added(times: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
        kinds = sorted({kind for _, figures in times for kind in figures})
        return {kind: sum(count * figures.get(kind, 0) for count, figures in times) for kind in kinds}

    ran: list[Ran] = []
    later = 0.0
    for one in timeline.ran:
        if one.op.kind == "loop":
            body = done[one.op.node]
            ran += [inner.within(one.start_s + later, body.count) for inner in body.timeline.ran]
            later += body.count * body.timeline.step_time_s
        else:
            ran.append(one._replace(start_s=one.start_s + later, end_s=one.end_s + later))
    all_of = [(1.0, timeline), *((body.count, body.timeline) for body in bodies)]
    laid_open = (done[op.node].timeline.order if op.kind == "loop" else (op,) for op in timeline.order)
    return Timeline(
        step_time_s=sum(count * one.step_time_s for count, one in all_of),
        compute_s=sum(count * one.compute_s for count, one in all_of),
        exposed_s=added([(count, one.exposed_s) for count, one in all_of]),
        num_collectives={
            k: round(n) for k, n in added([(count, one.num_collectives) for count, one in all_of]).items()
        },
        ran=tuple(ran),
        order=tuple(op for ops in laid_open for op in ops),
    )


def _as_one(body: Sequence[Op], node: int) -> Op:
    """What stands for a loop among the operations around it."""
    written = tuple(dict.fromkeys(b for op in body for b in op.writes))
    read = tuple(dict.fromkeys(b for op in body for b in op.reads))
    return Op("loop", node, read, written, 0.0, 0.0)


# -- merging ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """An operation, and the positions of the tasks that it comes after.

    They are kept apart from the buffers, for a buffer that is written in place has several writers: which of them is
    read is known only in the program's own order.
    """

    op: Op
    waits_for: tuple[int, ...]


def merge_collectives(program: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> tuple[Task, ...]:
    """The operations with combinable collectives of a kind merged, as XLA's combiners merge them; each after what it
    waits for, otherwise as they stood.

    In the order in which a walk from the outputs meets them, collectives of one kind over the same axes
    (and of one dtype, where they add) join until their results would exceed the profile's threshold, or one
    waits for another. The merged one stands where its last member stood.
    """
    order = _from_outputs(program)
    waits_for = predecessors(program.ops)
    waiting = [i for i in order if program.ops[i].combinable and program.ops[i].kind == "collective"]
    bit = {i: 1 << n for n, i in enumerate(waiting)}
    keys = {i: _merge_key(program.ops[i]) for i in waiting}
    together: dict[int, list[int]] = {}  # by its last member
    last_of: dict[int, int] = {}
    waiting_above = _CollectivesAbove(waits_for, bit)
    above = waiting_above.bits
    while waiting:
        lead, size, joined = waiting[0], 0.0, []
        own = before = 0  # of those joined: their bits, and those of what they wait for
        for i in waiting:
            if keys[i] != keys[lead]:
                continue
            result = _result_bytes(program.ops[i], mesh)
            if size + result > profile.combine_threshold_bytes and joined:
                break
            if above[i] & own or before & bit[i]:
                break
            joined.append(i)
            own, before, size = own | bit[i], before | above[i], size + result
            if size > profile.combine_threshold_bytes:
                break
        taken = set(joined)
        waiting = [i for i in waiting if i not in taken]
        if len(joined) > 1:
            last = max(joined)
            together[last] = sorted(joined)
            last_of |= dict.fromkeys(joined, last)
            waiting_above.merge(joined)
    return _in_order(program, waits_for, together, last_of, packs=profile.platform == "gpu")


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
        if len(ops) > 1 and packs and ops[0].collective == "all-reduce":
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
    return op.collective, op.axes, op.dtype if op.collective in ("all-reduce", "reduce-scatter") else ""


def _result_bytes(op: Op, mesh: MeshShape) -> float:
    return op.payload_bytes / mesh.sizes(op.axes) if op.collective == "reduce-scatter" else op.payload_bytes


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


def _from_outputs(program: DeviceProgram) -> list[int]:
    """Operations in the order of a walk from the outputs, those that one waits for before it."""
    waits_for = predecessors(program.ops)
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


# -- scheduling ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Nodes:
    """What is scheduled: kernels, and for each collective its start and, one after it, its end.

    `latency[i]` is the collective's own time where node `i` ends it, else 0; `tasks[i]` the operation it stands for.
    """

    tasks: list[int]
    kinds: list[str]
    costs: list[float]
    latency: list[float]
    resource: list[str]
    waits_for: list[list[int]]
    is_start: list[bool]
    is_end: list[bool]
    is_view: list[bool]
    has_views: bool = False

    @classmethod
    def of(cls, tasks: Sequence[Task], mesh: MeshShape, profile: HardwareProfile, issue_s: float) -> _Nodes:
        nodes = cls([], [], [], [], [], [], [], [], [])
        ends: list[int] = []  # by task, its last node
        nodes.has_views = any(task.op.kind == "view" for task in tasks)
        for position, task in enumerate(tasks):
            op = task.op
            seconds = op_seconds(op, mesh, profile)
            waits_for = sorted(ends[before] for before in task.waits_for)
            if op.kind != "collective":
                nodes._add("", seconds, 0.0, "", waits_for, view=op.kind == "view")
            elif seconds > 0:
                small = profile.xla_estimator is not None and is_small(op, mesh, profile.xla_estimator)
                resource = "kernel" if small else "library"
                nodes._add(op.collective, issue_s, 0.0, resource, waits_for, start=True)
                nodes._add(op.collective, issue_s, seconds, resource, [len(nodes.kinds) - 1], end=True)
            else:
                nodes._add("", 0.0, 0.0, "", waits_for, view=True)
            nodes.tasks += [position] * (len(nodes.kinds) - len(nodes.tasks))
            ends.append(len(nodes.kinds) - 1)
        return nodes

    def _add(
        self,
        kind: str,
        cost: float,
        latency: float,
        resource: str,
        waits_for: list[int],
        start: bool = False,
        end: bool = False,
        view: bool = False,
    ) -> None:
        self.kinds.append(kind)
        self.costs.append(cost)
        self.latency.append(latency)
        self.resource.append(resource)
        self.waits_for.append(waits_for)
        self.is_start.append(start)
        self.is_end.append(end)
        self.is_view.append(view)


def _schedule(nodes: _Nodes) -> list[int]:
    """The order of the nodes, first to last.

    They are placed from the last to the first. `clock` runs backwards from the end of the step; a start
    may be placed without waiting once its collective's time has passed since its end.
    """
    count = len(nodes.kinds)
    readers: list[list[int]] = [[] for _ in range(count)]
    for i, waits_for in enumerate(nodes.waits_for):
        for j in waits_for:
            readers[j].append(i)
    depth = _async_depth(nodes)
    unlocks = [sum(len(readers[j]) == 1 for j in waits_for) for waits_for in nodes.waits_for]
    ends_before = [any(nodes.is_end[j] for j in waits_for) for waits_for in nodes.waits_for]
    # Views take a turn each. Where the program has none, one is taken to stand between any two kernels, but not after
    # those that turn arguments into operands.
    direct = [
        nodes.has_views or (not nodes.kinds[i] and all(nodes.is_end[j] for j in waits_for))
        for i, waits_for in enumerate(nodes.waits_for)
    ]
    left = [len(r) for r in readers]
    ready_at = [0.0] * count
    placed_at = [0.0] * count
    ready = [i for i in range(count) if not readers[i]]
    free = dict(_IN_FLIGHT)
    queued = dict.fromkeys(_IN_FLIGHT, 0)
    for i in ready:
        if nodes.is_end[i]:
            queued[nodes.resource[i]] += 1
    clock, order = 0.0, []
    while ready:
        soonest = min((ready_at[i] for i in ready if ready_at[i] > clock), default=None)
        best, best_key = -1, ()
        views = [i for i in ready if nodes.is_view[i]]
        for i in views[-1:] or ready:
            resource = nodes.resource[i]
            if nodes.is_end[i] and not free[resource]:
                continue
            backed_up = nodes.is_start[i] and not free[resource] and queued[resource] > 0
            waste = 0.0
            if soonest is not None and not nodes.is_start[i]:
                waste = -abs(soonest - clock - nodes.costs[i])
            key = (
                nodes.is_end[i],
                -max(ready_at[i] - clock, 0.0),
                not (nodes.is_start[i] and depth[i] == 0 and not backed_up),
                backed_up,
                depth[i],
                waste,
                ends_before[i],
                unlocks[i],
                i,
            )
            if best < 0 or key > best_key:
                best, best_key = i, key
        ready.remove(best)
        order.append(best)
        placed_at[best] = max(clock, ready_at[best])
        clock = placed_at[best] + nodes.costs[best]
        if nodes.is_end[best]:
            free[nodes.resource[best]] -= 1
            queued[nodes.resource[best]] -= 1
        elif nodes.is_start[best]:
            free[nodes.resource[best]] += 1
        for j in nodes.waits_for[best]:
            left[j] -= 1
            if left[j]:
                continue
            lags = (placed_at[k] + (nodes.latency[k] or _BETWEEN_S) for k in readers[j])
            ready_at[j] = max(clock, *lags) + (0.0 if direct[j] else _BETWEEN_S)
            ready.append(j)
            if nodes.is_end[j]:
                queued[nodes.resource[j]] += 1
    return order[::-1]


def _async_depth(nodes: _Nodes) -> list[float]:
    """Seconds of collectives that one has to wait for, at the most, before a node can run."""
    depth = [0.0] * len(nodes.kinds)
    for i, waits_for in enumerate(nodes.waits_for):
        depth[i] = max((depth[j] + nodes.latency[i] for j in waits_for), default=0.0)
    return depth


def _timed(nodes: _Nodes, order: Sequence[int], tasks: Sequence[Task]) -> Timeline:
    """Walk the order from first to last: an end waits until its collective's time has passed since its start."""
    clock = compute = 0.0
    started: dict[int, float] = {}
    exposed: dict[str, float] = defaultdict(float)
    numbers: dict[str, int] = defaultdict(int)
    ran: list[Ran] = []
    for i in order:
        clock += nodes.costs[i]
        compute += nodes.costs[i]
        op = tasks[nodes.tasks[i]].op
        if nodes.is_start[i]:
            started[i] = clock
            numbers[nodes.kinds[i]] += 1
        elif nodes.is_end[i]:
            start = started[nodes.waits_for[i][0]]
            waited = max(0.0, nodes.latency[i] - (clock - start))
            exposed[nodes.kinds[i]] += waited
            clock += waited
            ran.append(Ran(op, start, start + nodes.latency[i], waited))
        elif op.kind != "collective":
            ran.append(Ran(op, clock - nodes.costs[i], clock))
    return Timeline(
        clock,
        compute,
        {kind: seconds for kind, seconds in sorted(exposed.items()) if seconds > 0},
        dict(sorted(numbers.items())),
        ran=tuple(sorted(ran, key=operator.attrgetter("start_s"))),
        order=tuple(tasks[nodes.tasks[i]].op for i in order),
    )
