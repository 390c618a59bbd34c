"""Partition layers into virtual stages: several runs of layers on each of equal submeshes, round robin.

In: a `PartitionProblem` whose objective is that of virtual stages (`objectives.interleaved`), and v, the number of
virtual stages per submesh.
Out: a `Partition` of v p stages on p submeshes; stage j is on submesh j mod p. Every shape and every p is searched. The
objective is

    sum_j once_j  +  max_j repeated_j

which for equal stages is the published makespan, p t / v + (m v - 1) t / v. Memory couples the stages of a submesh: it
holds the state of all its stages, the largest working set, and in-flight microbatches of the stage that stashes the
most per microbatch. The search first finds the cheapest stages without this coupling. If they do not fit, a depth-first
search with their cost as its bound runs for a limited number of steps, then another one that assumes equal state in all
stages of a submesh.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from autopar.pipeline.partition.bottleneck import PROVEN, Budget, Progress, Stages, searched
from autopar.pipeline.partition.cluster import Line, Submesh, lines
from autopar.pipeline.partition.price_tables import ROUNDING, Prices, Run
from autopar.pipeline.partition.problem import Partition, PartitionProblem, Stage
from autopar.solve.problem import Status


@dataclass(frozen=True, slots=True)
class InterleavedPartitioner:
    """A `Partitioner` for virtual stages.

    Args:
        virtual: the number of virtual stages per submesh.
        time_limit_s, progress, relative_gap: the arguments of `ExactPartitioner`.
        step_limit: the most steps of each depth-first search; its lower bound stays valid when the limit is reached.
    """

    virtual: int
    time_limit_s: float = math.inf
    progress: Progress | None = None
    relative_gap: float = PROVEN
    step_limit: int = 5_000

    def partition(self, problem: PartitionProblem) -> Partition:
        """Find the cheapest partition into `virtual` stages on each of several equal submeshes.

        Raises:
            KeyboardInterrupt: Ctrl-C before any partition was found.
        """
        prices = Prices(problem)
        variants = [
            _OnSubmeshes(meshes, prices, self.virtual, self.step_limit)
            for meshes in _rows(problem)
            if len(meshes) * self.virtual <= problem.num_layers
            and len(meshes) <= problem.most_stages
            and (problem.num_stages is None or (len(meshes) > 1 and len(meshes) * self.virtual == problem.num_stages))
        ]
        budget = Budget(time.monotonic() + self.time_limit_s, self.relative_gap)
        search = searched(variants, prices, budget, self.progress)
        infeasible = search.status is Status.INFEASIBLE
        reason = ""
        if infeasible:
            reason = f"no equal submeshes of {problem.cluster} have room for {self.virtual} runs of layers each"
            if problem.num_stages is not None:
                reason += (
                    f", {problem.num_stages} stages in all on 2 submeshes or more: choose a multiple of {self.virtual},"
                    f" at least {2 * self.virtual}"
                )
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
    prices: Prices
    virtual: int
    step_limit: int
    shape: int = field(init=False)
    _sent: np.ndarray = field(
        init=False
    )  # seconds before each layer, from each submesh to the next: [layers, submeshes]
    in_flight: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        problem, count = self.prices.problem, len(self.meshes)
        shape = self.meshes[0].shape
        self.shape = self.prices.shapes.index(shape)
        self._sent = np.zeros((problem.num_layers, count))
        for number, mesh in enumerate(self.meshes):
            following = self.meshes[(number + 1) % count]
            if following is not mesh:
                for layer in range(1, problem.num_layers):
                    self._sent[layer, number] = problem.transfer_s(layer, shape, shape, mesh.shares_host(following))
        in_flight = problem.objective.in_flight
        self.in_flight = np.array([in_flight(count - 1 - number, count) for number in range(count)], float)

    def cheapest(self, limit: float) -> tuple[float, Stages | None] | None:
        """See `bottleneck.Variant`."""
        costs, rest = self._tables(limit)
        if not np.isfinite(rest[0, 0]):
            return None
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
        prices, num_stages = self.prices, len(self.meshes) * self.virtual
        repeated = prices.repeated[:, :, self.shape]
        fits = prices.fitting(self.in_flight)[:, :, self.shape]
        rest = np.full(len(repeated) + 1, np.inf)
        rest[-1] = 0.0
        for stage in reversed(range(num_stages)):
            allowed = np.where(fits[:, :, stage % len(self.meshes)], repeated, np.inf)
            rest = np.append(np.maximum(allowed, rest[1:]).min(axis=1), np.inf)
        return float(rest[0])

    def query(self, stages: Stages) -> bool:
        """See `bottleneck.Variant`."""
        return self.prices.query(self.prices.runs(stages))

    def figures(self, stages: Stages) -> tuple[float, float]:
        """See `bottleneck.Variant`; consecutive stages on one submesh have no transfer."""
        objective, total, largest = self.prices.problem.objective, 0.0, 0.0
        for number, (stage, run) in enumerate(zip(stages, self.prices.runs(stages), strict=True)):
            sent = 0.0 if number + 1 == len(stages) else self._sent[stage.last + 1, number % len(self.meshes)]
            total += float(self.prices.once[run] + objective.transfer_once * sent)
            largest = max(largest, float(self.prices.repeated[run] + objective.transfer_repeated * sent))
        return total, largest

    def _tables(self, limit: float, equal_state: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The cost of a run as stage j, and the least cost from stage j and a layer on, if each run fits by itself;
        with `equal_state`, if it fits together with equal ones.

        float[stages, layers, layers] and float[stages + 1, layers + 1].
        """
        prices, objective, count = self.prices, self.prices.problem.objective, len(self.meshes)
        num_layers, num_stages = len(prices.once), count * self.virtual
        once, repeated = prices.once[:, :, self.shape], prices.repeated[:, :, self.shape]
        num_bytes = prices.holding(self.in_flight)[:, :, self.shape]
        if equal_state:
            num_bytes = num_bytes + (self.virtual - 1) * prices.state[:, :, self.shape, None]
        fits = num_bytes <= prices.budget[self.shape] * (1 + ROUNDING)
        costs = np.full((num_stages, num_layers, num_layers), np.inf)
        rest = np.full((num_stages + 1, num_layers + 1), np.inf)
        rest[num_stages, num_layers] = 0.0
        for stage in reversed(range(num_stages)):
            sent = np.zeros(num_layers)  # after each last layer
            if stage + 1 < num_stages:
                sent[:-1] = self._sent[1:, stage % count]
            allowed = (repeated + objective.transfer_repeated * sent <= limit) & fits[:, :, stage % count]
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
        prices, number = self._on.prices, stage % len(self._on.meshes)
        totals = spent + self._costs[stage, first] + self._rest[stage + 1, 1:]
        for last in np.argsort(totals, kind="stable").tolist():
            if not totals[last] < self.cost or self.steps >= self._on.step_limit:
                return
            self.steps += 1
            run: Run = first, last, self._on.shape
            held_after = held.copy()
            held_after[0, number] += prices.state[run]
            held_after[1:, number] = np.maximum(held_after[1:, number], (prices.working[run], prices.flight[run]))
            needed = held_after[0, number] + held_after[1, number] + held_after[2, number] * self._on.in_flight[number]
            if needed > prices.budget[run[2]] * (1 + ROUNDING):
                continue
            self._bounds.append(last)
            self._visit(last + 1, spent + float(self._costs[stage, first, last]), held_after)
            self._bounds.pop()

    def _stages(self) -> Stages:
        firsts = [0, *(last + 1 for last in self._bounds)]
        meshes = self._on.meshes
        return tuple(
            Stage(first, last, meshes[j % len(meshes)])
            for j, (first, last) in enumerate(zip(firsts, self._bounds, strict=False))
        )
