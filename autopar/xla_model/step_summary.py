"""Summarize one device's schedule for the plan: a trace of the step, and memory use over time.

In: a graph, its `DeviceProgram`, its `Timeline`. Out: `StepTrace` and `MemoryOverStep`. Consecutive kernels or
collectives of one module form one entry. Where that leaves too many entries, they are grouped by the enclosing module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.kernel_time import bounds, op_seconds
from autopar.hardware.profile import HardwareProfile
from autopar.ir.device_program import Buffer, DeviceProgram, LoopSpan, Op, buffers_at_peak, live_temporaries
from autopar.ir.graph import Graph, Phase
from autopar.ir.mesh import MeshShape
from autopar.plans.step_trace import CollectiveRuns, Instant, KernelRuns, LiveBuffer, MemoryOverStep, StepTrace
from autopar.system.name_patterns import collapse
from autopar.xla_model.timeline import Ran, Timeline

#: Number of equal intervals of the step for which a plan records live bytes.
NUM_PARTS = 160
#: The most runs of kernels, and of collectives, that a plan records, unless the runs of whole phases are still more.
MAX_RUNS = 500
#: The idle time that ends a run, as a fraction of the step.
_PAUSE = 1 / 400
#: The number of buffer groups at the memory peak that a plan records.
MAX_HELD = 24

_Place = tuple[Phase, str]


# -- trace of the step -----------------------------------------------------------------------


def step_trace(graph: Graph, program: DeviceProgram, timeline: Timeline) -> StepTrace | None:
    """Summarize when a device runs each module's kernels and collectives.

    Returns:
        The trace; None for a step that takes no time.
    """
    if not timeline.step_time_s:
        return None
    kernels = [ran for ran in timeline.ran if ran.op.kind != "collective" and ran.end_s > ran.start_s]
    sent = [ran for ran in timeline.ran if ran.op.kind == "collective" and ran.end_s > ran.start_s]
    of_kernels = _grouped_runs(kernels, graph, timeline.step_time_s * _PAUSE, lambda ran: ())
    of_sent = _grouped_runs(sent, graph, timeline.step_time_s * _PAUSE, lambda ran: (ran.op.collective, ran.op.axes))
    places = list(dict.fromkeys(run.place for run in (*of_kernels, *of_sent)))
    kinds = list(dict.fromkeys((run.ran[0].op.collective, run.ran[0].op.axes) for run in of_sent))
    return StepTrace(
        places=tuple(places),
        kinds=tuple(kinds),
        kernels=KernelRuns(
            place=tuple(places.index(run.place) for run in of_kernels),
            start_ns=tuple(_ns(run.start_s) for run in of_kernels),
            ns=tuple(_ns(run.seconds) for run in of_kernels),
        ),
        collectives=CollectiveRuns(
            kind=tuple(kinds.index((run.ran[0].op.collective, run.ran[0].op.axes)) for run in of_sent),
            place=tuple(places.index(run.place) for run in of_sent),
            start_ns=tuple(_ns(run.start_s) for run in of_sent),
            ns=tuple(_ns(run.seconds) for run in of_sent),
            exposed_ns=tuple(_ns(sum(ran.exposed_s for ran in run.ran)) for run in of_sent),
            num_bytes=tuple(sum(ran.num_iterations * ran.op.payload_bytes for ran in run.ran) for run in of_sent),
            count=tuple(round(sum(ran.num_iterations for ran in run.ran)) for run in of_sent),
        ),
        loops=_loops_ran(program.loops, timeline.ran),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive operations of one phase and module."""

    place: _Place
    ran: tuple[Ran, ...]

    @property
    def start_s(self) -> float:
        return self.ran[0].start_s

    @property
    def seconds(self) -> float:
        return sum(ran.end_s - ran.start_s for ran in self.ran)


def _grouped_runs(
    ran: Sequence[Ran], graph: Graph, pause_s: float, key_of: Callable[[Ran], tuple[object, ...]]
) -> list[_Run]:
    """Group operations into at most `MAX_RUNS` runs, by the longest prefix of module paths that allows it.

    Args:
        key_of: a further key that all operations of a run share.
    """
    deepest = max((graph.nodes[one.op.node].path.count("/") + 1 for one in ran), default=1)
    runs: list[_Run] = []
    for depth in range(deepest, -1, -1):
        runs = list(_runs(ran, graph, pause_s, key_of, depth))
        if len(runs) <= MAX_RUNS:
            break
    return runs


def _runs(
    ran: Sequence[Ran], graph: Graph, pause_s: float, key_of: Callable[[Ran], tuple[object, ...]], depth: int
) -> Iterable[_Run]:
    members: list[Ran] = []
    key: object = None
    place: _Place = ("forward", "")
    for one in ran:
        node = graph.nodes[one.op.node]
        here: _Place = (node.phase, "/".join(node.path.split("/")[:depth]))
        this = (here, key_of(one))
        if members and (this != key or one.start_s - members[-1].end_s > pause_s):
            yield _Run(place, tuple(members))
            members = []
        members.append(one)
        key, place = this, here
    if members:
        yield _Run(place, tuple(members))


def _loops_ran(loops: Sequence[LoopSpan], ran: Sequence[Ran]) -> tuple[tuple[int, int, int], ...]:
    """Start, end (ns) and trip count of each loop, outer loops first."""
    found = []
    for loop in reversed(loops):
        own = [one for one in ran if loop.start <= one.op.node < loop.stop]
        if own and loop.count > 1:
            start, end = min(one.start_s for one in own), max(one.end_s for one in own)
            found.append((_ns(start), _ns(end), round(loop.count)))
    return tuple(found)


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


# -- memory over the step --------------------------------------------------------------------


def memory_over_step(
    graph: Graph,
    program: DeviceProgram,
    timeline: Timeline,
    mesh: MeshShape,
    profile: HardwareProfile,
) -> MemoryOverStep | None:
    """Summarize live temporaries (neither arguments nor outputs) over a step.

    Args:
        timeline: timeline of the step, which gives the total time of kernels and of each kind of collective.
        profile: the hardware profile behind the timeline.

    Returns:
        The summary; None for a step that takes no time.
    """
    if not timeline.step_time_s:
        return None
    order = timeline.order
    ends = _ends(program.loops, order, timeline, mesh, profile)
    live = live_temporaries(program, order)
    most = [0.0] * NUM_PARTS
    time_of: list[dict[Phase, float]] = [defaultdict(float) for _ in range(NUM_PARTS)]
    start = 0.0
    for live_bytes, end, phase in zip(live, ends, _phases(order, graph), strict=True):
        for part in range(_part(start), _part(end) + 1):
            most[part] = max(most[part], live_bytes)
            time_of[part][phase] += max(0.0, min(end, (part + 1) / NUM_PARTS) - max(start, part / NUM_PARTS))
        start = end
    instant, buffers = buffers_at_peak(program, order)
    node = graph.nodes[order[instant].node]
    return MemoryOverStep(
        live_bytes=tuple(most),
        phases=_runs_of([_longest(times) for times in time_of]),
        peak=Instant(path=node.path, primitive=node.primitive, phase=node.phase, source=node.source),
        at_peak=_buffer_groups(buffers, graph)[:MAX_HELD],
        loops=_loop_parts(program.loops, order, ends),
    )


def _phases(order: Sequence[Op], graph: Graph) -> list[Phase]:
    """The phase of each operation. A collective belongs to the phase of the next kernel, which consumes its result."""
    found: list[Phase] = []
    phase: Phase = "update"
    for op in reversed(order):
        if op.kind != "collective":
            phase = graph.nodes[op.node].phase
        found.append(phase)
    return found[::-1]


def _runs_of(phases: Sequence[Phase]) -> tuple[tuple[Phase, int], ...]:
    runs: list[tuple[Phase, int]] = []
    for phase in phases:
        runs = [*runs[:-1], (phase, runs[-1][1] + 1)] if runs and runs[-1][0] == phase else [*runs, (phase, 1)]
    return tuple(runs)


def _longest(times: Mapping[Phase, float]) -> Phase:
    return max(times, key=lambda phase: times[phase])


def _ends(
    loops: Sequence[LoopSpan], order: Sequence[Op], timeline: Timeline, mesh: MeshShape, profile: HardwareProfile
) -> list[float]:
    """The end of each operation as a fraction of the step.

    The kernels together take the compute time, and each kind of collective takes its exposed time. The order decides
    where a collective is hidden, but it does not change these totals.
    """
    seconds = [op_seconds(op, mesh, profile) * _trip_count(op.node, loops) for op in order]
    whole: dict[str, float] = defaultdict(float)
    for op, own in zip(order, seconds, strict=True):
        whole[op.collective] += own
    times = {"": timeline.compute_s, **timeline.exposed_s}
    ends, clock = [], 0.0
    for op, own in zip(order, seconds, strict=True):
        if own:
            clock += own / whole[op.collective] * times.get(op.collective, 0.0) / timeline.step_time_s
        ends.append(min(clock, 1.0))
    return ends


def seconds_by_node(device: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> dict[int, float]:
    """Kernel seconds per step by the node that names the kernel, over all iterations of its loops."""
    seconds: dict[int, float] = defaultdict(float)
    for op in device.ops:
        if op.kind != "collective":
            seconds[op.node] += op_seconds(op, mesh, profile) * _trip_count(op.node, device.loops)
    return dict(seconds)


def seconds_by_bound(device: DeviceProgram, timeline: Timeline, profile: HardwareProfile) -> dict[str, float]:
    """Seconds of a step by what limits them: a unit of the device, kernel launches, or exposed communication."""
    seconds: dict[str, float] = defaultdict(float)
    for op in device.ops:
        if op.kind != "collective":
            for bound, time_s in bounds(op, profile):
                seconds[bound] += time_s * _trip_count(op.node, device.loops)
    seconds["exposed communication"] = sum(timeline.exposed_s.values())
    return {bound: time_s for bound, time_s in sorted(seconds.items(), key=lambda one: -one[1]) if time_s > 0}


def _trip_count(node: int, loops: Sequence[LoopSpan]) -> float:
    times = 1.0
    for loop in loops:
        if loop.start <= node < loop.stop:
            times *= loop.count
    return times


def _part(share: float) -> int:
    return min(int(share * NUM_PARTS), NUM_PARTS - 1)


def _loop_parts(
    loops: Sequence[LoopSpan], order: Sequence[Op], ends: Sequence[float]
) -> tuple[tuple[int, int, int], ...]:
    found = []
    for loop in reversed(loops):
        inside = [n for n, op in enumerate(order) if loop.start <= op.node < loop.stop]
        if inside and loop.count > 1:
            start = ends[inside[0] - 1] if inside[0] else 0.0
            found.append((_part(start), _part(ends[inside[-1]]) + 1, round(loop.count)))
    return tuple(found)


def _buffer_groups(buffers: Sequence[Buffer], graph: Graph) -> tuple[LiveBuffer, ...]:
    """Group buffers by producer, shape and dtype; the largest group first."""
    inputs = dict(zip(graph.inputs, graph.input_paths, strict=True))
    by_key: dict[tuple[str, Phase, str, tuple[int, ...], str], list[tuple[str, Buffer]]] = defaultdict(list)
    for buffer in buffers:
        node, value = graph.producer(buffer.value), graph.values[buffer.value] if buffer.value >= 0 else None
        shape, dtype = (value.shape, value.dtype) if value else ((), "")
        if node:
            by_key[node.primitive, node.phase, node.source, shape, dtype].append((node.path, buffer))
        else:
            by_key["", "forward", "", shape, dtype].append((inputs.get(buffer.value, ""), buffer))
    groups = [
        LiveBuffer(
            path=path,
            primitive=primitive,
            phase=phase,
            source=source,
            shape=shape,
            dtype=dtype,
            count=len(positions),
            num_bytes=sum(own[position][1].num_bytes for position in positions),
        )
        for (primitive, phase, source, shape, dtype), own in by_key.items()
        for path, positions in collapse([path for path, _ in own])
    ]
    return tuple(sorted(groups, key=lambda one: (-one.num_bytes, one.path, one.primitive)))
