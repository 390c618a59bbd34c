"""`autopar diff`: compare two saved plans, or a saved plan with the current code.

In: plans or checkpoints, or a plan and a target. Out: the differences; with `--check` an exit code for CI.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from autopar.cli.files import is_plan_file, plan_within
from autopar.cli.options import size
from autopar.cli.target import load_target
from autopar.cli.terminal import flags, given, output, print_result, progress, use_cpu_only
from autopar.errors import TargetError


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = (
        "compare two saved plans: which shardings differ, and what each device must fetch to go from one to the other"
    )
    diff = added.add_parser("diff", help=about, description=about)
    diff.add_argument("before", metavar="A.json", help="a saved plan, or the folder of a checkpoint (CHECKPOINTS/100)")
    diff.add_argument("after", metavar="B.json|TARGET", help="another saved plan; with --check, the step as it is now")
    about = "for CI: plan TARGET with the options of A.json, and fail (exit code 1) where it needs another collective or more memory"
    diff.add_argument("--check", action="store_true", help=about)
    about = "with --check: how much more memory is allowed, 5%% of the plan's or 200MB (default: 5%%)"
    diff.add_argument("--memory", type=_more_memory, metavar="MORE", help=about)
    about = "with --check: how much longer a step may take, 5%% or 2ms (default: not checked)"
    diff.add_argument("--time", type=_more_time, metavar="MORE", help=about)
    about = "with --check: the hardware profile, where it is a file (default: the one that A.json names)"
    diff.add_argument("--hardware", metavar="NAME", help=about)
    diff.add_argument("--json", action="store_true", help="print JSON for programs: all rows, plain numbers")
    diff.set_defaults(run=run)


def run(options: argparse.Namespace) -> int | None:
    """Compare two plans; with `--check`, the exit code is 1 where the code needs more than the plan allows."""
    if options.check:
        return _run_check(options)
    useless = given(options, ("memory", "time", "hardware"), empty=True)
    if useless:
        raise TargetError(f"{flags(useless)}: these belong to --check: add it, or drop them")
    from autopar.pipeline.plan_files import load_plan
    from autopar.report.diff import diff
    from autopar.report.diff_text import render_diff

    found = diff(*(load_plan(plan_within(path)) for path in (options.before, options.after)))
    output(options, found.to_json, lambda console: render_diff(found, console))
    return None


def _run_check(options: argparse.Namespace) -> int:
    """Compare a plan with the current code. The exit code is 1 where the code needs more than the plan allows."""
    from autopar.pipeline.plan_files import load_plan

    saved = load_plan(plan_within(options.before))
    if is_plan_file(options.after):
        raise TargetError(
            f"--check compares a TARGET with a plan, and {options.after!r} is a plan: give a TARGET, or drop --check"
        )
    use_cpu_only()
    step, args = load_target(options.after)
    from autopar.comparison.plan_check import Allowed, check_plan

    more: dict[str, Any] = {} if options.memory is None else {"memory": Allowed(*options.memory)}
    more |= {} if options.time is None else {"time": Allowed(*options.time)}
    more |= {"hardware": options.hardware} if options.hardware else {}
    with progress() as report:
        found = check_plan(saved, step, *args, progress=report, **more)
    print_result(options, found)
    return 0 if found.holds else 1


def _more_memory(text: str) -> tuple[float, float]:
    return _more(text, size)


def _more_time(text: str) -> tuple[float, float]:
    return _more(text, _duration)


def _more(text: str, amount: Callable[[str], float]) -> tuple[float, float]:
    """An allowed increase, as (fraction, amount)."""
    percent = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*", text)
    if percent is not None:
        return float(percent[1]) / 100, 0.0
    return 0.0, 0.0 if text.strip() == "0" else amount(text)


def _duration(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s)\s*", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"invalid time {text!r}: write e.g. 5%, 2ms, 300us or 1.5s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]
