"""From parsed options to the planner's arguments.

In: what `argparse` has read. Out: keyword arguments of `autopar.plan`; or the plan of the target.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli.options import parse_hardware, parse_pin
from autopar.cli.target import load_target
from autopar.cli.terminal import progress, use_cpu_only

if TYPE_CHECKING:
    from autopar.pipeline.plan import AnyPlan


def plan_target(options: argparse.Namespace) -> AnyPlan:
    """Plan the target, as the options say."""
    more = planning(options) | ({} if getattr(options, "dump", None) is None else {"dump": options.dump})
    step, args = load_target(options.target)
    from autopar.api.make_plan import plan

    with progress() as report:
        return plan(step, *args, progress=report, **more)


def planning(options: argparse.Namespace) -> dict[str, Any]:
    """What the options say to the planner."""
    if options.hardware and (options.devices or options.mesh or "=" in options.hardware):
        use_cpu_only()
    pins = dict(parse_pin(text) for text in options.pin)
    return how_to_plan(options) | {
        "mesh": options.mesh,
        "num_devices": options.devices,
        "hardware": parse_hardware(options.hardware),
        "memory_budget_bytes": options.memory_budget,
        "pin": pins or None,
        "cache": options.cache or not options.no_cache,
    }


def how_to_plan(options: argparse.Namespace) -> dict[str, Any]:
    """The options that hold on any mesh and hardware."""
    more: dict[str, Any] = {} if options.time_limit is None else {"time_limit_s": options.time_limit}
    if options.num_microbatches is not None:
        more["num_microbatches"] = options.num_microbatches
    if options.per_microbatch_statistics:
        more["per_microbatch_statistics"] = True
    for name in ("stages", "schedule"):
        if getattr(options, name) is not None:
            more[name] = getattr(options, name)
    if options.dims_as_written:
        more["dims_as_written"] = True
    return more | ({"rematerialize": False} if options.no_rematerialize else {})
