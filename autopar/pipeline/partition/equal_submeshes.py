"""Partition layers into stages on equal submeshes that a schedule places: in turn, down and up, or on two submeshes each.

In: a `PartitionProblem` whose objective counts virtual stages, and the schedule's placement.
Out: a `Partition` of v p stages on p submeshes. Every shape and every p is searched. The objective is

    sum_j once_j  +  max_j repeated_j

Memory couples the stages of a submesh: it holds the state of all its stages, the largest working set, and in-flight
microbatches of the stage that stashes the most per microbatch. The search first finds the cheapest stages without this
coupling. If they do not fit, a depth-first search with their cost as its bound runs for a limited number of steps, then
another one that assumes equal state in all stages of a submesh.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autopar.pipeline.partition.bottleneck import PROVEN, Budget, Progress, Stages, searched
from autopar.pipeline.partition.cluster import Line, Submesh, lines
from autopar.pipeline.partition.price_tables import ROUNDING, Prices, Run
from autopar.pipeline.partition.problem import Partition, PartitionProblem, Stage
from autopar.pipeline.schedule.kind import Placement
from autopar.solve.problem import Status


@dataclass(frozen=True, slots=True)
class EqualSubmeshPartitioner:
    """A `Partitioner` for schedules that place several stages on each submesh.

    Args:
        placement: the submeshes of each stage, by the number of submeshes.
        time_limit_s, progress, relative_gap: the arguments of `ExactPartitioner`.
        step_limit: the most steps of each depth-first search; its lower bound stays valid when the limit is reached.
    """

    placement: Callable[[int], Placement]
    time_limit_s: float = math.inf
    progress: Progress | None = None
    relative_gap: float = PROVEN
    step_limit: int = 5_000

    def partition(self, problem: PartitionProblem) -> Partition:
        """Find the cheapest partition into the stages that the schedule has on several equal submeshes.

        Raises:
            KeyboardInterrupt: Ctrl-C before any partition was found.
        """
        prices = Prices(problem)
        variants = [
            _OnSubmeshes(meshes, placement, prices, self.step_limit)
            for meshes in _rows(problem)
            if problem.may_have(len(meshes))
            and len(placement := self.placement(len(meshes))) <= problem.num_layers
            and len(meshes) <= problem.most_stages
            and (problem.num_stages is None or (len(meshes) > 1 and len(placement) == problem.num_stages))
        ]
        budget = Budget(time.monotonic() + self.time_limit_s, self.relative_gap, problem.limit_s)
        search = searched(variants, prices, budget, self.progress)
        infeasible = search.status is Status.INFEASIBLE
        reason = ""
        if infeasible:
            counts = "" if problem.num_stages is None else f" as {problem.num_stages} stages"
            reason = f"no equal submeshes of {problem.cluster} have room for {problem.num_layers} layers{counts}"
        return Partition(
            stages=search.best,
            cost_s=search.cost,
            lower_bound_s=math.inf if infeasible else search.bound,
            status=search.status,
            num_queries=prices.num_queries,
            others=search.others(),
            reason=reason,
            slack_s=prices.slack_s,
            among="equal submeshes, placed host after host",
        )


def _rows(problem: PartitionProblem) -> list[tuple[Submesh, ...]]:
    """Rows of equal submeshes: for each shape and every p, the first p on the line."""
    found: list[tuple[Submesh, ...]] = []
    line: Line = lines(problem.cluster, problem.all_shapes)[0]  # one kind of device, so one order of the groups
    for shape in range(len(problem.all_shapes)):
        row: list[Submesh] = []
        free = 0
        for place in np.flatnonzero(line.shape == shape).tolist():
            if line.start[place] >= free:
                row.append(line.submeshes[place])
                free = int(line.end[place])
                found.append(tuple(row))
    return found


@dataclass(slots=True)
class _OnSubmeshes:
    """Partitions on given submeshes; a `bottleneck.Variant`."""

    meshes: tuple[Submesh, ...]
    placement: Placement
    prices: Prices
    step_limit: int
    shape: int = field(init=False)
    _sent: np.ndarray = field(init=False)  # seconds before each layer, from each stage to the next: [layers, stages]
    in_flight: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        problem, count = self.prices.problem, len(self.meshes)
        shape = self.meshes[0].shape
        self.shape = self.prices.shapes.index(shape)
        self._sent = np.zeros((problem.num_layers, len(self.placement)))
        sent_s = {  # inside a host, and between hosts
            same_host: [0.0, *(problem.transfer_s(n, shape, shape, same_host) for n in range(1, problem.num_layers))]
            for same_host in (True, False)
        }
        for stage, (here, there) in enumerate(pairwise(self.placement)):
            ways = [(self.meshes[a], self.meshes[b]) for a, b in zip(here, there, strict=True) if a != b]
            if ways:
                self._sent[:, stage] = sent_s[all(mesh.shares_host(following) for mesh, following in ways)]
        in_flight = problem.objective.in_flight
        self.in_flight = np.array([in_flight(count - 1 - number, count) for number in range(count)], float)

    @property
    def _own(self) -> slice:
        return slice(self.shape, self.shape + 1)

    def cheapest(self, limit: float) -> tuple[float, Stages | None] | None:
        """See `bottleneck.Variant`."""
        costs, rest = self._tables(limit)
        if not np.isfinite(rest[0, 0]):
            return None
        if rest[0, 0] + self.least_limit() >= self.prices.problem.limit_s:  # stages that fit together cost no less
            return float(rest[0, 0]), None
        search = _DepthFirst(self, costs, rest)
        search.run()
        if search.steps >= self.step_limit:
            equal = _DepthFirst(self, *self._tables(limit, equal_state=True))
            equal.run()
            better = search if search.cost <= equal.cost else equal
            return float(rest[0, 0]), better.best
        return None if search.best is None else (search.cost, search.best)

    def least_limit(self) -> float:
        """See `bottleneck.Variant`; transfers, and memory that stages share, are ignored."""
        prices, num_stages = self.prices, len(self.placement)
        repeated = prices.repeated[:, :, self.shape]
        fits = prices.fitting(self.in_flight, self._own)[:, :, 0]
        rest = np.full(len(repeated) + 1, np.inf)
        rest[-1] = 0.0
        for stage in reversed(range(num_stages)):
            allowed = np.where(fits[:, :, list(self.placement[stage])].all(axis=2), repeated, np.inf)
            rest = np.append(np.maximum(allowed, rest[1:]).min(axis=1), np.inf)
        return float(rest[0])

    def query(self, stages: Stages) -> bool:
        """See `bottleneck.Variant`."""
        return self.prices.query(self.prices.runs(stages))

    def figures(self, stages: Stages) -> tuple[float, float]:
        """See `bottleneck.Variant`; consecutive stages on one submesh have no transfer."""
        objective, total, largest = self.prices.problem.objective, 0.0, 0.0
        for number, (stage, run) in enumerate(zip(stages, self.prices.runs(stages), strict=True)):
            sent = 0.0 if number + 1 == len(stages) else self._sent[stage.last + 1, number]
            total += float(self.prices.once[run] + objective.transfer_once * sent)
            largest = max(largest, float(self.prices.repeated[run] + objective.transfer_repeated * sent))
        return total, largest

    def _tables(self, limit: float, equal_state: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The cost of a run as stage j, and the least cost from stage j and a layer on, if each run fits by itself;
        with `equal_state`, if it fits together with equal ones.

        float[stages, layers, layers] and float[stages + 1, layers + 1].
        """
        prices, objective = self.prices, self.prices.problem.objective
        num_layers, num_stages = len(prices.once), len(self.placement)
        once, repeated = prices.once[:, :, self.shape], prices.repeated[:, :, self.shape]
        num_bytes = prices.holding(self.in_flight, self._own)[:, :, 0]
        if equal_state:
            each = sum(map(len, self.placement)) // len(self.meshes)
            num_bytes = num_bytes + (each - 1) * prices.state[:, :, self.shape, None]
        fits = num_bytes <= prices.budget[self.shape] * (1 + ROUNDING)
        costs = np.full((num_stages, num_layers, num_layers), np.inf)
        rest = np.full((num_stages + 1, num_layers + 1), np.inf)
        rest[num_stages, num_layers] = 0.0
        for stage in reversed(range(num_stages)):
            sent = np.zeros(num_layers)  # after each last layer
            if stage + 1 < num_stages:
                sent[:-1] = self._sent[1:, stage]
            allowed = (repeated + objective.transfer_repeated * sent <= limit) & fits[
                :, :, list(self.placement[stage])
            ].all(axis=2)
            costs[stage] = np.where(allowed, once + objective.transfer_once * sent, np.inf)
            rest[stage, :-1] = (costs[stage] + rest[stage + 1, 1:]).min(axis=1)
        return costs, rest


class _DepthFirst:
    """Finds the cheapest stages that fit together by depth-first search."""

    def __init__(self, on: _OnSubmeshes, costs: np.ndarray, rest: np.ndarray) -> None:
        self.best: Stages | None = None
        self.cost = math.inf
        self.steps = 0
        self._on, self._costs, self._rest = on, costs, rest
        self._bounds: list[int] = []

    def run(self) -> None:
        """Search up to the step limit."""
        count = len(self._on.meshes)
        self._visit(0, 0.0, np.zeros((3, count)))

    def _visit(self, first: int, spent: float, held: np.ndarray) -> None:
        """Choose the next stage and all later ones; `held` has the state, working and flight bytes of each submesh."""
        stage = len(self._bounds)
        if stage == len(self._costs):
            if first == len(self._costs[0]):
                self.best, self.cost = self._stages(), spent
            return
        prices, on = self._on.prices, list(self._on.placement[stage])
        totals = spent + self._costs[stage, first] + self._rest[stage + 1, 1:]
        for last in np.argsort(totals, kind="stable").tolist():
            if not totals[last] < self.cost or self.steps >= self._on.step_limit:
                return
            self.steps += 1
            run: Run = first, last, self._on.shape
            held_after = held.copy()
            held_after[0, on] += prices.state[run]
            most = np.array([[prices.working[run]], [prices.flight[run]]])
            held_after[1:, on] = np.maximum(held_after[1:, on], most)
            needed = held_after[0, on] + held_after[1, on] + held_after[2, on] * self._on.in_flight[on]
            if needed.max() > prices.budget[run[2]] * (1 + ROUNDING):
                continue
            self._bounds.append(last)
            self._visit(last + 1, spent + float(self._costs[stage, first, last]), held_after)
            self._bounds.pop()

    def _stages(self) -> Stages:
        firsts = [0, *(last + 1 for last in self._bounds)]
        places = [[self._on.meshes[number] for number in dict.fromkeys(place)] for place in self._on.placement]
        return tuple(
            Stage(first, last, submesh, tuple(replicas))
            for first, last, (submesh, *replicas) in zip(firsts[:-1], self._bounds, places, strict=True)
        )
