"""Record what was considered for a plan: one program on several meshes, pipeline stages, and why each was not chosen.

In: filled by `api.everything` for `everything="auto"`. Out: a field of plans, which the reports show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.ir.mesh import MeshShape
from autopar.plans.json_codec import MaybeInfinite

#: How far an alternative was examined. `planned`: every tensor has a sharding, as in the chosen plan. `priced`: its stages were
#: simulated with the costs of planned runs of layers. `bounded`: excluded by a lower bound. `left out`: not examined.
Certainty = Literal["planned", "priced", "bounded", "left out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """The chosen plan, or an alternative to it. Unknown seconds and bytes are `inf`.

    Args:
        schedule: the pipeline schedule; "" for one program.
        num_devices: the number of devices; None for stages that were priced only.
        mesh: the mesh of one program.
        num_stages: the number of stages, 1 for one program; 0 if none was found.
        rematerializes: whether activations are rematerialized; None if this is not known, as for priced stages.
        step_time_s: the predicted step time; for `bounded`, the lower bound, if it is known.
        reason: why it was not chosen; "" for the chosen plan.
    """

    schedule: str = ""
    num_devices: int | None = None
    mesh: MeshShape | None = None
    num_stages: int = 1
    num_microbatches: int = 1
    rematerializes: bool | None = None
    step_time_s: MaybeInfinite
    peak_bytes: MaybeInfinite
    certainty: Certainty
    reason: str = ""

    @property
    def is_chosen(self) -> bool:
        """Whether it is the plan that has this record."""
        return not self.reason
