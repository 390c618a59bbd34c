"""Define the parts of the plan of a pipelined step: its stages, where its arrays are, what is predicted, and how the search ended.

In: built by `search.plan_stages`. Out: fields of `plan.PipelinePlan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.sharding import TensorSharding
from autopar.pipeline.partition.cluster import Submesh
from autopar.pipeline.partition.problem import StageCost
from autopar.plans.json_codec import MaybeInfinite
from autopar.plans.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A run of layers on a submesh.

    Args:
        first_layer, last_layer: the first and last layer, inclusive.
        submesh: that of its first replica; of most schedules, the only one.
        replicas: the submeshes of its other replicas, each with equal state.
        cost: the estimated cost for which the search chose it; bytes are per device.
        plan: the plan of the stage's program.
    """

    first_layer: int
    last_layer: int
    submesh: Submesh
    cost: StageCost
    plan: Plan
    replicas: tuple[Submesh, ...] = ()

    @property
    def devices(self) -> range:
        """The device numbers of its first replica, host after host."""
        return self.submesh.devices

    @property
    def places(self) -> tuple[Submesh, ...]:
        """The submesh of each replica."""
        return (self.submesh, *self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafPart:
    """An array of the step's arguments or results, or some of its layers, on the submesh of a stage.

    Args:
        stage: the stage whose submesh holds it.
        sharding: its sharding there.
        rows: the layer dim, the first layer, and the one after the last; None for the whole array.
    """

    stage: int
    sharding: TensorSharding
    rows: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersions:
    """The versions of a stage's weights in an asynchronous pipeline.

    Args:
        copies: the most that are alive at once.
        num_bytes: bytes of one version on one device: what the passes of microbatches read of it.
        kept_bytes: the most bytes of all versions together. What only forward passes read, such as an embedding, has fewer copies.
        least_delay, most_delay: after filling, the updates between the version that a forward pass reads and the one that
            its gradients are applied to.
        velocity_bytes: bytes on one device of the velocities of the weights, where backward passes correct what they read.
        corrected_bytes: bytes on one device of the most corrected weights that are alive at once.
    """

    copies: int
    num_bytes: float
    kept_bytes: float
    least_delay: int
    most_delay: int
    velocity_bytes: float = 0.0
    corrected_bytes: float = 0.0

    @property
    def further_bytes(self) -> float:
        """Bytes beside one version of the weights."""
        return self.kept_bytes - self.num_bytes + self.velocity_bytes + self.corrected_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePrediction:
    """The prediction for a pipelined step.

    Args:
        step_time_s: the simulated step time; in an asynchronous schedule after filling.
        bubble_fraction: the idle fraction of all devices' time.
        stage_bytes: the peak bytes per device of each submesh.
    """

    step_time_s: float
    bubble_fraction: float
    stage_bytes: tuple[float, ...]

    @property
    def peak_bytes(self) -> float:
        """The largest peak of any device."""
        return max(self.stage_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesTried:
    """An alternative that was searched; `step_time_s` is `inf` if nothing fitted.

    Args:
        schedule: the schedule's name; "" for one program on all devices.
        reason: why nothing fitted.
        planned: whether each stage was planned with what it sends; otherwise the stages have the costs of planned layers.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    step_time_s: MaybeInfinite
    peak_bytes: MaybeInfinite
    planned: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """How the search ended.

    Args:
        gap: (cost - lower bound) / cost of the partition, by its objective.
        num_planned: the number of runs of layers that were planned to estimate their costs.
        among: the partitions that `status` and `gap` refer to; "" if the partitioner bounds nothing. The default is
            that of files without this field.
        search_time_s: seconds of this search; not saved.
    """

    status: str
    gap: float
    num_layers: int
    num_planned: int
    among: str = "stages in the order of the devices"
    search_time_s: float | None = field(default=None, compare=False)
