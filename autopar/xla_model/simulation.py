"""Simulate one step of a device's program, by the profile's rates and by XLA's latency estimator.

In: a `DeviceProgram`, the mesh, a hardware profile. Out: `Timeline`. On GPUs kernels run in sequence on one stream, and
collectives run in sequence on another, concurrently with the kernels (`latency_hiding_scheduler`). A loop's body is
scheduled by itself; nothing overlaps with the loop.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from autopar.cost.kernel_time import is_unestimated, op_seconds
from autopar.hardware.profile import HardwareProfile
from autopar.ir.device_program import DeviceProgram, Op, peak_of_temporaries
from autopar.ir.mesh import MeshShape
from autopar.xla_model.collective_combiner import CollectiveCombiner, Task
from autopar.xla_model.latency_hiding_scheduler import (
    IN_FLIGHT,
    ScheduleNodes,
    SchedulePrices,
    resource_of,
    scheduled,
)
from autopar.xla_model.timeline import Ran, Timeline, Timelines


def simulate(program: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> Timeline:
    """Schedule a program and return its timeline.

    Only GPUs hide collectives. A profile with `xla_estimator` yields XLA's own estimate of the step; any other profile
    yields an estimate by its rates.
    """
    return Simulation(program, mesh, profile).timeline()


class Simulation:
    """Timelines of one program for any combine threshold, by either estimate; work that timelines share is done once.

    Attributes:
        program: the simulated program.
    """

    def __init__(self, program: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> None:
        self.program, self._mesh = program, mesh
        self._by_rates, self._estimated = replace(profile, xla_estimator=None), profile
        self._seconds: dict[bool, dict[int, float]] = {False: {}, True: {}}
        ops, self._bodies = list(program.ops), list[tuple[int, float, CollectiveCombiner]]()
        for loop in program.loops:
            inside = [i for i, op in enumerate(ops) if loop.start <= op.node < loop.stop]
            if not inside:
                continue
            body, skipped, last = [ops[i] for i in inside], set(inside), inside[-1]
            self._bodies.append((loop.start, loop.count, CollectiveCombiner(replace(program, ops=tuple(body)), mesh)))
            before = [op for i, op in enumerate(ops[:last]) if i not in skipped]
            ops = [*before, _loop_op(body, loop.start), *ops[last + 1 :]]
        self._whole = CollectiveCombiner(replace(program, ops=tuple(ops)) if self._bodies else program, mesh)
        self._tasks: dict[tuple[int, float], tuple[Task, ...]] = {}
        self._nodes: dict[tuple[tuple[int, float], frozenset[int]], ScheduleNodes] = {}

    def timeline(self, *, by_rates: bool = False, combine_threshold_bytes: float | None = None) -> Timeline:
        """Schedule the program and return its timeline.

        Args:
            by_rates: whether to use the profile's rates although it has an estimator.
            combine_threshold_bytes: combine threshold of collectives; None for the profile's.
        """
        limit = self._estimated.combine_threshold_bytes if combine_threshold_bytes is None else combine_threshold_bytes
        done: dict[int, _Body] = {}
        for start, count, body in self._bodies:
            done[start] = _Body(self._scheduled(body, limit, done, by_rates=by_rates), count)
        timeline = self._scheduled(self._whole, limit, done, by_rates=by_rates)
        return replace(timeline, temporary_bytes=peak_of_temporaries(self.program, timeline.order))

    @overload
    def timelines(self) -> Timelines: ...
    @overload
    def timelines(self, combine_threshold_bytes: float | None, to_beat: float) -> Timelines | None: ...

    def timelines(self, combine_threshold_bytes: float | None = None, to_beat: float = math.inf) -> Timelines | None:
        """The timelines by both estimates; None where the geometric mean of two step times cannot be below `to_beat`.

        Args:
            combine_threshold_bytes: combine threshold, as in `timeline`.
            to_beat: seconds of the best step so far.
        """
        if self._estimated.xla_estimator is None:
            return Timelines(self.timeline(combine_threshold_bytes=combine_threshold_bytes), None)
        estimated = self.timeline(combine_threshold_bytes=combine_threshold_bytes)
        estimated_s = estimated.step_time_s + self.unestimated_s
        if to_beat < math.inf and math.sqrt(self.least_s(by_rates=True) * estimated_s) >= to_beat:
            return None
        return Timelines(self.timeline(by_rates=True, combine_threshold_bytes=combine_threshold_bytes), estimated)

    def least_s(self, *, by_rates: bool = False) -> float:
        """A lower bound of the step time for every combine threshold: the time of the busier stream.

        Small collectives, for which XLA emits its own kernels, may run two at a time. A loop counts one iteration.
        """
        seconds, profile = self._seconds_of(by_rates)
        kernels = sum(seconds(op) for op in self.program.ops if op.kind != "collective")
        collectives = 0.0
        for merging in (self._whole, *(body for _, _, body in self._bodies)):
            for op in merging.at_most_merged():
                collectives += op_seconds(op, self._mesh, profile) / IN_FLIGHT[resource_of(op, self._mesh, profile)]
        return max(kernels, collectives)

    @cached_property
    def unestimated_s(self) -> float:
        """Seconds that XLA's estimator misses for kernels to which it gives a constant time (convolutions, library
        calls, custom kernels): their time by the profile's rates less that constant. A loop counts one iteration."""
        (own, _), (estimated, _) = self._seconds_of(True), self._seconds_of(False)
        unknown = [op for op in self.program.ops if is_unestimated(op)]
        return sum(max(0.0, own(op) - estimated(op)) for op in unknown) if self._estimated.xla_estimator else 0.0

    def _scheduled(
        self, merging: CollectiveCombiner, combine_threshold_bytes: float, done: Mapping[int, _Body], *, by_rates: bool
    ) -> Timeline:
        """Schedule operations, and expand each loop to all iterations of its scheduled body. Nothing overlaps with a
        loop, which XLA's scheduler takes for one short operation."""
        seconds, profile = self._seconds_of(by_rates)
        is_gpu = profile.platform == "gpu"
        key = id(merging), combine_threshold_bytes
        tasks = self._tasks.get(key)
        if tasks is None:
            tasks = self._tasks[key] = merging.tasks(combine_threshold_bytes, packs=is_gpu)
        if not is_gpu:
            return _expand_loops(_sequential([task.op for task in tasks], seconds), done)
        times = [seconds(task.op) for task in tasks]
        instant = frozenset([i for i, task in enumerate(tasks) if task.op.kind == "collective" and not times[i] > 0])
        nodes = self._nodes.get((key, instant))
        if nodes is None:
            nodes = self._nodes[key, instant] = ScheduleNodes.of(tasks, instant)
        prices = SchedulePrices.of(nodes, tasks, times, self._mesh, profile)
        return _expand_loops(scheduled(nodes, prices, tasks), done)

    def _seconds_of(self, by_rates: bool) -> tuple[Callable[[Op], float], HardwareProfile]:
        """A cached function from an operation to its seconds, and the profile it uses. The cache is keyed by `id`,
        since the program and its combiners keep every operation alive."""
        known, profile = self._seconds[by_rates], self._by_rates if by_rates else self._estimated

        def seconds(op: Op) -> float:
            found = known.get(id(op))
            if found is None:
                found = known[id(op)] = op_seconds(op, self._mesh, profile)
            return found

        return seconds, profile


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


def _loop_op(body: Sequence[Op], node: int) -> Op:
    """One operation that represents a loop in the schedule around it."""
    written = tuple(dict.fromkeys(b for op in body for b in op.writes))
    read = tuple(dict.fromkeys(b for op in body for b in op.reads))
    return Op("loop", node, read, written, 0.0, 0.0)
