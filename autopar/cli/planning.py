"""Turn parsed options into the planner's keyword arguments.

In: parsed options. Out: keyword arguments of `autopar.plan`, or the plan of the target.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli.options import parse_hardware, parse_pin
from autopar.cli.target import load_object, load_target
from autopar.cli.terminal import progress, use_cpu_only
from autopar.errors import TargetError

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
    more = planning(options) | ({} if getattr(options, "dump", None) is None else {"dump": options.dump})
    if getattr(options, "like", None) is not None:
        from autopar.pipeline.plan_files import load_plan

        more["like"] = load_plan(options.like)
    step, args = load_target(options.target)
    from autopar.api.make_plan import plan

    with progress() as report:
        return plan(step, *args, progress=report, **more)


def planning(options: argparse.Namespace) -> dict[str, Any]:
    """The planner's keyword arguments.

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
    return how_to_plan(options) | {
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


def how_to_plan(options: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments for the given options that apply to any mesh and hardware."""
    given = {name: getattr(options, option, None) for option, name in _ARGUMENTS.items()}
    more = {name: value for name, value in given.items() if value not in (None, False)}
    if ":" in more.get("schedule", ""):
        from autopar.pipeline.schedule.kind import ScheduleKind

        more["schedule"] = load_object(more["schedule"], "schedule", ScheduleKind)
    return more | ({"rematerialize": False} if getattr(options, "no_rematerialize", False) else {})
