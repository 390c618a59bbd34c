"""Define the stage partition problem and its solution as numbers, without trace, plan or JAX.

    minimise    sum_i once_i  +  max_j repeated_j
    over        stages 1..p: consecutive runs of layers, on submeshes without common devices
    subject to  state_i + working_i + in_flight_i * flight_i  <=  budget of the kind of submesh i

The schedule determines once_i and repeated_i (`schedule.objective`). For 1F1B with m microbatches, let t_i be the forward
and backward seconds of one microbatch plus the transfer to the next stage. Then once_i = t_i and
repeated_i = (m - 1) t_i + update_i, so the objective is  sum t_i + (m - 1) max t_j  without updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from autopar.errors import ClusterError
from autopar.pipeline.partition.cluster import Cluster, Submesh, SubmeshShape
from autopar.pipeline.schedule.objective import Objective, StageCost
from autopar.solve.problem import Status
from autopar.system.units import human_bytes


@dataclass(frozen=True, slots=True)
class CostTables:
    """The costs of all runs of layers on a shape at once, where one plan has them all.

    Args:
        cost, bound: `PartitionProblem.cost` and `bound` for a shape. The fields of the `StageCost` are arrays over first and
            last layer, float[layers, layers]; entries whose last layer is before the first have no meaning.
    """

    cost: Callable[[SubmeshShape], StageCost]
    bound: Callable[[SubmeshShape], StageCost]


class Growth(Enum):
    """The search's assumption about costs that it has not queried. If a cost contradicts the assumption, the search
    weakens it; the optimum is proven only under the weakened assumption."""

    UNKNOWN = "nothing"
    MONOTONE = "a run of layers takes at least the time and bytes of each run in it, on the same submesh"
    SUPERADDITIVE = "a run takes at least the time, and holds at least the state, of its parts together"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProblem:
    """Layers `0 … num_layers - 1` in a chain, and their costs.

    Args:
        cost: the cost of layers first to last, inclusive, on a shape; None if they cannot run there with unlimited
            memory. A run that merely does not fit has a cost, so that the shortage can be reported. It may be slow: it
            is called once per run and shape, and only for candidates of the optimum.
        transfer_s: seconds of one microbatch's activations and gradients between the stage that ends before layer
            `boundary` and the next one. Arguments: boundary, both shapes, whether they share a host. It is called for
            shapes of option 0 only: options differ in costs, not in transfers.
        budget_bytes: the memory budget of a device of each kind.
        bound: an optimistic cost that is fast to compute; none of its numbers, nor of the objective's, exceeds the
            cost.
        growth: an assumption about unknown costs.
        together: whether all costs of a shape take hardly longer than the first; then they are queried together.
        tables: `cost` and `bound` as tables; with them, neither function is called. They need `Growth.UNKNOWN`.
        layer_keys: layers with equal keys are equal; runs of equal layers are queried once.
        shapes: the shapes of submeshes; by default all shapes of the cluster.
        max_stages: the largest number of stages.
        num_stages: the exact number of stages.
        limit_s: the cost from which on partitions are of no use.
        may_have: whether the schedule can run on this number of submeshes.
        all_devices: whether no device may stay idle, as in Alpa; `ExactPartitioner` knows it.

    Raises:
        ClusterError: a kind of device has no budget, or the number of stages is impossible.
    """

    num_layers: int
    cluster: Cluster
    cost: Callable[[int, int, SubmeshShape], StageCost | None]
    transfer_s: Callable[[int, SubmeshShape, SubmeshShape, bool], float]
    objective: Objective
    budget_bytes: Mapping[str, float]
    bound: Callable[[int, int, SubmeshShape], StageCost] | None = None
    growth: Growth = Growth.UNKNOWN
    together: bool = False
    tables: CostTables | None = None
    layer_keys: Sequence[Hashable] | None = None
    shapes: tuple[SubmeshShape, ...] = ()
    max_stages: int | None = None
    num_stages: int | None = None
    limit_s: float = math.inf
    may_have: Callable[[int], bool] = lambda num_submeshes: True
    all_devices: bool = False

    def __post_init__(self) -> None:
        assert self.num_layers > 0, "no layers"
        assert self.layer_keys is None or len(self.layer_keys) == self.num_layers
        assert self.tables is None or self.growth is Growth.UNKNOWN
        self.cluster.check_kinds(self.budget_bytes, "a memory budget")
        if self.max_stages is not None and self.max_stages < 1:
            raise ClusterError(f"at most {self.max_stages} stages leave no place for a layer: allow at least 1")
        if self.num_stages is not None and not 1 <= self.num_stages <= self.num_layers:
            raise ClusterError(
                f"{self.num_stages} stages were requested, but {self.num_layers} layers make at most {self.num_layers}:"
                f" choose 1 to {self.num_layers}"
            )

    @property
    def all_shapes(self) -> tuple[SubmeshShape, ...]:
        """The shapes that submeshes may have, the largest first."""
        return tuple(sorted(self.shapes or self.cluster.shapes(), key=lambda shape: -shape.num_devices))

    @property
    def most_stages(self) -> int:
        """An upper bound of the number of submeshes, each with at least one stage."""
        return min(self.num_layers, self.cluster.num_devices, self.max_stages or self.num_layers)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `first` to `last`, inclusive, on a submesh.

    Args:
        replicas: the equal submeshes of its other replicas, in the order of the schedule.
    """

    first: int
    last: int
    submesh: Submesh
    replicas: tuple[Submesh, ...] = ()

    def __str__(self) -> str:
        layers = f"layer {self.first}" if self.first == self.last else f"layers {self.first} to {self.last}"
        return f"{layers} on {self.submesh.shape}"


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why nothing fits: the stage that lacks the most memory, in the partition that lacks the least.

    Args:
        stage: the stage.
        in_flight: its peak of in-flight microbatches.
        needed_bytes: the bytes that it needs per device.
        budget_bytes: the budget per device.
        is_least: whether it is proven that no partition lacks less.
    """

    stage: Stage
    in_flight: float
    needed_bytes: float
    budget_bytes: float
    is_least: bool = True

    @property
    def missing_bytes(self) -> float:
        """The missing bytes per device."""
        return self.needed_bytes - self.budget_bytes

    def __str__(self) -> str:
        others = "; every other partition lacks at least as much" if self.is_least else ""
        return (
            f"{self.stage} need {human_bytes(self.needed_bytes)} per device with {self.in_flight:g} microbatches in"
            f" flight, {human_bytes(self.missing_bytes)} more than the budget of {human_bytes(self.budget_bytes)}{others}"
        )


@dataclass(frozen=True, slots=True)
class Partition:
    """The result of a partitioner. Without a solution, `stages` is empty and `cost_s` is `inf`.

    Args:
        stages: the stages in order; several may be on one submesh.
        cost_s: the objective's value.
        lower_bound_s: a lower bound of the objective.
        status: how the search ended.
        num_queries: the number of queried costs; equal runs count once.
        others: other partitions found, best first; a simulation may prefer one of them.
        reason: why there is no solution, as text.
        shortage: the reason if it is memory.
        slack_s: the most seconds that merging two runs saves, by the proof's assumption; 0 if no queried cost
            contradicts the problem's `growth`.
        among: the partitions that `lower_bound_s` refers to, in words.
    """

    stages: tuple[Stage, ...]
    cost_s: float
    lower_bound_s: float
    status: Status
    num_queries: int
    others: tuple[tuple[Stage, ...], ...] = ()
    reason: str = ""
    shortage: Shortage | None = None
    slack_s: float = 0.0
    among: str = ""


class Partitioner(Protocol):
    """An interface: partitions layers into stages."""

    def partition(self, problem: PartitionProblem) -> Partition:
        """The best partition found, with its status."""
        ...
