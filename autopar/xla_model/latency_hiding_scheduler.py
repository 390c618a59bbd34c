"""Schedule a device's program as XLA's latency-hiding scheduler does.

In: operations with combined collectives (`Task`), and their seconds. Out: their order, and the `Timeline` of running it,
by the same seconds or by others. A list
scheduler builds it backwards, from the last operation to the first: it picks the ready operation that leaves most time
to hide collectives. Source: openxla/xla, xla/service/latency_hiding_scheduler.cc and
xla/service/gpu/gpu_latency_hiding_scheduler.cc.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.hardware.profile import HardwareProfile
from autopar.ir.device_program import Op
from autopar.ir.mesh import MeshShape
from autopar.xla_model.collective_combiner import Task
from autopar.xla_model.latency_estimator import is_small
from autopar.xla_model.timeline import Ran, Timeline

#: The least latency that the scheduler assumes between two dependent kernels.
_BETWEEN_S = 1e-6
#: Collectives that may be in flight together: NCCL's ("library"), and those for which XLA emits its own kernel.
IN_FLIGHT = {"library": 1, "kernel": 2}


@dataclass(slots=True)
class ScheduleNodes:
    """The nodes to schedule: one per kernel, and two per collective, its start followed by its end.

    Args:
        tasks: per node, the position of its task.
        kinds: per node, the kind of collective; empty for others.
        waits_for: per node, its predecessors.
        users: per node, its successors.
        unlocks: per node, how many predecessors have no other user that is not placed, before any is.
        ends_before: per node, whether a predecessor is the end of a collective.
        direct: per node, whether it precedes its users without a view.
    """

    tasks: list[int]
    kinds: list[str]
    waits_for: list[list[int]]
    is_start: list[bool]
    is_end: list[bool]
    is_view: list[bool]
    users: list[list[int]] = field(default_factory=list)
    unlocks: list[int] = field(default_factory=list)
    ends_before: list[bool] = field(default_factory=list)
    direct: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, tasks: Sequence[Task], instant: frozenset[int]) -> ScheduleNodes:
        """Create the nodes of tasks in program order; `instant` has the positions of collectives that take no time."""
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
        users = nodes.users = [[] for _ in nodes.kinds]
        for i, waits_for in enumerate(nodes.waits_for):
            for j in waits_for:
                users[j].append(i)
        is_end, has_views = nodes.is_end, any(task.op.kind == "view" for task in tasks)
        nodes.unlocks = [sum([len(users[j]) == 1 for j in waits_for]) for waits_for in nodes.waits_for]
        ended = [[is_end[j] for j in waits_for] for waits_for in nodes.waits_for]
        nodes.ends_before = [any(those) for those in ended]
        # XLA schedules views (bitcasts, elements of a tuple) too. Where the program lists none, we assume one behind every matmul and
        # collective, and before each where it does not read an argument or a collective's result.
        unviewed = [not kind and tasks[at].op.kind != "gemm" for kind, at in zip(nodes.kinds, nodes.tasks, strict=True)]
        for i, (kind, those) in enumerate(zip(nodes.kinds, ended, strict=True)):
            reads_ends = not kind and all(those)
            nodes.direct.append(has_views or reads_ends or (unviewed[i] and all(unviewed[j] for j in users[i])))
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
    """Durations of the nodes by one estimate.

    Args:
        costs: per node, its seconds on the compute stream.
        latency: per node, the seconds of the collective that it ends; 0 for others.
        resource: per node of a collective, the key of `IN_FLIGHT` that limits it; empty for others.
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
        issue_s: float = 0.0,
    ) -> SchedulePrices:
        """The durations of the nodes of tasks.

        Args:
            seconds: per task, its seconds.
            issue_s: seconds of the compute stream that a collective's start takes, and its end.
        """
        taken = [resource_of(task.op, mesh, profile) if task.op.kind == "collective" else "" for task in tasks]
        return cls(
            [issue_s if kind else seconds[task] for kind, task in zip(nodes.kinds, nodes.tasks, strict=True)],
            [seconds[task] if end else 0.0 for end, task in zip(nodes.is_end, nodes.tasks, strict=True)],
            [taken[task] if kind else "" for kind, task in zip(nodes.kinds, nodes.tasks, strict=True)],
        )


def resource_of(op: Op, mesh: MeshShape, profile: HardwareProfile) -> str:
    """The key of `IN_FLIGHT` that limits a collective."""
    return "kernel" if is_small(op, mesh, profile) else "library"


class _Scheduler:
    """Orders the nodes from the last to the first. `clock` runs backwards from the end of the step; a start is ready,
    without stalling, once its collective's time has passed since its end was placed."""

    def __init__(self, nodes: ScheduleNodes, prices: SchedulePrices) -> None:
        self.nodes, self.prices, count = nodes, prices, len(nodes.kinds)
        self.depth, self.unlocks = _async_depth(nodes, prices), list(nodes.unlocks)
        self.ready_at, self.clock = [0.0] * count, 0.0
        self.free, self.queued = dict(IN_FLIGHT), dict.fromkeys(IN_FLIGHT, 0)
        self.ends: list[int] = []  # ready nodes, by kind
        self.views: list[int] = []
        self.others: list[int] = []

    def run(self) -> list[int]:
        """The nodes in execution order."""
        nodes, prices, free, ready_at = self.nodes, self.prices, self.free, self.ready_at
        users, direct, costs, resource = nodes.users, nodes.direct, prices.costs, prices.resource
        lag, unlocks = [latency or _BETWEEN_S for latency in prices.latency], self.unlocks
        left, placed_at, order = [len(r) for r in users], [0.0] * len(users), list[int]()
        for i, later in enumerate(left):
            if not later:
                self._add(i)
        while self.ends or self.views or self.others:
            best = self._pop_best()
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
                if left[j] == 1:
                    for user in users[j]:
                        unlocks[user] += 1
                if left[j]:
                    continue
                lags = [placed_at[k] + lag[k] for k in users[j]]
                ready_at[j] = max(clock, *lags) + (0.0 if direct[j] else _BETWEEN_S)
                self._add(j)
        return order[::-1]

    def _add(self, i: int) -> None:
        nodes = self.nodes
        (self.ends if nodes.is_end[i] else self.views if nodes.is_view[i] else self.others).append(i)
        if nodes.is_end[i]:
            self.queued[self.prices.resource[i]] += 1

    def _pop_best(self) -> int:
        """Remove and return the ready node to place next: views first, then ends of collectives if another may be in
        flight, then all others. Ties go to the earliest ready time, then by `_starts_in_turn`, then to the greatest
        asynchronous depth."""
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
        """Prefer starts whose resource has queued ends and no free slot; then all but starts of depth 0; then all."""
        resource = self.prices.resource
        backed_up = [i for i in starts if not self.free[resource[i]] and self.queued[resource[i]] > 0]
        is_start, depth = self.nodes.is_start, self.depth
        return backed_up or [i for i in among if not is_start[i] or depth[i] != 0] or among

    def _best(self, among: list[int]) -> int:
        """The node that leaves the least time idle until the next is ready, then the one that unlocks most others."""
        nodes, costs, ready_at, clock = self.nodes, self.prices.costs, self.ready_at, self.clock
        later = [at for ready in (self.ends, self.others) for i in ready if (at := ready_at[i]) > clock]
        if later:
            until, is_start = min(later) - clock, nodes.is_start
            waste = [0.0 if is_start[i] else abs(until - costs[i]) for i in among]
            least = min(waste)
            among = [i for i, one in zip(among, waste, strict=True) if one == least]
        return max(among, key=lambda i: (nodes.ends_before[i], self.unlocks[i], i))


def _async_depth(nodes: ScheduleNodes, prices: SchedulePrices) -> list[float]:
    """Per node, the total latency of collectives on its longest chain of predecessors, in seconds."""
    depth = list[float]()
    for waits_for, latency in zip(nodes.waits_for, prices.latency, strict=True):
        depth.append(max([depth[j] for j in waits_for]) + latency if waits_for else 0.0)
    return depth


def scheduled(nodes: ScheduleNodes, prices: SchedulePrices) -> list[int]:
    """The nodes in the order in which XLA's scheduler puts them by these prices."""
    return _Scheduler(nodes, prices).run()


def timed(
    nodes: ScheduleNodes, prices: SchedulePrices, order: Sequence[int], tasks: Sequence[Task], slowdown: float = 0.0
) -> Timeline:
    """Run a schedule: an end stalls until its collective's time has passed since its start.

    Args:
        slowdown: fraction of the kernels' rate that a collective in flight takes.
    """
    clock, compute, costs, latency = 0.0, 0.0, prices.costs, prices.latency
    sending_until, rate = 0.0, 1.0 - slowdown
    started: dict[int, float] = {}
    exposed: dict[str, float] = defaultdict(float)
    numbers: dict[str, int] = defaultdict(int)
    ran: list[Ran] = []
    for i in order:
        cost = costs[i]
        if cost and slowdown and sending_until > clock:
            cost += min(cost / rate, sending_until - clock) * slowdown
        clock += cost
        compute += cost
        op = tasks[nodes.tasks[i]].op
        if nodes.is_start[i]:
            started[i] = clock
            numbers[nodes.kinds[i]] += 1
            seconds = latency[nodes.users[i][0]]
            sending_until = max(sending_until, clock + seconds)
        elif nodes.is_end[i]:
            start = started[nodes.waits_for[i][0]]
            waited = max(0.0, latency[i] - (clock - start))
            exposed[nodes.kinds[i]] += waited
            clock += waited
            ran.append(Ran(op, start, start + latency[i], waited))
        elif op.kind != "collective":
            ran.append(Ran(op, clock - cost, clock))
    return Timeline(
        clock,
        compute,
        {kind: seconds for kind, seconds in sorted(exposed.items()) if seconds > 0},
        dict(sorted(numbers.items())),
        ran=tuple(sorted(ran, key=operator.attrgetter("start_s"))),
        order=tuple(tasks[nodes.tasks[i]].op for i in order),
    )
