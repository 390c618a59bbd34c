"""`autopar why`: plan again with the runner-up sharding of one tensor forced, and show the time that it costs.

In: the path of an array or a module, a target, its saved plan if there is one. Out: a comparison of the two plans.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli import options as shared
from autopar.cli.files import load_saved
from autopar.cli.planning import planning
from autopar.cli.target import load_target
from autopar.cli.terminal import print_result, use_cpu_only
from autopar.errors import TargetError

_EXAMPLES = """
why 'state/params/*/qkv/kernel' train.py:make --devices 8 --hardware h100-sxm
why 'state/params/*/qkv/kernel' train.py:make --plan gpt.plan.json
"""


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "plan TARGET again with the runner-up sharding of one tensor, and show what the step loses"
    why = shared.add_command(added, "why", about, _EXAMPLES)
    why.add_argument("path", metavar="PATH", help="an array or a module; may be a glob")
    why.add_argument("target", metavar="TARGET", help="file.py:function or package.module:function")
    why.add_argument("--plan", metavar="PLAN.json", help="its saved plan (default: plan the target first)")
    shared.add_mesh_options(why)
    shared.add_program_options(why)
    shared.add_solver_options(why)
    why.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Plan twice, and print the comparison."""
    if options.stages not in (None, 1):
        raise TargetError("`autopar why` is for plans of one program: drop --stages")
    if options.everything is not None and options.plan is None:
        raise TargetError("`autopar why` is for plans of one program: drop --everything, or give --plan")
    more = _options_of_saved(options) if options.plan is not None else _options_of_one_program(options)
    step, args = load_target(options.target)
    from autopar.comparison.why import why

    print_result(options, why(options.path, step, *args, **more))


def _options_of_saved(options: argparse.Namespace) -> dict[str, Any]:
    from autopar.comparison.plan_check import options_of
    from autopar.pipeline.plan import PipelinePlan

    plan = load_saved(options, "plan")
    if isinstance(plan, PipelinePlan):
        raise TargetError(f"`autopar why` is for plans of one program, and {options.plan!r} is a pipeline plan")
    use_cpu_only()
    return options_of(plan)


def _options_of_one_program(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in planning(options).items() if name not in ("cache", "stages", "schedule")}
