"""Plan a step: as one program on all devices, or as pipeline stages.

In: a step and its arguments, or its traced program; planning options. Out: `Plan` or `PipelinePlan`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, overload

import jax

from autopar.api.everything import plan_one_program, with_everything
from autopar.api.plan_in_stages import Hardware, check_number, planning_in_stages
from autopar.errors import (
    BudgetError,
    ClusterError,
    OptionError,
    PinError,
)
from autopar.frontend.sharding_metadata import Rules
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.pipeline.partition.problem import Partitioner
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.planner import planner
from autopar.planner.request import Attention, Metadata, PlanRequest, Progress
from autopar.plans.plan import Plan
from autopar.solve.problem import Solver
from autopar.system.units import parse_size
from autopar.transforms.program import Program, program_of


@overload
def plan(step: Callable[..., Any], *args: Any, like: PipelinePlan, **options: Any) -> PipelinePlan: ...
@overload
def plan(  # pyright: ignore[reportOverlappingOverload]
    step: Callable[..., Any], *args: Any, everything: Literal["auto"], **options: Any
) -> Any: ...
@overload
def plan(step: Callable[..., Any], *args: Any, stages: Literal[1] = 1, **options: Any) -> Plan: ...
@overload
def plan(step: Callable[..., Any], *args: Any, stages: int | Literal["auto"], **options: Any) -> Any: ...
def plan(
    step: Callable[..., Any],
    *args: Any,
    mesh: str | int | Sequence[int] | Mapping[str, int] | MeshShape | jax.sharding.Mesh | None = None,
    num_devices: int | None = None,
    all_devices: bool = False,
    hardware: Hardware | None = None,
    memory_budget_bytes: float | str | None = None,
    pin: Mapping[str, Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    carry: Sequence[str] | None = None,
    donate: Sequence[str] | None = None,
    metadata: Metadata = "pin",
    logical_axis_rules: Rules | None = None,
    like: AnyPlan | None = None,
    everything: Literal["auto"] | None = None,
    stages: int | Literal["auto"] | None = None,
    schedule: str | ScheduleKind = "auto",
    partitioner: Partitioner | None = None,
    num_microbatches: int | Literal["auto"] | None = None,
    per_microbatch_statistics: bool = False,
    rematerialize: bool = True,
    dims_as_written: bool = False,
    attention: Attention = "as_written",
    solver: Solver | None = None,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
    cache: bool | str | os.PathLike[str] = False,
    dump: str | os.PathLike[str] | None = None,
    **unknown: Any,
) -> Plan | PipelinePlan:
    """Plan how to shard every tensor of a step.

    Args:
        step: a function of pytrees of arrays, e.g. `(state, batch) -> (state, loss)`, or of objects that it changes in
            place, as Flax NNX modules. Leaves that are no arrays (texts, functions, settings) are static.
        args: arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes are read.
        mesh: `"2x4"` or `(2, 4)`, `"data=2,model=4"` or `{"data": 2, "model": 4}`, a `MeshShape` or a
            `jax.sharding.Mesh`. With `stages`, the mesh of each stage; a `jax.sharding.Mesh` has the devices of all.
        num_devices: the number of devices. Without `mesh`, every mesh of at most two axes is planned and the cheapest
            kept. Meshes over a part of the devices are planned too, and the plan uses fewer devices if more would not make the
            step faster. Without both, the visible devices are counted.
        all_devices: whether to use all devices even if fewer are as fast.
        hardware: the name of a profile, the path of a profile file, or a profile; by default the profile of the visible
            devices. For stages on several kinds of device, the number of devices by kind, in order:
            `{"a100-sxm-40": 8, "v100-sxm-16": 16}`.
        memory_budget_bytes: the memory budget per device, a number or `"40GB"`; by default the usable memory in the
            hardware profile.
        pin: input path or glob (`"state/params/*/kernel"`) -> `PartitionSpec`.
        kwargs: the step's keyword arguments.
        static_argnames: the names of arguments that are traced as constants, as for `jax.jit`.
        carry: the names of arguments that the step returns updated; by default found by structure.
        donate: the names of arguments whose buffers the step may reuse; by default the carried ones.
        metadata: the use of sharding metadata on the arguments (`nn.Partitioned`, logical axis names, NNX
            `out_sharding`). `"pin"` follows them. `"hint"` plans with and without them, and follows them unless the
            plan without is predicted to be faster by more than 5 %. `"ignore"` does not read them.
        logical_axis_rules: a map from logical axis names in the metadata to mesh axes; by default the active
            `nn.logical_axis_rules`.
        like: a plan of another step. This step is planned on its mesh, and state that both steps have keeps its
            sharding. Like a plan in stages, it runs on the same submeshes.
        everything: `"auto"` chooses all of this: the devices used, mesh, sharding, rematerialization, microbatches, stages and
            schedule, whichever is the fastest that fits. Other options fix a part of it. `considered` of the plan says what lost,
            and why.
        stages: by default 1; the number of pipeline stages, each a program on its own devices; `"auto"` for the fastest number, which
            may be one. The planner chooses the layers, devices and mesh of each stage (`docs/pipelines.md`).
        schedule: the pipeline schedule (`docs/schedules.md`), by name or as a `ScheduleKind` of one's own; `"auto"` for the
            fastest that fits.
        partitioner: an object that assigns layers to stages; by default the package's, which proves optimality by its
            costs.
        num_microbatches: the number of microbatches of gradient accumulation, which gives the same result in less
            memory; by default 1, for pipelines `"auto"`. `"auto"` finds the fastest number that fits the budget, with
            rematerialization where needed.
        per_microbatch_statistics: whether microbatches are allowed if the step uses batch statistics, as in batch
            normalization; each microbatch then has its own statistics.
        rematerialize: whether activations may be rematerialized in the backward pass (activation checkpointing) if the
            step would not fit otherwise.
        dims_as_written: whether to keep every dim whole, so that each sharding is a `PartitionSpec` of a value in the
            step, as `export` needs it.
        attention: `"auto"` lets a fused kernel replace attention that the step writes as softmax(QK^T)V, forward and backward, with
            its masks and biases, where the step is predicted to be faster; results then differ by rounding. By default the step
            runs as written.
        solver: by default `Ilp(time_limit_s)`, which proves optimality; where memory is short, within half a percent.
        time_limit_s: the solver's time limit in seconds per problem. There is one problem per mesh, and several where
            memory is short.
        progress: a callback with a stage's name and the fraction done.
        cache: the folder of the plan cache, so that a step is planned only once; True for the user's cache folder,
            which `parallelize` and the command line use by default.
        dump: a folder for the output of each planner pass, as text; only for plans of one program.

    Raises:
        AutoparError: one of its subclasses; the text says what to change.
    """
    check_options(unknown)
    planned = planning(
        everything=everything,
        stages=stages,
        schedule=schedule,
        partitioner=partitioner,
        metadata=metadata,
        logical_axis_rules=logical_axis_rules,
        like=like,
        mesh=mesh,
        num_devices=num_devices,
        all_devices=all_devices,
        hardware=hardware,
        memory_budget_bytes=memory_budget_bytes,
        pin=pin,
        num_microbatches=num_microbatches,
        per_microbatch_statistics=per_microbatch_statistics,
        rematerialize=rematerialize,
        dims_as_written=dims_as_written,
        attention=attention,
        solver=solver,
        time_limit_s=time_limit_s,
        progress=progress,
        cache=cache,
        dump=dump,
    )
    if progress is not None:
        progress("trace", 0.0)
    return planned(program_of(step, args, carry=carry, donate=donate, kwargs=kwargs, static_argnames=static_argnames))


def planning(
    *,
    hardware: Hardware | None = None,
    schedule: str | ScheduleKind = "auto",
    partitioner: Partitioner | None = None,
    stages_only: bool = False,
    **options: Any,
) -> Callable[[Program], AnyPlan]:
    """Check the options of `plan` now, and return a function that plans a traced program with them.

    Args:
        stages_only: whether `stages=1` means a pipeline of one stage.

    Raises:
        AutoparError: one of its subclasses; the text names the option.
    """
    options = with_everything(options)
    stages, num_microbatches = options.pop("stages", 1), options.get("num_microbatches")
    everything = options.get("everything") is not None
    if stages != "auto" and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        raise ClusterError(f'`stages` is {stages!r}: give 1 or more, or "auto"')
    if options.get("num_devices") is not None:
        check_number("`num_devices`", options["num_devices"])
    like = options.get("like")
    if like is not None and not isinstance(like, Plan | PipelinePlan):
        raise OptionError(
            f"`like` is a {type(like).__name__}: give the plan of another step, or in `parallelize` a step; a saved plan is"
            " read by `autopar.load_plan(path)`"
        )
    in_stages = stages_only or stages != 1 or isinstance(like, PipelinePlan)
    count: int | Literal["auto"] = ("auto" if in_stages else 1) if num_microbatches is None else num_microbatches
    _check_attention(options.get("attention", "as_written"))
    _check_pin(options.get("pin"))
    options["memory_budget_bytes"] = _budget(options.get("memory_budget_bytes"))
    options["num_microbatches"] = count
    if not in_stages:
        if schedule != "auto" or partitioner is not None:
            name = "schedule" if schedule != "auto" else "partitioner"
            raise ClusterError(f'`{name}` applies to pipeline stages only: give `stages="auto"`, or a number above 1')
        options.pop("everything", None)
        request = PlanRequest(hardware=_only_kind(hardware), **options)
        return functools.partial(plan_one_program if everything else planner.plan_program, request=request)
    return planning_in_stages(stages, schedule, partitioner, count, hardware, options)


def _check_attention(attention: object) -> None:
    """Raise OptionError for a value that `attention` does not have."""
    if attention not in get_args(Attention):
        raise OptionError(
            f'`attention` is {attention!r}: give "auto" to let a fused kernel replace softmax(QK^T)V, or "as_written"'
        )


def plan_program(program: Program, **options: Any) -> AnyPlan:
    """Plan a traced program; see `plan`."""
    return planning(**options)(program)


#: Options of other systems that autopar lacks, and their replacements.
_INSTEAD = {
    "devices": "`num_devices=8`, or `mesh=`",
    "static_argnums": "`static_argnames`, the names of these arguments",
    "donate_argnums": "`donate`, the names of these arguments",
    "donate_argnames": "`donate`",
    "in_shardings": "`pin`, from input paths to `PartitionSpec`s",
    "out_shardings": "`pin` for what is carried; the planner chooses the other results",
    "memory_budget": "`memory_budget_bytes`",
}


def option_names() -> list[str]:
    """The names of `plan`'s options."""
    return [p.name for p in inspect.signature(plan).parameters.values() if p.kind is p.KEYWORD_ONLY]


def check_options(unknown: Iterable[str], *first: str) -> None:
    """Refuse unknown options.

    Args:
        first: further options of the caller.

    Raises:
        OptionError: an option is unknown; the text names it and its replacement.
    """
    known = [*first, *option_names()]
    for name in unknown:
        near = difflib.get_close_matches(name, known, 1)
        replacement = _INSTEAD.get(name) or (f"`{near[0]}`" if near else "one of these")
        raise OptionError(
            f"unknown option {name!r}; the options are {', '.join(known)}. Instead of it, give {replacement}"
        )


# -- helpers ---------------------------------------------------------------------------------


def _check_pin(pin: Any) -> None:
    if pin is not None and not isinstance(pin, Mapping):
        raise PinError(
            f"`pin` is a {type(pin).__name__}: give a dict from input paths, or globs, to `jax.sharding.PartitionSpec`s, e.g."
            ' `{"state/params/*": P("data")}`'
        )


def _budget(value: Any) -> float | None:
    """Parse a memory budget: a number of bytes, or a text such as `40GB`.

    Raises:
        BudgetError: the value is neither, or not above zero.
    """
    try:
        if value is None or isinstance(value, bool):
            num_bytes = None if value is None else -1.0
        else:
            num_bytes = parse_size(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        num_bytes = -1.0
    if num_bytes is not None and not num_bytes > 0:
        raise BudgetError(
            f"`memory_budget_bytes` is {value!r}: give the bytes of each device, above zero, such as 40e9 or '40GB'; leave it"
            " out for the device's usable memory"
        )
    return num_bytes


def _only_kind(hardware: Hardware | None) -> str | HardwareProfile | None:
    if not isinstance(hardware, Mapping):
        return hardware
    raise ClusterError(
        f"one program runs on one kind of device, but `hardware` names {', '.join(hardware) or 'none'}:"
        ' give `stages="auto"`, or one name'
    )
