"""Random prices for partition problems, as numbers.

In: a seed, a number of layers, and what runs cost at least. Out: the costs and transfers of a `PartitionProblem`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.partition.problem import Growth, Objective, StageCost
from autopar.pipeline.schedule.table import find, objective_of

CLUSTERS = (
    Cluster((DeviceGroup("a", 1, 4),)),
    Cluster((DeviceGroup("a", 2, 2),)),
    Cluster((DeviceGroup("a", 3, 1),)),
    Cluster((DeviceGroup("a", 1, 3), DeviceGroup("b", 1, 2))),
    Cluster((DeviceGroup("a", 2, 1), DeviceGroup("b", 2, 2))),
    Cluster((DeviceGroup("a", 1, 2), DeviceGroup("a", 1, 3))),
)


def objective_named(name: str, num_microbatches: int, virtual: int = 1) -> Objective:
    """The objective of a schedule of the package."""
    return objective_of(find(name), num_microbatches, virtual)


def counting(num_microbatches: int) -> Objective:
    """As 1F1B, but what is in flight depends on the number of stages."""
    plain = objective_named("1f1b", num_microbatches)
    return replace(plain, in_flight=lambda after, count: min(2 * after + count, num_microbatches))


OBJECTIVES: tuple[Callable[[int], Objective], ...] = (
    *(partial(objective_named, name) for name in ("1f1b", "gpipe", "zb-h1", "inference", "none")),
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
