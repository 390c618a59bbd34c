"""Plan a step in pipeline stages, and as one program where that may be faster.

In: options of `autopar.plan`. Out: a function that plans a traced program: `PipelinePlan`, or `Plan` if one program is
faster.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import jax
import numpy as np

from autopar.api.everything import decided, faster_of
from autopar.errors import (
    AutoparError,
    BudgetError,
    ClusterError,
    MeshError,
    MicrobatchError,
    PinError,
    PlanMismatchError,
)
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape, mesh_of
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup
from autopar.pipeline.partition.problem import Partitioner
from autopar.pipeline.plan import AnyPlan, PipelinePlan, StagesTried
from autopar.pipeline.plan_files import plan_from_json
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.search.follow_plan import plan_like
from autopar.pipeline.search.plan_stages import plan_stages
from autopar.pipeline.search.request import SlowStagesError, StageRequest
from autopar.planner import planner
from autopar.planner.cache import plans as plan_cache
from autopar.planner.layout_hints import Layouts, metadata_layouts
from autopar.planner.request import PlanRequest, requested_profile
from autopar.system.units import human_seconds
from autopar.transforms.program import Program

Hardware = str | HardwareProfile | Mapping[str, int]

#: A plan in stages that follows metadata given as a hint may be slower by this share, like one of one program.
_HINT_TOLERANCE = 0.05
#: Options for one program that pipelines reject, with the values that pipelines accept.
_OF_ONE_PROGRAM = {
    "rematerialize": True,
    "dims_as_written": False,
    "attention": "as_written",
    "dump": None,
}


def planning_in_stages(
    stages: int | Literal["auto"],
    schedule: str | ScheduleKind,
    partitioner: Partitioner | None,
    num_microbatches: int | Literal["auto"],
    hardware: Hardware | None,
    options: Mapping[str, Any],
) -> Callable[[Program], AnyPlan]:
    """Check the options of a plan in stages, and return a function that plans a traced program with them.

    Args:
        stages: the number of stages; 1 if `like` is a plan in stages, whose number is taken.
        options: the other options of `autopar.plan`.

    Raises:
        AutoparError: one of its subclasses; the text names the option.
    """
    everything = options.get("everything") is not None
    _refuse(options, everything)
    mesh, like = options.get("mesh"), options.get("like")
    own_mesh = None if mesh is None or isinstance(mesh, jax.sharding.Mesh) else mesh_of(mesh)
    if like is None:
        cluster, profiles = cluster_of(hardware, options.get("num_devices"), mesh)
    else:
        num_devices = mesh.size if isinstance(mesh, jax.sharding.Mesh) else options.get("num_devices")
        _check_like(like, stages, num_devices, own_mesh, partitioner)
        cluster, profiles = like.cluster, _profiles_like(like, hardware)
    budget = options.get("memory_budget_bytes")
    of_all = {
        "hardware": next(iter(profiles.values())),
        "num_devices": cluster.num_devices,
        "mesh": mesh if own_mesh is None or own_mesh.num_devices == cluster.num_devices else None,
        "memory_budget_bytes": like.memory_budget_bytes if budget is None and like is not None else budget,
        "like": None,
    }
    one = PlanRequest(**{name: value for name, value in {**options, **of_all}.items() if name != "everything"})
    staged = StageRequest(
        cluster=cluster,
        profiles=profiles,
        stages=stages if like is None else len(like.stages),
        num_microbatches=num_microbatches,
        schedule=schedule,
        own_statistics=one.per_microbatch_statistics,
        memory_budget_bytes=one.memory_budget_bytes,
        partitioner=partitioner,
        mesh=own_mesh,
        pins=one.pin or {},
        planning={"solver": one.solver, "time_limit_s": one.time_limit_s},
        progress=one.progress,
    )
    return functools.partial(_plan_in_stages, staged=staged, one=one, like=like, everything=everything)


def cluster_of(
    hardware: Hardware | None, num_devices: int | None, mesh: Any = None
) -> tuple[Cluster, dict[str, HardwareProfile]]:
    """The cluster to plan stages for, and the hardware profile of each device kind.

    Args:
        hardware: the argument of `plan`.
        num_devices: the number of devices; by default the visible ones.
        mesh: a `jax.sharding.Mesh` of the devices to use.

    Raises:
        ClusterError: a host would be used in part, the numbers disagree, or one is none.
    """
    if isinstance(hardware, Mapping):
        if not hardware:
            raise ClusterError('`hardware` names no devices: give the number by kind, such as `{"h100-sxm": 8}`')
        for name, number in hardware.items():
            check_number(f"the number of {name!r} in `hardware`", number)
        counts = {requested_profile(name): number for name, number in hardware.items()}
        total = sum(counts.values())
        if num_devices is not None and num_devices != total:
            raise ClusterError(
                f"`hardware` names {total} devices, but {num_devices} were requested: leave `num_devices` out"
            )
    else:
        given = mesh.size if isinstance(mesh, jax.sharding.Mesh) else num_devices
        counts = {requested_profile(hardware): jax.device_count() if given is None else given}
    groups = []
    for profile, number in counts.items():
        per_host = min(profile.devices_per_host, number)
        if per_host < 1 or number % per_host:
            raise ClusterError(
                f"{number} devices of {profile.name!r} are not whole hosts of {profile.devices_per_host}: give a multiple"
                f" of {profile.devices_per_host}, or fewer"
            )
        groups.append(DeviceGroup(profile.name, number // per_host, per_host))
    return Cluster(tuple(groups)), {profile.name: profile for profile in counts}


def check_number(what: str, number: object) -> None:
    """Refuse what is no number of devices.

    Raises:
        ClusterError: it is no whole number of at least 1.
    """
    if not isinstance(number, int | np.integer) or isinstance(number, bool) or number < 1:
        raise ClusterError(f"{what} is {number!r}: give a whole number of devices, 1 or more")


def _check_like(
    like: Any, stages: int | str, num_devices: int | None, mesh: MeshShape | None, partitioner: Partitioner | None
) -> None:
    """Refuse `like` of one program, and options that contradict the stages of `like`.

    Raises:
        PlanMismatchError: the text says what to leave out.
    """
    if not isinstance(like, PipelinePlan):
        raise PlanMismatchError(
            f"`like` is the plan of `{like.program.name}`, one program, whose state is on all {like.num_devices} devices, but"
            " with `stages` each stage holds its part on devices of its own: leave `stages` or `like` out"
        )
    name, others = like.program.name, {stage.plan.mesh for stage in like.stages} - {mesh}
    problem = ""
    if stages not in (1, "auto", len(like.stages)):
        problem = f"has {len(like.stages)} stages, but `stages` is {stages}: leave `stages` out"
    elif num_devices not in (None, like.num_devices):
        problem = f"is for {like.num_devices} devices, but here are {num_devices}: leave `num_devices` and `mesh` out"
    elif mesh is not None and others:
        problem = f"has a stage on mesh {others.pop().describe()}, but `mesh` is {mesh.describe()}: leave `mesh` out"
    elif partitioner is not None:
        problem = "has the stages already, so `partitioner` has nothing to choose: leave it out"
    if problem:
        raise PlanMismatchError(f"the plan of `{name}`, given as `like`, {problem}")


def _profiles_like(like: PipelinePlan, hardware: Hardware | None) -> dict[str, HardwareProfile]:
    """The hardware profile of each kind of device of another plan.

    Raises:
        PlanMismatchError: `hardware` names other kinds.
    """
    names = like.cluster.kinds if hardware is None else hardware if isinstance(hardware, Mapping) else [hardware]
    profiles = {profile.name: profile for profile in map(requested_profile, names)}
    if set(profiles) != set(like.cluster.kinds):
        raise PlanMismatchError(
            f"the plan of `{like.program.name}`, given as `like`, is for {like.hardware}, but `hardware` is"
            f" {' + '.join(profiles)}: leave `hardware` out"
        )
    return profiles


def _plan_in_stages(
    program: Program, staged: StageRequest, one: PlanRequest, like: PipelinePlan | None, everything: bool
) -> AnyPlan:
    """Plan a step in stages; if the number of stages is open, also plan it as one program and return the faster plan.

    Args:
        one: the request for one program on all devices of the first kind.
        like: the plan whose stages to take.
        everything: whether to record what was considered.
    """
    meshes = staged.meshes if like is None else tuple({stage.plan.mesh: None for stage in like.stages})
    given = staged.mesh is not None or like is not None
    hints = metadata_layouts(program, one.metadata, one.logical_axis_rules, meshes, mesh_given=given)
    of_stages = ("stages", "schedule", "partitioner", "cluster", "profiles", "mesh")
    key = one.key() | {name: getattr(staged, name) for name in of_stages}
    key |= {"metadata": one.metadata, "logical_axis_rules": one.logical_axis_rules, "layouts": hints}
    key |= {"everything": "auto"} if everything else {}
    key |= {"like": None if like is None else _digest(like)}
    entry = plan_cache.entry_of(program, key, plan_cache.folder_of(one.cache), plan_from_json)
    cached = entry.read()
    if cached is not None:
        return cached
    follow = _staged_if_no_slower if one.metadata == "hint" and hints.pins else _staged

    def in_stages(limit_s: float = math.inf) -> PipelinePlan:
        request = replace(staged, limit_s=limit_s)
        own = functools.partial(_planned, program, request)
        return follow(own if like is None else functools.partial(plan_like, program, staged, like), hints)

    is_open = staged.stages == "auto" and staged.partitioner is None and len(staged.cluster.groups) == 1
    is_one_mesh = staged.mesh is not None and staged.mesh.num_devices != staged.cluster.num_devices
    if everything:
        left_out = _why_stages_only(staged, like)
        plan = decided(program, None if left_out else one, in_stages, max(staged.budgets.values()), left_out)
    elif is_open and not is_one_mesh:
        plan = _faster(program, in_stages, replace(one, cache=False))
    else:
        plan = in_stages()
        if is_open:
            note = f"one program on all devices was not planned: {_why_stages_only(staged, like)}"
            plan = replace(plan, notes=(*plan.notes, note))
    if (
        not everything
        and isinstance(plan, PipelinePlan)
        and staged.stages != "auto"
        and like is None
        and len(staged.cluster.groups) == 1
    ):
        note = 'one program on all devices was not planned: `stages="auto"` plans both, and takes the faster'
        plan = replace(plan, notes=(*plan.notes, note))
    entry.keep(plan)
    return plan


def _why_stages_only(staged: StageRequest, like: PipelinePlan | None) -> str:
    """Why the step is not planned as one program too; "" if it is."""
    if like is not None:
        return f"`like` is the plan of `{like.program.name}` in {len(like.stages)} stages"
    if staged.stages != "auto":
        return f"`stages` is {staged.stages}"
    if staged.partitioner is not None:
        return "`partitioner` cuts stages"
    if len(staged.cluster.groups) > 1:
        return f"one program runs on one kind of device, and these are {staged.cluster}"
    if staged.mesh is not None and staged.mesh.num_devices != staged.cluster.num_devices:
        return f"it cannot have the mesh {staged.mesh} of a stage"
    return ""


#: Plans a step in stages with the pins of sharding metadata, by path.
Planned = Callable[[Mapping[str, Any]], PipelinePlan]


def _planned(program: Program, staged: StageRequest, metadata: Mapping[str, Any]) -> PipelinePlan:
    """The plan in stages; the user's pins take precedence over those of metadata."""
    return plan_stages(program, replace(staged, pins={**metadata, **staged.pins}))


def _staged(planned: Planned, hints: Layouts) -> PipelinePlan:
    """The plan in stages that follows the metadata of the arguments."""
    try:
        plan = planned(hints.pins)
    except PinError as error:
        if not any(repr(path) in str(error) for path in hints.pins):
            raise
        way_out = 'It is metadata of the argument: `metadata="ignore"` plans without it'
        raise PinError(f"{error}. {way_out}") from None
    return replace(plan, notes=(*plan.notes, *hints.notes))


def _staged_if_no_slower(planned: Planned, hints: Layouts) -> PipelinePlan:
    """The plan in stages that follows the metadata; where none can or it is too slow, the fastest without it."""
    other = planned({})
    try:
        plan = _staged(planned, hints)
    except (PinError, MeshError, BudgetError) as error:
        note = f"the metadata of the arguments were not followed: {error}"
        return replace(other, notes=(*other.notes, note))
    fastest_s = other.prediction.step_time_s
    slower = plan.prediction.step_time_s / fastest_s - 1 if fastest_s else 0.0
    if slower <= _HINT_TOLERANCE:
        return replace(plan, notes=(*plan.notes, f"follows the metadata of the arguments, at {slower:+.1%} step time"))
    note = f"following the metadata of the arguments would cost {slower:+.1%} step time"
    return replace(other, notes=(*other.notes, note))


def _refuse(options: Mapping[str, Any], everything: bool) -> None:
    """Reject options for one program, because each stage of a pipeline is a program."""
    plans = "`everything`, which plans stages too," if everything else "`stages`"
    way_out = "give `stages=1` too, or leave" if everything else "leave"
    for name, usual in _OF_ONE_PROGRAM.items():
        given = options.get(name)
        if given is None or given is usual:
            continue
        raise ClusterError(
            f"`{name}` applies to one program, but with {plans} each stage is a program of its own:"
            f" {way_out} `{name}` or `{'everything' if everything else 'stages'}` out"
        )


def _faster(program: Program, in_stages: Callable[[float], PipelinePlan], request: PlanRequest) -> AnyPlan:
    """Plan the step both as a pipeline and as one program, and return the faster plan; one of them may fail."""
    failures: list[AutoparError] = []
    one, staged = None, None
    try:
        one = planner.plan_program(program, request)
    except (BudgetError, MicrobatchError, PinError) as error:
        failures.append(error)
    try:
        staged = in_stages(math.inf if one is None else one.prediction.step_time_s)
    except SlowStagesError:
        assert one is not None, "only its time can be a limit"
        return replace(one, notes=(*one.notes, "one program: stages would make the step no faster"))
    except (BudgetError, MicrobatchError, PinError, MeshError) as error:
        failures.append(error)
    if one is None and staged is None:
        raise failures[-1]
    if staged is None:
        assert one is not None
        return replace(one, notes=(*one.notes, f"one program, for no stages can be: {failures[0]}"))
    if one is not None and faster_of(one, staged) is one:
        would = f"{staged.strategy} would take {human_seconds(staged.prediction.step_time_s)}"
        if len(staged.stages) == 1:
            would = "stages would make the step no faster"
        return replace(one, notes=(*one.notes, f"one program: {would}"))
    if one is None:
        return replace(staged, notes=(*staged.notes, f"one program on all devices: {failures[0]}"))
    alone = StagesTried(
        schedule="",
        num_stages=1,
        num_microbatches=one.num_microbatches,
        step_time_s=one.prediction.step_time_s,
        peak_bytes=one.prediction.peak_bytes,
    )
    return replace(staged, tried=(*staged.tried, alone))


def _digest(plan: PipelinePlan) -> str:
    return hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()
