"""Random partition problems, and every partition of one, written without anything of what is tested.

In: seeds and sizes. Out: prices for a `PartitionProblem`; all its partitions, and the objective of each by definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, Submesh, SubmeshShape
from autopar.pipeline.partition.objectives import forward_only, gpipe, one_at_a_time, one_f_one_b, zb_h1
from autopar.pipeline.partition.problem import Growth, Objective, PartitionProblem, Stage, StageCost

CLUSTERS = (
    Cluster((DeviceGroup("a", 1, 4),)),
    Cluster((DeviceGroup("a", 2, 2),)),
    Cluster((DeviceGroup("a", 3, 1),)),
    Cluster((DeviceGroup("a", 1, 3), DeviceGroup("b", 1, 2))),
    Cluster((DeviceGroup("a", 2, 1), DeviceGroup("b", 2, 2))),
    Cluster((DeviceGroup("a", 1, 2), DeviceGroup("a", 1, 3))),
)


def counting(num_microbatches: int) -> Objective:
    """As 1F1B, but what is in flight depends on the number of stages."""
    plain = one_f_one_b(num_microbatches)
    return replace(plain, in_flight=lambda after, count: min(2 * after + count, num_microbatches))


OBJECTIVES: tuple[Callable[[int], Objective], ...] = (
    one_f_one_b,
    gpipe,
    zb_h1,
    forward_only,
    one_at_a_time,
    counting,
)


@dataclass(frozen=True)
class Tables:
    """Random prices: of single layers, and what runs cost besides; never below what `growth` says."""

    seed: int
    num_layers: int
    growth: Growth
    forbidden: float = 0.0

    def cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        return _cost(self, first, last, shape)

    def transfer_s(self, boundary: int, source: SubmeshShape, target: SubmeshShape, same_host: bool) -> float:
        return _transfer_s(self, boundary, source, target, same_host)

    def drawn_cost(self, first: int, last: int, shape: SubmeshShape) -> StageCost | None:
        draw = self._rng(first, last, *self._of(shape))
        if draw.random() < self.forbidden * (self.growth is Growth.UNKNOWN):
            return None
        size = shape.num_devices**0.7 + ord(shape.kind) % 2
        if self.growth is Growth.UNKNOWN:
            times = draw.integers(1, 20, 4) / size
            amounts = draw.integers(0, 9, 3)
        else:
            layers = [self._rng(i, i, *self._of(shape)).integers(1, 9, 7) for i in range(first, last + 1)]
            extra = sum(self._rng(i, i + 1, 99).integers(0, 4, 7) for i in range(first, last))
            whole = np.sum(layers, axis=0) + extra
            times, amounts = whole[:4] / size, whole[4:]
            if self.growth is Growth.MONOTONE and last > first:
                parts = [self.cost(first, last - 1, shape), self.cost(first + 1, last, shape)]
                rows = [(p.forward_s, p.backward_s, p.weight_s, p.update_s) for p in parts if p is not None]
                times = np.max(rows, axis=0) + draw.integers(0, 3, 4) / size
        forward, backward, weight, update = (float(t) for t in times)
        state, flight, working = (float(a) for a in amounts)
        weight = min(weight, (forward + backward) / 2)  # else ZB-H1 would have no bubble to fill
        return StageCost(
            forward_s=forward,
            backward_s=backward,
            weight_s=weight if self.growth is Growth.UNKNOWN else 0.0,
            update_s=update,
            state_bytes=state,
            flight_bytes=flight,
            working_bytes=working,
        )

    def drawn_transfer_s(self, boundary: int, source: SubmeshShape, target: SubmeshShape, same_host: bool) -> float:
        drawn = self._rng(boundary, *self._of(source), *self._of(target)).integers(0, 9)
        return float(drawn) / (4 if same_host else 1)

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    @staticmethod
    def _of(shape: SubmeshShape) -> tuple[int, int, int]:
        return ord(shape.kind), shape.num_hosts, shape.devices_per_host


@lru_cache(maxsize=4096)
def _cost(tables: Tables, first: int, last: int, shape: SubmeshShape) -> StageCost | None:
    """Drawn once: whoever looks at every partition asks for the same again and again."""
    return tables.drawn_cost(first, last, shape)


@lru_cache(maxsize=4096)
def _transfer_s(tables: Tables, boundary: int, source: SubmeshShape, target: SubmeshShape, same_host: bool) -> float:
    return tables.drawn_transfer_s(boundary, source, target, same_host)


# -- looking at everything ---------------------------------------------------------------------


def every_partition(problem: PartitionProblem) -> Iterator[tuple[Stage, ...]]:
    """All of them, in any order of the devices, with devices left idle anywhere, written without anything of what is
    tested. Of hosts that are alike, a stage takes the first."""
    hosts = [
        (g, group.devices_per_host) for g, group in enumerate(problem.cluster.groups) for _ in range(group.num_hosts)
    ]
    begins = [sum(size for _, size in hosts[:host]) for host in range(len(hosts))]
    yield from _from(problem, hosts, begins, [0] * len(hosts), 0, None)


def _from(
    problem: PartitionProblem,
    hosts: list[tuple[int, int]],
    begins: list[int],
    taken: list[int],
    first: int,
    previous: int | None,
) -> Iterator[tuple[Stage, ...]]:
    """All stages from a layer on, after devices of each host are taken; `previous` is the last stage's host."""
    if first == problem.num_layers:
        yield ()
        return
    seen: set[tuple[int, int, bool]] = set()
    for host, (g, size) in enumerate(hosts):
        alike = g, taken[host], host == previous
        if alike in seen:
            continue
        seen.add(alike)
        kind = problem.cluster.groups[g].kind
        shapes = [SubmeshShape(kind, 1, n) for n in range(1, size - taken[host] + 1)]
        empty = 0
        while (
            taken[host] == 0 and host + empty < len(hosts) and hosts[host + empty][0] == g and not taken[host + empty]
        ):
            empty += 1
        shapes += [SubmeshShape(kind, n, size) for n in range(2, empty + 1)]
        for shape in shapes:
            if problem.shapes and shape not in problem.shapes:
                continue
            mesh = Submesh(shape, begins[host] + taken[host], host)
            after = [
                used + shape.devices_per_host * (host <= other < host + shape.num_hosts)
                for other, used in enumerate(taken)
            ]
            for last in range(first, problem.num_layers):
                for rest in _from(problem, hosts, begins, after, last + 1, host):
                    yield (Stage(first, last, mesh), *rest)


def evaluate(problem: PartitionProblem, stages: tuple[Stage, ...]) -> float:
    """The objective, by its definition."""
    objective, once, repeated = problem.objective, 0.0, 0.0
    if len(stages) > (problem.max_stages or len(stages)) or len(stages) != (problem.num_stages or len(stages)):
        return math.inf
    used = sum(stage.submesh.shape.num_devices for stage in stages)
    if problem.all_devices and used < problem.cluster.num_devices:
        return math.inf
    for number, stage in enumerate(stages):
        mesh, after = stage.submesh, len(stages) - 1 - number
        cost = problem.cost(stage.first, stage.last, mesh.shape)
        if cost is None:
            return math.inf
        needed = cost.bytes_with(objective.in_flight(after, len(stages)))
        if needed > problem.budget_bytes[mesh.shape.kind]:
            return math.inf
        sent = 0.0
        if after:
            then = stages[number + 1].submesh
            together = len({d_host(problem.cluster, d) for d in (*mesh.devices, *then.devices)}) == 1
            sent = problem.transfer_s(stage.last + 1, mesh.shape, then.shape, together)
        once += objective.once_s(cost) + objective.transfer_once * sent
        repeated = max(repeated, objective.repeated_s(cost) + objective.transfer_repeated * sent)
    return once + repeated


def d_host(cluster: Cluster, device: int) -> int:
    host = 0
    for group in cluster.groups:
        if device < group.num_devices:
            return host + device // group.devices_per_host
        device, host = device - group.num_devices, host + group.num_hosts
    raise AssertionError(device)


def check_sound(problem: PartitionProblem, stages: tuple[Stage, ...]) -> None:
    """Every layer once, in order; no device twice."""
    assert [layer for s in stages for layer in range(s.first, s.last + 1)] == list(range(problem.num_layers))
    used = [device for s in stages for device in s.submesh.devices]
    assert len(used) == len(set(used))
    assert set(used) <= set(range(problem.cluster.num_devices))
