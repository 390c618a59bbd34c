"""The order of operations that XLA's latency hiding scheduler would choose.

In: operations of a device's program, with collectives merged (`Task`), and their seconds. Out: their order, from the last
operation to the first: always the one that is ready and least in the way of a collective that has to be hidden; and the
`Timeline` of it. Source: openxla/xla, xla/service/latency_hiding_scheduler.cc and xla/service/gpu/gpu_latency_hiding_scheduler.cc.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost.hardware_profile import HardwareProfile
from autopar.cost.kernel_time import is_small
from autopar.ir.device_program import Op
from autopar.ir.mesh import MeshShape
from autopar.xla_model.collective_combiner import Task
from autopar.xla_model.timeline import Ran, Timeline

#: The scheduler takes this long to pass between two kernels at the least.
_BETWEEN_S = 1e-6
#: Collectives that may be in flight together: those of the library, and those XLA writes itself.
IN_FLIGHT = {"library": 1, "kernel": 2}


@dataclass(slots=True)
class ScheduleNodes:
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
    def of(cls, tasks: Sequence[Task], instant: frozenset[int]) -> ScheduleNodes:
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
class SchedulePrices:
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
        cls,
        nodes: ScheduleNodes,
        tasks: Sequence[Task],
        seconds: Sequence[float],
        mesh: MeshShape,
        profile: HardwareProfile,
    ) -> SchedulePrices:
        issue_s = profile.xla_estimator.issue_s / 2 if profile.xla_estimator else 0.0
        taken = [resource_of(task.op, mesh, profile) if task.op.kind == "collective" else "" for task in tasks]
        return cls(
            [issue_s if kind else seconds[task] for kind, task in zip(nodes.kinds, nodes.tasks, strict=True)],
            [seconds[task] if end else 0.0 for end, task in zip(nodes.is_end, nodes.tasks, strict=True)],
            [taken[task] if kind else "" for kind, task in zip(nodes.kinds, nodes.tasks, strict=True)],
        )


def resource_of(op: Op, mesh: MeshShape, profile: HardwareProfile) -> str:
    """Of a collective, what it takes one of those in flight of."""
    small = profile.xla_estimator is not None and is_small(op, mesh, profile.xla_estimator)
    return "kernel" if small else "library"


class _Scheduler:
    """The order of the nodes. They are placed from the last to the first; `clock` runs backwards from the end of the step,
    and a start may be placed without waiting once its collective's time has passed since its end."""

    def __init__(self, nodes: ScheduleNodes, prices: SchedulePrices) -> None:
        self.nodes, self.prices, count = nodes, prices, len(nodes.kinds)
        self.depth = _async_depth(nodes, prices)
        self.ready_at, self.clock = [0.0] * count, 0.0
        self.free, self.queued = dict(IN_FLIGHT), dict.fromkeys(IN_FLIGHT, 0)
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


def _async_depth(nodes: ScheduleNodes, prices: SchedulePrices) -> list[float]:
    """Seconds of collectives that one has to wait for, at the most, before a node can run."""
    depth = list[float]()
    for waits_for, latency in zip(nodes.waits_for, prices.latency, strict=True):
        depth.append(max([depth[j] for j in waits_for]) + latency if waits_for else 0.0)
    return depth


def scheduled(nodes: ScheduleNodes, prices: SchedulePrices, tasks: Sequence[Task]) -> Timeline:
    """The timeline in the scheduler's order."""
    return _timed(nodes, prices, _Scheduler(nodes, prices).run(), tasks)


def _timed(nodes: ScheduleNodes, prices: SchedulePrices, order: Sequence[int], tasks: Sequence[Task]) -> Timeline:
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
