"""`autopar diff`: two saved plans beside each other, or new code held against a plan.

In: plan files; with `--check`, a target. Out: what differs; an exit code of 1 where code is not as planned.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from autopar.cli.files import is_plan_file, plan_within
from autopar.cli.options import size
from autopar.cli.target import load_target
from autopar.cli.terminal import flags, given, print_told, progress, tell, use_cpu_only
from autopar.errors import TargetError


def add_command(added: Any) -> None:
    """The command and its options; `added` takes parsers of commands."""
    about = "two saved plans beside each other: what is split otherwise, and what each device must fetch"
    diff = added.add_parser("diff", help=about, description=about)
    diff.add_argument("before", metavar="A.json", help="a saved plan, or the folder of a checkpoint (CHECKPOINTS/100)")
    diff.add_argument("after", metavar="B.json|TARGET", help="another; with --check, the step as it is now")
    about = "for CI: plan TARGET as A.json was, and fail (exit code 1) where it sends a collective more, or takes more memory"
    diff.add_argument("--check", action="store_true", help=about)
    about = "with --check: how much more it may take, 5%% of what was planned or 200MB (default: 5%%)"
    diff.add_argument("--memory", type=_more_memory, metavar="MORE", help=about)
    about = "with --check: how much longer a step may take, 5%% or 2ms (default: not held)"
    diff.add_argument("--time", type=_more_time, metavar="MORE", help=about)
    about = "with --check: the hardware profile, where it is a file (default: by the name that is in A.json)"
    diff.add_argument("--hardware", metavar="NAME", help=about)
    diff.add_argument("--json", action="store_true", help="print JSON for programs: all rows, plain numbers")
    diff.set_defaults(run=run)


def run(options: argparse.Namespace) -> int | None:
    """Compare two plans; with `--check`, the exit code says whether code is as planned."""
    if options.check:
        return _run_check(options)
    useless = given(options, ("memory", "time", "hardware"), empty=True)
    if useless:
        raise TargetError(f"{flags(useless)}: for new code held against a plan: add --check, or drop it")
    from autopar.pipeline.plan_files import load_plan
    from autopar.report.diff import diff
    from autopar.report.diff_text import render_diff

    told = diff(*(load_plan(plan_within(path)) for path in (options.before, options.after)))
    tell(options, told.to_json, lambda console: render_diff(told, console))
    return None


def _run_check(options: argparse.Namespace) -> int:
    """Exit code 1 where new code is not as planned."""
    from autopar.pipeline.plan_files import load_plan

    saved = load_plan(plan_within(options.before))
    if is_plan_file(options.after):
        raise TargetError(
            f"--check holds code against a plan, and {options.after!r} is a plan: give a TARGET, or drop --check"
        )
    use_cpu_only()
    step, args = load_target(options.after)
    from autopar.comparison.plan_check import Allowed, check_plan

    more: dict[str, Any] = {} if options.memory is None else {"memory": Allowed(*options.memory)}
    more |= {} if options.time is None else {"time": Allowed(*options.time)}
    more |= {"hardware": options.hardware} if options.hardware else {}
    with progress() as report:
        told = check_plan(saved, step, *args, progress=report, **more)
    print_told(options, told)
    return 0 if told.holds else 1


def _more_memory(text: str) -> tuple[float, float]:
    return _more(text, size)


def _more_time(text: str) -> tuple[float, float]:
    return _more(text, _duration)


def _more(text: str, amount: Callable[[str], float]) -> tuple[float, float]:
    """How much more something may be: a fraction of it, or an amount."""
    percent = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*", text)
    if percent is not None:
        return float(percent[1]) / 100, 0.0
    return 0.0, 0.0 if text.strip() == "0" else amount(text)


def _duration(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s)\s*", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write e.g. 5%, 2ms, 300us or 1.5s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]
