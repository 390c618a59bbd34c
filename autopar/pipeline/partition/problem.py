"""The stage partition and its outcome as numbers: no trace, no plan, no JAX.

    minimise    sum_i once_i  +  max_j repeated_j
    over        stages 1..p: runs of layers that follow one another, each on a submesh that follows the one before
    subject to  state_i + working_i + in_flight_i * flight_i  <=  budget of the kind of submesh i

What a stage takes once and what it takes over and over is the schedule's to say (`objectives.py`): for 1F1B, with
t_i = forward + backward of one microbatch + transfer to the next stage, once_i = t_i and
repeated_i = (B - 1) t_i + update_i, so that the sum is  sum t_i + (B - 1) max t_j.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from autopar.errors import ClusterError
from autopar.pipeline.partition.cluster import Cluster, Submesh, SubmeshShape
from autopar.solve.problem import Status
from autopar.system.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The price of a run of layers on a submesh; bytes are per device.

    Args:
        forward_s: of one microbatch.
        backward_s: of one microbatch; where the backward pass is split in two, its input part.
        weight_s: its weight part, where it is split.
        update_s: once per step, after the last microbatch: gradients joined, optimizer.
        state_bytes: held all the time: parameters, optimizer state, gradients summed up.
        flight_bytes: held per microbatch in flight.
        working_bytes: besides, while a microbatch is worked on.
    """

    forward_s: float
    backward_s: float = 0.0
    weight_s: float = 0.0
    update_s: float = 0.0
    state_bytes: float = 0.0
    flight_bytes: float = 0.0
    working_bytes: float = 0.0

    def bytes_with(self, in_flight: float) -> float:
        """Bytes per device with so many microbatches in flight."""
        return self.state_bytes + self.working_bytes + in_flight * self.flight_bytes


@dataclass(frozen=True, slots=True)
class Objective:
    """What a schedule makes of the prices of stages; see the sum above. Nothing is negative.

    Args:
        once_s, repeated_s: of a stage, but for the transfer to the next.
        in_flight: most microbatches that a stage holds, by the number of stages after it and of all stages.
        transfer_once, transfer_repeated: how often the transfer of one microbatch counts in either.
    """

    once_s: Callable[[StageCost], float]
    repeated_s: Callable[[StageCost], float]
    in_flight: Callable[[int, int], float]
    transfer_once: float = 1.0
    transfer_repeated: float = 0.0


class Growth(Enum):
    """What may be taken for granted of prices that were not asked yet. An assumption: where a price contradicts it, it
    is trusted less; what is called optimal is so if no price that was not asked contradicts it more."""

    UNKNOWN = "nothing"
    MONOTONE = "a run of layers takes at least the time and bytes of each run in it, on the same submesh"
    SUPERADDITIVE = "it takes at least the time, and holds at least the state, of the runs it is made of, together"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProblem:
    """Layers `0 … num_layers - 1` in a chain, and what they cost where.

    Args:
        cost: price of layers first to last, both included, on a submesh of a shape; None where they cannot run there,
            whatever the memory (what merely does not fit has a price, so that the shortage can be told). Asked once
            for each, and only for what may be in the optimum: it may be slow.
        transfer_s: seconds of one microbatch from the stage that ends before layer `boundary` to the next one, there
            and back (activations, and their gradients): boundary, shapes of both, whether they share a host.
        budget_bytes: what a device of each kind may hold.
        bound: an optimistic price, cheap to ask; none of its numbers, and none that the objective makes of it, may be
            above the price.
        growth: what else is known of prices.
        together: whether all prices of a shape take hardly longer than the first one: then they are asked together.
        layer_keys: layers with equal keys are equal: runs of equal layers are asked once.
        shapes: of submeshes; by default all that the cluster has.
        max_stages: at most so many. num_stages: exactly so many.

    Raises:
        ClusterError: a kind of device without a budget.
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
    layer_keys: Sequence[Hashable] | None = None
    shapes: tuple[SubmeshShape, ...] = ()
    max_stages: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        assert self.num_layers > 0, "no layers"
        assert self.layer_keys is None or len(self.layer_keys) == self.num_layers
        self.cluster.check_kinds(self.budget_bytes, "a memory budget")
        if self.max_stages is not None and self.max_stages < 1:
            raise ClusterError(f"at most {self.max_stages} stages leave no place for a layer: allow at least 1")
        if self.num_stages is not None and not 1 <= self.num_stages <= self.most_stages:
            raise ClusterError(
                f"{self.num_stages} stages were asked for, but {self.num_layers} layers on {self.cluster.num_devices}"
                f" devices make at most {self.most_stages}: ask for 1 to {self.most_stages}"
            )

    @property
    def all_shapes(self) -> tuple[SubmeshShape, ...]:
        """The shapes that submeshes may have, the largest first."""
        return tuple(sorted(self.shapes or self.cluster.shapes(), key=lambda shape: -shape.num_devices))

    @property
    def most_stages(self) -> int:
        """There cannot be more."""
        return min(self.num_layers, self.cluster.num_devices, self.max_stages or self.num_layers)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers `first` to `last`, both included, on a submesh."""

    first: int
    last: int
    submesh: Submesh

    def __str__(self) -> str:
        layers = f"layer {self.first}" if self.first == self.last else f"layers {self.first} to {self.last}"
        return f"{layers} on {self.submesh.shape}"


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why nothing fits: of the partition that lacks least, the stage that lacks most.

    Args:
        stage: which.
        in_flight: microbatches that it would hold.
        needed_bytes, budget_bytes: per device.
    """

    stage: Stage
    in_flight: float
    needed_bytes: float
    budget_bytes: float

    @property
    def missing_bytes(self) -> float:
        """What the budget would have to grow by, per device."""
        return self.needed_bytes - self.budget_bytes

    def __str__(self) -> str:
        return (
            f"{self.stage} need {human_bytes(self.needed_bytes)} per device with {self.in_flight:g} microbatches in"
            f" flight, {human_bytes(self.missing_bytes)} more than the budget of {human_bytes(self.budget_bytes)};"
            " every other partition lacks at least as much"
        )


@dataclass(frozen=True, slots=True)
class Partition:
    """A partitioner's outcome; without stages where none was found, and `cost_s` is then `inf`.

    Args:
        stages: in order; the stages of one submesh follow one another by `num_submeshes` where there are several.
        cost_s: the objective's value.
        lower_bound_s: no partition is better.
        status: how the search ended.
        num_queries: prices that were asked, equal runs once.
        others: further partitions met, best first: what a closer look, by simulation say, may prefer.
        reason: why there are no stages, for people.
        shortage: the same, where memory is why.
        slack_s: what a run may take less than its parts, by the proof: 0 where no price that was asked contradicts the
            problem's `growth`, else somewhat more than any does.
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


class Partitioner(Protocol):
    """Anything that cuts layers into stages; a planner takes one as an argument."""

    def partition(self, problem: PartitionProblem) -> Partition:
        """The best partition found, with the status that says how good it is."""
        ...
