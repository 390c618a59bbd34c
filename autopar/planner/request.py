"""Define the request for a plan: devices, memory, shardings, microbatches, and limits of the search.

In: options of `autopar.plan`. Out: `PlanRequest`, which all passes of the planner read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import jax

from autopar.errors import MeshError, PlanMismatchError
from autopar.frontend.sharding_metadata import Rules
from autopar.hardware import profile as hardware_profiles
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape, factorisations, mesh_of
from autopar.ir.sharding import TensorSharding
from autopar.planner.memory_budget import MemoryBudget
from autopar.plans.plan import Plan
from autopar.solve.ilp import Ilp
from autopar.solve.problem import Solver

Progress = Callable[[str, float], None]

#: The effect of sharding metadata on a step's arguments.
Metadata = Literal["pin", "hint", "ignore"]

#: What becomes of attention that a step writes as softmax(QK^T)V: it stays, or a fused kernel may replace it.
Attention = Literal["as_written", "auto"]

#: Fields that are not part of the key in the plan cache. `meshes` and `profile` describe the devices, `LayoutHints` describes
#: `like` and the metadata; the other fields change no plan.
_NOT_IN_KEY = frozenset(
    ["mesh", "num_devices", "hardware", "like", "metadata", "logical_axis_rules", "progress", "cache", "dump"]
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Options of `autopar.plan` for a step that is one program; see `autopar.plan` for the public options.

    Args:
        all_devices: whether to use all devices, even if fewer are as fast.
        available_devices: the number of devices of which the given mesh uses a part, for the plan's record.
        any_that_fits: whether to return the first plan found that fits the memory budget, instead of the fastest.
        held: value -> the sharding that its producer must give it, for a program of one form without rematerialization.
    """

    mesh: str | MeshShape | jax.sharding.Mesh | None = None
    num_devices: int | None = None
    all_devices: bool = False
    available_devices: int | None = None
    hardware: str | HardwareProfile | None = None
    memory_budget_bytes: float | None = None
    pin: Mapping[str, Any] | None = None
    metadata: Metadata = "pin"
    logical_axis_rules: Rules | None = None
    like: Plan | None = None
    num_microbatches: int | Literal["auto"] = 1
    per_microbatch_statistics: bool = False
    rematerialize: bool = True
    dims_as_written: bool = False
    attention: Attention = "as_written"
    any_that_fits: bool = False
    held: Mapping[int, TensorSharding] = field(default_factory=dict)
    solver: Solver | None = None
    time_limit_s: float = 60.0
    progress: Progress | None = None
    cache: bool | str | os.PathLike[str] | None = False
    dump: str | os.PathLike[str] | None = None

    @cached_property
    def meshes(self) -> tuple[MeshShape, ...]:
        """The meshes to plan for.

        Raises:
            MeshError: see `requested_meshes`.
        """
        return requested_meshes(self.mesh, self.num_devices)

    @cached_property
    def profile(self) -> HardwareProfile:
        """The hardware profile of the devices."""
        return requested_profile(self.hardware)

    @property
    def budget(self) -> MemoryBudget:
        """The memory budget per device."""
        given = self.memory_budget_bytes
        return MemoryBudget(self.profile.usable_bytes if given is None else float(given))

    def solver_within(self, share: float = 1.0, **options: Any) -> Solver:
        """The user's solver; by default an `Ilp` with a share of the time limit.

        Args:
            options: options of `Ilp`.
        """
        return self.solver or Ilp(time_limit_s=share * self.time_limit_s, **options)

    def report(self, stage: str, fraction: float) -> None:
        """Report progress to the user.

        Args:
            fraction: the completed part of planning, 0 to 1.
        """
        if self.progress is not None:
            self.progress(stage, fraction)

    def as_of(self, plan: Plan | None) -> PlanRequest:
        """This request, with the mesh, hardware and budget of another plan where it gives none itself.

        Raises:
            PlanMismatchError: the plan is for another number of devices.
        """
        if plan is None:
            return self
        if self.mesh is None and self.num_devices not in (None, plan.mesh.num_devices, plan.available_devices):
            raise PlanMismatchError(
                f"`like` is planned for mesh {plan.mesh.describe()}, but `num_devices` is {self.num_devices}: drop one"
            )
        known = plan.hardware in hardware_profiles.known_names()
        given = self.memory_budget_bytes
        return replace(
            self,
            mesh=plan.mesh if self.mesh is None else self.mesh,
            num_devices=None if self.mesh is None else self.num_devices,
            available_devices=plan.available_devices if self.mesh is None else None,
            hardware=plan.hardware if self.hardware is None and known else self.hardware,
            memory_budget_bytes=plan.memory_budget_bytes if given is None else given,
        )

    def key(self) -> dict[str, Any]:
        """The options that a plan depends on, by name. Options with their default value are left out, so that a new option
        changes no key."""
        default = PlanRequest()
        names = [one.name for one in fields(self) if one.name not in _NOT_IN_KEY]
        given = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}
        chosen = {"any_part": True} if self.mesh is None and not self.all_devices else {}
        return given | {"meshes": self.meshes, "hardware": self.profile} | chosen


def requested_meshes(mesh: Any, num_devices: int | None) -> tuple[MeshShape, ...]:
    """The meshes to plan for: the given mesh, or all meshes of the given number of devices.

    Raises:
        MeshError: `mesh` and `num_devices` disagree, or `mesh` cannot be parsed.
    """
    if mesh is None:
        return factorisations(jax.device_count() if num_devices is None else num_devices)
    if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        shape = MeshShape(tuple(mesh.axis_names), tuple(mesh.axis_sizes))
    else:
        shape = mesh_of(mesh)
    if num_devices is not None and shape.num_devices != num_devices:
        raise MeshError(
            f"mesh {shape.describe()} has {shape.num_devices} devices, but `num_devices` is {num_devices}:"
            " give one of the two, or make them agree"
        )
    return (shape,)


def requested_profile(hardware: str | HardwareProfile | None) -> HardwareProfile:
    """The hardware profile with a name; without a name, that of the visible devices."""
    if isinstance(hardware, HardwareProfile):
        return hardware
    if hardware is None:
        device = jax.devices()[0]
        hardware = hardware_profiles.detect(device.device_kind, device.platform)
    return hardware_profiles.load(hardware)
