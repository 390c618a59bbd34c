"""Simulate one step of a device's program: XLA's order, at the device's own rates.

In: a `DeviceProgram`, the mesh, a hardware profile. Out: `Timeline`. XLA's scheduler orders kernels and collectives by
its latency estimator (`latency_hiding_scheduler`, `latency_estimator`). On GPUs kernels then run in sequence on one
stream, and collectives run in sequence on another, concurrently with the kernels. A loop's body is scheduled by itself;
nothing overlaps with the loop.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from autopar.cost.kernel_time import op_seconds
from autopar.hardware.profile import HardwareProfile
from autopar.ir.device_program import DeviceProgram, LoopSpan, Op, peak_of_temporaries
from autopar.ir.mesh import MeshShape
from autopar.xla_model.collective_combiner import CollectiveCombiner, Task
from autopar.xla_model.collective_pipeliner import elided_copies
from autopar.xla_model.latency_estimator import estimated_seconds
from autopar.xla_model.latency_hiding_scheduler import (
    IN_FLIGHT,
    ScheduleNodes,
    SchedulePrices,
    resource_of,
    scheduled,
    timed,
)
from autopar.xla_model.timeline import Ran, Timeline, Timelines


def simulate(program: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> Timeline:
    """Schedule a program and return its timeline. Only GPUs hide collectives."""
    return Simulation(program, mesh, profile).timeline()


class Simulation:
    """Timelines of one program for any combine threshold; work that timelines share is done once.

    Attributes:
        program: the simulated program.
    """

    def __init__(self, program: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> None:
        self.program, self._mesh, self._profile = program, mesh, profile
        self._estimator = profile.xla_estimator
        self._seconds: dict[bool, dict[int, float]] = {False: {}, True: {}}
        ops, self._bodies = list(program.ops), list[tuple[LoopSpan, CollectiveCombiner]]()
        for loop in program.loops:
            inside = [i for i, op in enumerate(ops) if loop.start <= op.node < loop.stop]
            if not inside:
                continue
            body, skipped, last = [ops[i] for i in inside], set(inside), inside[-1]
            self._bodies.append((loop, CollectiveCombiner(replace(program, ops=tuple(body)), mesh)))
            before = [op for i, op in enumerate(ops[:last]) if i not in skipped]
            ops = [*before, *loop.first, _loop_op(body, loop.start), *ops[last + 1 :]]
        self._whole = CollectiveCombiner(replace(program, ops=tuple(ops)) if self._bodies else program, mesh)
        self._schedules: dict[tuple[int, float], _Schedule] = {}

    def timeline(self, *, estimated: bool = False, combine_threshold_bytes: float | None = None) -> Timeline:
        """Schedule the program and return its timeline.

        Args:
            estimated: whether each operation takes what XLA estimates, instead of its time at the device's own rates.
            combine_threshold_bytes: combine threshold of collectives; None for the profile's.
        """
        timeline = self._whole_step(combine_threshold_bytes, estimated=estimated)
        return replace(timeline, temporary_bytes=peak_of_temporaries(self.program, timeline.order))

    @overload
    def timelines(self) -> Timelines: ...
    @overload
    def timelines(self, combine_threshold_bytes: float | None, to_beat: float) -> Timelines | None: ...

    def timelines(self, combine_threshold_bytes: float | None = None, to_beat: float = math.inf) -> Timelines | None:
        """The timeline at the device's rates and, where XLA has an estimator, the same by its estimate; None where the
        step takes `to_beat` seconds or longer.

        Args:
            combine_threshold_bytes: combine threshold, as in `timeline`.
        """
        if self.least_s >= to_beat:
            return None
        own = self.timeline(combine_threshold_bytes=combine_threshold_bytes)
        if own.step_time_s >= to_beat:
            return None
        if self._estimator is None:
            return Timelines(own, None)
        estimated = self._whole_step(combine_threshold_bytes, estimated=True)
        return Timelines(own, replace(estimated, temporary_bytes=own.temporary_bytes))  # the order is the same

    @cached_property
    def least_s(self) -> float:
        """A lower bound of the step time for every combine threshold: the time of the busier stream.

        Small collectives, for which XLA emits its own kernel, may run two at a time. A loop counts one iteration.
        """
        kernels = sum(self._own(op) for op in self.program.ops if op.kind != "collective")
        collectives = 0.0
        for merging in (self._whole, *(body for _, body in self._bodies)):
            for op in merging.at_most_merged():
                at_once = IN_FLIGHT[resource_of(op, self._mesh, self._profile)]
                collectives += op_seconds(op, self._mesh, self._profile) / at_once
        return max(kernels, collectives)

    def _whole_step(self, combine_threshold_bytes: float | None, *, estimated: bool) -> Timeline:
        """The timeline of the step without the peak of its temporaries."""
        limit = self._profile.combine_threshold_bytes if combine_threshold_bytes is None else combine_threshold_bytes
        done: dict[int, _Body] = {}
        for loop, body in self._bodies:
            ran = self._timed(body, limit, done, estimated=estimated, prefetched=loop.prefetched)
            done[loop.start] = _Body(_held_throughout(ran), loop.count)
        return self._timed(self._whole, limit, done, estimated=estimated)

    def _timed(
        self,
        merging: CollectiveCombiner,
        combine_threshold_bytes: float,
        done: Mapping[int, _Body],
        *,
        estimated: bool,
        prefetched: Sequence[tuple[int, int]] = (),
    ) -> Timeline:
        """Run the schedule, and expand each loop to all iterations of its scheduled body. Nothing overlaps with a loop,
        which XLA's scheduler takes for one short operation."""
        seconds = self._estimated if estimated else self._own
        if self._profile.platform != "gpu":
            tasks = merging.tasks(combine_threshold_bytes, packs=False)
            return _expand_loops(_sequential([task.op for task in tasks], seconds), done)
        one = self._schedule(merging, combine_threshold_bytes)
        prices = self._prices(one.nodes, one.tasks, estimated=estimated)
        for copy in elided_copies(one.nodes, one.tasks, one.order, prefetched):
            prices.costs[copy] = 0.0
        slowdown = 0.0 if estimated else self._profile.kernel_slowdown
        return _expand_loops(timed(one.nodes, prices, one.order, one.tasks, slowdown), done)

    def _schedule(self, merging: CollectiveCombiner, combine_threshold_bytes: float) -> _Schedule:
        """XLA's schedule; without an estimator, by the device's own rates."""
        key = id(merging), combine_threshold_bytes
        if key not in self._schedules:
            tasks = merging.tasks(combine_threshold_bytes, packs=True)
            sent = [(i, task.op) for i, task in enumerate(tasks) if task.op.kind == "collective"]
            nodes = ScheduleNodes.of(tasks, frozenset([i for i, op in sent if not self._estimated(op) > 0]))
            order = scheduled(nodes, self._prices(nodes, tasks, estimated=True))
            self._schedules[key] = _Schedule(tasks, nodes, order)
        return self._schedules[key]

    def _prices(self, nodes: ScheduleNodes, tasks: Sequence[Task], *, estimated: bool) -> SchedulePrices:
        seconds = self._estimated if estimated else self._own
        issue_s = self._estimator.issue_s / 2 if estimated and self._estimator else 0.0
        return SchedulePrices.of(nodes, tasks, [seconds(task.op) for task in tasks], self._mesh, self._profile, issue_s)

    def _own(self, op: Op) -> float:
        return self._cached(op, False, op_seconds)

    def _estimated(self, op: Op) -> float:
        return self._cached(op, True, estimated_seconds)

    def _cached(self, op: Op, estimated: bool, seconds: Callable[[Op, MeshShape, HardwareProfile], float]) -> float:
        """Seconds of an operation. The cache is keyed by `id`, since the program and its combiners keep every operation
        alive."""
        known = self._seconds[estimated]
        found = known.get(id(op))
        if found is None:
            found = known[id(op)] = seconds(op, self._mesh, self._profile)
        return found


@dataclass(frozen=True, slots=True)
class _Schedule:
    """Tasks, their nodes, and the order of the nodes."""

    tasks: Sequence[Task]
    nodes: ScheduleNodes
    order: Sequence[int]


def _sequential(ops: Sequence[Op], seconds_of: Callable[[Op], float]) -> Timeline:
    """The timeline on other platforms than GPUs: XLA runs each collective synchronously."""
    compute = clock = 0.0
    exposed: dict[str, float] = defaultdict(float)
    numbers: dict[str, int] = defaultdict(int)
    ran: list[Ran] = []
    for op in ops:
        seconds = seconds_of(op)
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


@dataclass(frozen=True, slots=True)
class _Body:
    """The timeline of one iteration of a loop, and the trip count."""

    timeline: Timeline
    count: float


def _expand_loops(timeline: Timeline, done: Mapping[int, _Body]) -> Timeline:
    """Replace each loop operation by all iterations of its body."""
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
    expanded = (done[op.node].timeline.order if op.kind == "loop" else (op,) for op in timeline.order)
    return Timeline(
        step_time_s=sum(count * one.step_time_s for count, one in all_of),
        compute_s=sum(count * one.compute_s for count, one in all_of),
        exposed_s=added([(count, one.exposed_s) for count, one in all_of]),
        num_collectives={
            k: round(n) for k, n in added([(count, one.num_collectives) for count, one in all_of]).items()
        },
        ran=tuple(ran),
        order=tuple(op for ops in expanded for op in ops),
    )


def _held_throughout(body: Timeline) -> Timeline:
    """The timeline of a loop's body whose stacks are live from its first operation to its last, whenever it writes them.

    XLA carries them from iteration to iteration.
    """

    def place(op: Op) -> int:
        return 0 if op.kind != "border" else (not op.writes) - (not op.reads)

    return replace(body, order=tuple(sorted(body.order, key=place)))


def _loop_op(body: Sequence[Op], node: int) -> Op:
    """One operation that represents a loop in the schedule around it."""
    written = tuple(dict.fromkeys(b for op in body for b in op.writes))
    read = tuple(dict.fromkeys(b for op in body for b in op.reads))
    return Op("loop", node, read, written, 0.0, 0.0)
