"""Define a request for pipeline stages.

In: what the user asks for. Out: `StageRequest`, for `plan_stages` and `follow_plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape, factorisations
from autopar.pipeline.partition.cluster import Cluster, SubmeshShape
from autopar.pipeline.partition.problem import Partitioner
from autopar.pipeline.plan import StagesTried
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.search.stage_costs import likely_shapes
from autopar.planner.memory_budget import MemoryBudget

Progress = Callable[[str, float], None]


class SlowStagesError(Exception):
    """No stages are faster than the limit of the request.

    Args:
        tried: the stages that were searched.
    """

    def __init__(self, tried: Sequence[StagesTried]) -> None:
        super().__init__("no stages are fast enough")
        self.tried = tuple(tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """A request for stages.

    Args:
        profiles: the hardware profile of each kind of device in the cluster.
        memory_budget_bytes: bytes per device; None for the profile's usable memory.
        partitioner: by default `ExactPartitioner` or `EqualSubmeshPartitioner`, which prove optimality by their costs.
        mesh: the mesh of each stage; None for the fastest.
        pins: path or glob of arguments -> `PartitionSpec`, of the user and of sharding metadata.
        limit_s: the step time from which on stages are of no use, such as that of one program.
        planning: options of `planner.plan_and_parts` for each stage.
    """

    cluster: Cluster
    profiles: Mapping[str, HardwareProfile]
    stages: int | Literal["auto"] = "auto"
    num_microbatches: int | Literal["auto"] = "auto"
    schedule: str | ScheduleKind = "auto"
    own_statistics: bool = False
    memory_budget_bytes: float | None = None
    partitioner: Partitioner | None = None
    mesh: MeshShape | None = None
    pins: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = math.inf
    planning: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress | None = None

    @property
    def shapes(self) -> tuple[SubmeshShape, ...]:
        """The shapes that submeshes may have: with a given mesh any shape, because only those of its size are searched."""
        return likely_shapes(self.cluster) if self.mesh is None else self.cluster.shapes()

    @property
    def meshes(self) -> tuple[MeshShape, ...]:
        """The meshes that stages may have, the largest first."""
        sizes = sorted({shape.num_devices for shape in self.shapes}, reverse=True)
        return (self.mesh,) if self.mesh is not None else tuple(mesh for n in sizes for mesh in factorisations(n))

    @property
    def budgets(self) -> dict[str, float]:
        """The memory budget of a device of each kind."""
        given = self.memory_budget_bytes
        return {kind: MemoryBudget(given or p.usable_bytes).plan_bytes for kind, p in self.profiles.items()}
