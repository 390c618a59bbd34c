"""Timelines of a device's program: by the device's own rates, and as XLA's estimator has it.

In: a `DeviceProgram`, the mesh, a hardware profile. Out: `Timeline`. On GPUs kernels run one after another on one stream, and
collectives one after another beside them (`latency_hiding_scheduler`); a loop runs as its body was scheduled, and nothing
beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from autopar.cost.hardware_profile import HardwareProfile
from autopar.cost.kernel_time import is_unestimated, op_seconds
from autopar.ir.device_program import DeviceProgram, Op, peak_of_temporaries
from autopar.ir.mesh import MeshShape
from autopar.xla_model.collective_combiner import Merging, Task
from autopar.xla_model.latency_hiding_scheduler import (
    IN_FLIGHT,
    ScheduleNodes,
    SchedulePrices,
    resource_of,
    scheduled,
)
from autopar.xla_model.timeline import Opinions, Ran, Timeline


def simulate(program: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> Timeline:
    """Schedule a program, and time it.

    Only GPUs hide collectives. A profile with `xla_estimator` gives XLA's own estimate of the step; any other, what the profile's
    rates make of it.
    """
    return Simulation(program, mesh, profile).timeline()


class Simulation:
    """A program that can be scheduled and timed with any limit of merging, in XLA's opinion and in that of the device's
    own rates: what these share is worked out once.

    Attributes:
        program: as given.
    """

    def __init__(self, program: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> None:
        self.program, self._mesh = program, mesh
        self._by_rates, self._estimated = replace(profile, xla_estimator=None), profile
        self._seconds: dict[bool, dict[int, float]] = {False: {}, True: {}}
        ops, self._bodies = list(program.ops), list[tuple[int, float, Merging]]()
        for loop in program.loops:
            inside = [i for i, op in enumerate(ops) if loop.start <= op.node < loop.stop]
            if not inside:
                continue
            body, skipped, last = [ops[i] for i in inside], set(inside), inside[-1]
            self._bodies.append((loop.start, loop.count, Merging(replace(program, ops=tuple(body)), mesh)))
            before = [op for i, op in enumerate(ops[:last]) if i not in skipped]
            ops = [*before, _as_one(body, loop.start), *ops[last + 1 :]]
        self._whole = Merging(replace(program, ops=tuple(ops)) if self._bodies else program, mesh)
        self._tasks: dict[tuple[int, float], tuple[Task, ...]] = {}
        self._nodes: dict[tuple[tuple[int, float], frozenset[int]], ScheduleNodes] = {}

    def timeline(self, *, by_rates: bool = False, merge_bytes: float | None = None) -> Timeline:
        """When everything runs.

        Args:
            by_rates: by the device's own rates, even where the profile has an estimator.
            merge_bytes: to which collectives are merged; None for the profile's limit.
        """
        limit = self._estimated.combine_threshold_bytes if merge_bytes is None else merge_bytes
        done: dict[int, _Body] = {}
        for start, count, body in self._bodies:
            done[start] = _Body(self._scheduled(body, limit, done, by_rates=by_rates), count)
        timeline = self._scheduled(self._whole, limit, done, by_rates=by_rates)
        return replace(timeline, temporary_bytes=peak_of_temporaries(self.program, timeline.order))

    @overload
    def opinions(self) -> Opinions: ...
    @overload
    def opinions(self, merge_bytes: float | None, to_beat: float) -> Opinions | None: ...

    def opinions(self, merge_bytes: float | None = None, to_beat: float = math.inf) -> Opinions | None:
        """Both opinions of when everything runs; None where the geometric mean of their step times, if there are two,
        cannot be below `to_beat`.

        Args:
            merge_bytes: as `timeline` has it. to_beat: seconds.
        """
        if self._estimated.xla_estimator is None:
            return Opinions(self.timeline(merge_bytes=merge_bytes), None)
        estimated = self.timeline(merge_bytes=merge_bytes)
        estimated_s = estimated.step_time_s + self.unestimated_s
        if to_beat < math.inf and math.sqrt(self.least_s(by_rates=True) * estimated_s) >= to_beat:
            return None
        return Opinions(self.timeline(by_rates=True, merge_bytes=merge_bytes), estimated)

    def least_s(self, *, by_rates: bool = False) -> float:
        """No limit of merging makes the step shorter: kernels run one after another, and so do collectives, but for the
        small ones that XLA writes itself. Of a program with loops, one trip of each counts."""
        seconds, profile = self._seconds_of(by_rates)
        kernels = sum(seconds(op) for op in self.program.ops if op.kind != "collective")
        collectives = 0.0
        for merging in (self._whole, *(body for _, _, body in self._bodies)):
            for op in merging.at_most_merged():
                collectives += op_seconds(op, self._mesh, profile) / IN_FLIGHT[resource_of(op, self._mesh, profile)]
        return max(kernels, collectives)

    @cached_property
    def unestimated_s(self) -> float:
        """Seconds by the device's own rates of kernels that XLA's estimator has one price for whatever their size, beyond
        that price: of convolutions, and of what runs inside a library or as a kernel of the user's. Of a program with loops,
        one trip of each counts."""
        (own, _), (estimated, _) = self._seconds_of(True), self._seconds_of(False)
        unknown = [op for op in self.program.ops if is_unestimated(op)]
        return sum(max(0.0, own(op) - estimated(op)) for op in unknown) if self._estimated.xla_estimator else 0.0

    def _scheduled(
        self, merging: Merging, merge_bytes: float, done: Mapping[int, _Body], *, by_rates: bool
    ) -> Timeline:
        """Schedule operations; the loops among them run as they have been scheduled, all their trips, and nothing
        beside them: XLA takes a loop for one short operation."""
        seconds, profile = self._seconds_of(by_rates)
        is_gpu = profile.platform == "gpu"
        key = id(merging), merge_bytes
        tasks = self._tasks.get(key)
        if tasks is None:
            tasks = self._tasks[key] = merging.tasks(merge_bytes, packs=is_gpu)
        if not is_gpu:
            return _with_bodies(_one_after_another([task.op for task in tasks], seconds), done)
        times = [seconds(task.op) for task in tasks]
        instant = frozenset([i for i, task in enumerate(tasks) if task.op.kind == "collective" and not times[i] > 0])
        nodes = self._nodes.get((key, instant))
        if nodes is None:
            nodes = self._nodes[key, instant] = ScheduleNodes.of(tasks, instant)
        prices = SchedulePrices.of(nodes, tasks, times, self._mesh, profile)
        return _with_bodies(scheduled(nodes, prices, tasks), done)

    def _seconds_of(self, by_rates: bool) -> tuple[Callable[[Op], float], HardwareProfile]:
        """What tells the seconds of the program's operations, and of those that merging made, all of which are kept."""
        known, profile = self._seconds[by_rates], self._by_rates if by_rates else self._estimated

        def seconds(op: Op) -> float:
            found = known.get(id(op))
            if found is None:
                found = known[id(op)] = op_seconds(op, self._mesh, profile)
            return found

        return seconds, profile


def _one_after_another(ops: Sequence[Op], seconds_of: Callable[[Op], float]) -> Timeline:
    """Elsewhere than on GPUs XLA waits for each collective where it starts."""
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
    """One trip of a loop, and the number of trips."""

    timeline: Timeline
    count: float


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
