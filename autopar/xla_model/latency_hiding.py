"""When the operations of a device's program run, and what of its collectives nothing hides.

In: a `DeviceProgram`, the mesh, a hardware profile. Out: `Timeline`. Kernels run one after another on
one stream, collectives one after another beside them, in the order that XLA's latency hiding scheduler
would choose (openxla/xla, latency_hiding_scheduler.cc): from the last operation to the first, always
the one that is ready and least in the way of a collective that has to be hidden.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, overload

from autopar.cost.hardware_profile import HardwareProfile
from autopar.cost.kernel_time import is_small, is_unestimated, op_seconds
from autopar.ir.device_program import DeviceProgram, Op, peak_of_temporaries
from autopar.ir.mesh import MeshShape
from autopar.xla_model.collective_combiner import Merging, Task

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


class Opinions(NamedTuple):
    """Two timelines of one program: by the device's own rates, and as XLA's estimator has it, where there is one."""

    by_rates: Timeline
    estimated: Timeline | None


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
        self._nodes: dict[tuple[tuple[int, float], frozenset[int]], _Nodes] = {}

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
                collectives += op_seconds(op, self._mesh, profile) / _IN_FLIGHT[_resource(op, self._mesh, profile)]
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
            nodes = self._nodes[key, instant] = _Nodes.of(tasks, instant)
        prices = _Prices.of(nodes, tasks, times, self._mesh, profile)
        order = _Scheduler(nodes, prices).run()
        return _with_bodies(_timed(nodes, prices, order, tasks), done)

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


# -- loops -----------------------------------------------------------------------------------


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


# -- scheduling ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Nodes:
    """What is scheduled: kernels, and for each collective its start and, one after it, its end; the same for all opinions.

    Args:
        tasks: by node, the position of the task that it is of. kinds: of a collective, which; else empty.
        waits_for: the nodes before each.
    """

    tasks: list[int]
    kinds: list[str]
    waits_for: list[list[int]]
    is_start: list[bool]
    is_end: list[bool]
    is_view: list[bool]
    readers: list[list[int]] = field(default_factory=list)
    unlocks: list[int] = field(default_factory=list)
    ends_before: list[bool] = field(default_factory=list)
    direct: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, tasks: Sequence[Task], instant: frozenset[int]) -> _Nodes:
        """Args: instant: positions of collectives that take no time."""
        nodes = cls([], [], [], [], [], [])
        ends: list[int] = []  # by task, its last node
        for position, task in enumerate(tasks):
            op = task.op
            waits_for = sorted([ends[before] for before in task.waits_for])
            if op.kind != "collective":
                nodes._add(position, "", waits_for, view=op.kind == "view")
            elif position in instant:
                nodes._add(position, "", waits_for, view=True)
            else:
                nodes._add(position, op.collective, waits_for, start=True)
                nodes._add(position, op.collective, [len(nodes.kinds) - 1], end=True)
            ends.append(len(nodes.kinds) - 1)
        readers = nodes.readers = [[] for _ in nodes.kinds]
        for i, waits_for in enumerate(nodes.waits_for):
            for j in waits_for:
                readers[j].append(i)
        is_end, has_views = nodes.is_end, any(task.op.kind == "view" for task in tasks)
        nodes.unlocks = [sum([len(readers[j]) == 1 for j in waits_for]) for waits_for in nodes.waits_for]
        ended = [[is_end[j] for j in waits_for] for waits_for in nodes.waits_for]
        nodes.ends_before = [any(those) for those in ended]
        # Views take a turn each. Where the program has none, one is taken to stand between any two kernels, but not after
        # those that turn arguments into operands.
        nodes.direct = [has_views or (not kind and all(those)) for kind, those in zip(nodes.kinds, ended, strict=True)]
        return nodes

    def _add(
        self,
        task: int,
        kind: str,
        waits_for: list[int],
        start: bool = False,
        end: bool = False,
        view: bool = False,
    ) -> None:
        self.tasks.append(task)
        self.kinds.append(kind)
        self.waits_for.append(waits_for)
        self.is_start.append(start)
        self.is_end.append(end)
        self.is_view.append(view)


@dataclass(slots=True)
class _Prices:
    """What nodes take in one opinion.

    Args:
        costs: seconds of each on the stream. latency: the collective's own time where a node ends one, else 0.
        resource: of a collective's nodes, what it takes one of those in flight of.
    """

    costs: list[float]
    latency: list[float]
    resource: list[str]

    @classmethod
    def of(
        cls, nodes: _Nodes, tasks: Sequence[Task], seconds: Sequence[float], mesh: MeshShape, profile: HardwareProfile
    ) -> _Prices:
        issue_s = profile.xla_estimator.issue_s / 2 if profile.xla_estimator else 0.0
        taken = [_resource(task.op, mesh, profile) if task.op.kind == "collective" else "" for task in tasks]
        return cls(
            [issue_s if kind else seconds[task] for kind, task in zip(nodes.kinds, nodes.tasks, strict=True)],
            [seconds[task] if end else 0.0 for end, task in zip(nodes.is_end, nodes.tasks, strict=True)],
            [taken[task] if kind else "" for kind, task in zip(nodes.kinds, nodes.tasks, strict=True)],
        )


def _resource(op: Op, mesh: MeshShape, profile: HardwareProfile) -> str:
    """Of a collective, what it takes one of those in flight of."""
    small = profile.xla_estimator is not None and is_small(op, mesh, profile.xla_estimator)
    return "kernel" if small else "library"


class _Scheduler:
    """The order of the nodes. They are placed from the last to the first; `clock` runs backwards from the end of the step,
    and a start may be placed without waiting once its collective's time has passed since its end."""

    def __init__(self, nodes: _Nodes, prices: _Prices) -> None:
        self.nodes, self.prices, count = nodes, prices, len(nodes.kinds)
        self.depth = _async_depth(nodes, prices)
        self.ready_at, self.clock = [0.0] * count, 0.0
        self.free, self.queued = dict(_IN_FLIGHT), dict.fromkeys(_IN_FLIGHT, 0)
        self.ends: list[int] = []  # what is ready
        self.views: list[int] = []
        self.others: list[int] = []

    def run(self) -> list[int]:
        """First to last."""
        nodes, prices, free, ready_at = self.nodes, self.prices, self.free, self.ready_at
        readers, direct, costs, resource = nodes.readers, nodes.direct, prices.costs, prices.resource
        lag = [latency or _BETWEEN_S for latency in prices.latency]
        left, placed_at, order = [len(r) for r in readers], [0.0] * len(readers), list[int]()
        for i, later in enumerate(left):
            if not later:
                self._add(i)
        while self.ends or self.views or self.others:
            best = self._taken()
            order.append(best)
            placed_at[best] = max(self.clock, ready_at[best])
            clock = self.clock = placed_at[best] + costs[best]
            if nodes.is_end[best]:
                free[resource[best]] -= 1
                self.queued[resource[best]] -= 1
            elif nodes.is_start[best]:
                free[resource[best]] += 1
            for j in nodes.waits_for[best]:
                left[j] -= 1
                if left[j]:
                    continue
                lags = [placed_at[k] + lag[k] for k in readers[j]]
                ready_at[j] = max(clock, *lags) + (0.0 if direct[j] else _BETWEEN_S)
                self._add(j)
        return order[::-1]

    def _add(self, i: int) -> None:
        nodes = self.nodes
        (self.ends if nodes.is_end[i] else self.views if nodes.is_view[i] else self.others).append(i)
        if nodes.is_end[i]:
            self.queued[self.prices.resource[i]] += 1

    def _taken(self) -> int:
        """The next, which is ready no more: a view; else an end, where one may be in flight; of these, or of all else,
        what is ready soonest, in its turn as a start, and has most collectives above it."""
        if self.views:
            return self.views.pop()
        free, resource, ready_at, depth, clock = self.free, self.prices.resource, self.ready_at, self.depth, self.clock
        among = [i for i in self.ends if free[resource[i]]] or self.others
        if len(among) > 1:
            first = min([ready_at[i] for i in among])
            among = [i for i in among if ready_at[i] <= max(first, clock)]
        if len(among) > 1:
            is_start = self.nodes.is_start
            starts = [i for i in among if is_start[i]]
            among = self._starts_in_turn(among, starts) if starts else among
        if len(among) > 1:
            deepest = max([depth[i] for i in among])
            among = [i for i in among if depth[i] == deepest]
        best = among[0] if len(among) == 1 else self._best(among)
        (self.ends if self.nodes.is_end[best] else self.others).remove(best)
        return best

    def _starts_in_turn(self, among: list[int], starts: list[int]) -> list[int]:
        """Starts that others of their kind wait for; else what is no start or has collectives above it; else the rest."""
        resource = self.prices.resource
        backed_up = [i for i in starts if not self.free[resource[i]] and self.queued[resource[i]] > 0]
        is_start, depth = self.nodes.is_start, self.depth
        return backed_up or [i for i in among if not is_start[i] or depth[i] != 0] or among

    def _best(self, among: list[int]) -> int:
        """What wastes least of the time until the next is ready, and lets most others run."""
        nodes, costs, ready_at, clock = self.nodes, self.prices.costs, self.ready_at, self.clock
        later = [at for ready in (self.ends, self.others) for i in ready if (at := ready_at[i]) > clock]
        if later:
            until, is_start = min(later) - clock, nodes.is_start
            waste = [0.0 if is_start[i] else abs(until - costs[i]) for i in among]
            least = min(waste)
            among = [i for i, one in zip(among, waste, strict=True) if one == least]
        return max(among, key=lambda i: (nodes.ends_before[i], nodes.unlocks[i], i))


def _async_depth(nodes: _Nodes, prices: _Prices) -> list[float]:
    """Seconds of collectives that one has to wait for, at the most, before a node can run."""
    depth = list[float]()
    for waits_for, latency in zip(nodes.waits_for, prices.latency, strict=True):
        depth.append(max([depth[j] for j in waits_for]) + latency if waits_for else 0.0)
    return depth


def _timed(nodes: _Nodes, prices: _Prices, order: Sequence[int], tasks: Sequence[Task]) -> Timeline:
    """Walk the order from first to last: an end waits until its collective's time has passed since its start."""
    clock, compute, costs, latency = 0.0, 0.0, prices.costs, prices.latency
    started: dict[int, float] = {}
    exposed: dict[str, float] = defaultdict(float)
    numbers: dict[str, int] = defaultdict(int)
    ran: list[Ran] = []
    for i in order:
        clock += costs[i]
        compute += costs[i]
        op = tasks[nodes.tasks[i]].op
        if nodes.is_start[i]:
            started[i] = clock
            numbers[nodes.kinds[i]] += 1
        elif nodes.is_end[i]:
            start = started[nodes.waits_for[i][0]]
            waited = max(0.0, latency[i] - (clock - start))
            exposed[nodes.kinds[i]] += waited
            clock += waited
            ran.append(Ran(op, start, start + latency[i], waited))
        elif op.kind != "collective":
            ran.append(Ran(op, clock - costs[i], clock))
    return Timeline(
        clock,
        compute,
        {kind: seconds for kind, seconds in sorted(exposed.items()) if seconds > 0},
        dict(sorted(numbers.items())),
        ran=tuple(sorted(ran, key=operator.attrgetter("start_s"))),
        order=tuple(tasks[nodes.tasks[i]].op for i in order),
    )
