"""Turn parsed options into the planner's keyword arguments.

In: parsed options. Out: keyword arguments of `autopar.plan`, or the plan of the target.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autopar.cli.options import parse_hardware, parse_pin
from autopar.cli.target import load_object, load_target
from autopar.cli.terminal import progress, use_cpu_only
from autopar.errors import TargetError
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.corrections import find_consistency, is_asynchronous

if TYPE_CHECKING:
    from autopar.pipeline.plan import AnyPlan

#: The planner's argument by option.
_ARGUMENTS = {
    "time_limit": "time_limit_s",
    "num_microbatches": "num_microbatches",
    "per_microbatch_statistics": "per_microbatch_statistics",
    "everything": "everything",
    "stages": "stages",
    "schedule": "schedule",
    "dims_as_written": "dims_as_written",
    "attention": "attention",
    "all_devices": "all_devices",
}


def plan_target(options: argparse.Namespace) -> AnyPlan:
    """The plan of the target."""
    chooses = options.consistency == "auto"
    more = planning(options, chooses=chooses)
    if getattr(options, "dump", None) is not None:
        more["dump"] = options.dump
    if getattr(options, "like", None) is not None:
        from autopar.pipeline.plan_files import load_plan

        more["like"] = load_plan(options.like)
    step, args = load_target(options.target)
    from autopar.api.make_plan import plan

    with progress() as report:
        if not chooses:
            return plan(step, *args, progress=report, **more)
        from autopar.api.consistency_within import fastest_within

        count, name = more.pop("num_microbatches", None), getattr(step, "__name__", "step")
        planned = functools.partial(plan, step, *args, progress=report, **more)
        return fastest_within(
            lambda rule, count: planned(schedule=rule, num_microbatches=count), count, options.max_delay, name
        )


def planning(options: argparse.Namespace, *, chooses: bool = False) -> dict[str, Any]:
    """The planner's keyword arguments.

    Args:
        chooses: whether the caller chooses an asynchronous pipeline.

    Raises:
        TargetError: --devices and --mesh, which give one program its devices twice.
    """
    in_stages = getattr(options, "stages", None) or ("auto" if getattr(options, "everything", None) else 1)
    if options.devices and options.mesh and in_stages == 1:
        raise TargetError(
            "--mesh is not allowed with argument --devices: it says how many devices one program has; with --stages it is"
            " the mesh of each stage"
        )
    if options.hardware and (options.devices or options.mesh or "=" in options.hardware):
        use_cpu_only()
    pins = dict(parse_pin(text) for text in getattr(options, "pin", ()))
    return how_to_plan(options, chooses=chooses) | {
        "mesh": options.mesh,
        "num_devices": options.devices,
        "hardware": parse_hardware(options.hardware),
        "memory_budget_bytes": options.memory_budget,
        "pin": pins or None,
        "cache": options.cache or not options.no_cache,
    }


def refuse_several_kinds(options: argparse.Namespace, command: str) -> None:
    """Refuse `--hardware NAME=N,NAME=N`, which is for pipelines.

    Raises:
        TargetError: the option has this form.
    """
    if "=" in (options.hardware or ""):
        raise TargetError(f"--hardware {options.hardware!r}: `{command}` plans devices of one kind: give one name")


def how_to_plan(options: argparse.Namespace, *, chooses: bool = False) -> dict[str, Any]:
    """The keyword arguments for the given options that apply to any mesh and hardware.

    Args:
        chooses: whether the caller chooses an asynchronous pipeline.

    Raises:
        TargetError: options of an asynchronous pipeline do not go together.
    """
    given = {name: getattr(options, option, None) for option, name in _ARGUMENTS.items()}
    more = {name: value for name, value in given.items() if value not in (None, False)}
    if ":" in more.get("schedule", ""):
        from autopar.pipeline.schedule.kind import ScheduleKind

        more["schedule"] = load_object(more["schedule"], "schedule", ScheduleKind)
    consistency = getattr(options, "consistency", None)
    bound = getattr(options, "max_delay", None)
    if chooses and bound is None:
        raise TargetError("--consistency auto needs --max-delay N, the most updates that a gradient may be late")
    if bound is not None and not chooses:
        raise TargetError("--max-delay is the bound of --consistency auto: give that, or leave it out")
    if consistency is not None:
        _check_in_stages(consistency, more)
        more |= {} if chooses else {"schedule": _schedule_of(consistency)}
    return more | ({"rematerialize": False} if getattr(options, "no_rematerialize", False) else {})


def _schedule_of(consistency: str) -> str:
    """The schedule of an asynchronous pipeline.

    Raises:
        TargetError: it is none.
    """
    if not is_asynchronous(consistency):
        also = ", or auto in `autopar plan`" if consistency == "auto" else ""
        raise TargetError(
            f"--consistency {consistency!r}: the command line plans the asynchronous pipelines"
            f" {', '.join(ASYNCHRONOUS)}{also}; data-parallel workers are planned by `step.plan` of `autopar.parallelize`"
        )
    return find_consistency(consistency).kind.name


def _check_in_stages(consistency: str, more: Mapping[str, Any]) -> None:
    if more.get("stages") in (None, 1):
        raise TargetError(
            f"--consistency {consistency!r} is an asynchronous pipeline: add --stages N, or --stages auto"
        )
    if "schedule" in more:
        raise TargetError(
            f"--consistency {consistency!r} has a schedule of its own: leave --schedule {more['schedule']!r} out"
        )
