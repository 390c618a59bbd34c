"""Read saved plans, and check output paths before planning.

In: the user's paths. Out: plans, HTML pages, or an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.options import OF_PROGRAM
from autopar.cli.terminal import given, refuse
from autopar.errors import PlanFileError, TargetError

if TYPE_CHECKING:
    from autopar.pipeline.plan import AnyPlan

#: Planning options that a saved plan fixes.
_DECIDED = ("devices", "mesh", "hardware", *OF_PROGRAM)


def is_plan_file(target: str) -> bool:
    """Whether an argument names a saved plan instead of a target."""
    return target.endswith(".json") or (Path(target).is_file() and not target.endswith(".py"))


def plan_within(path: str) -> str:
    """The path of a plan file; for a checkpoint's folder, the plan by which its state was sharded."""
    within = Path(path) / "plan" / "metadata"
    return str(within) if within.is_file() else path


def load_saved(options: argparse.Namespace, option: str = "target", allowed: Sequence[str] = ()) -> AnyPlan:
    """Load the plan from the file given by an option.

    Args:
        allowed: planning options that the user may give nevertheless.

    Raises:
        TargetError: the user gave other planning options, which a saved plan fixes.
    """
    path = getattr(options, option)
    useless = given(options, [name for name in _DECIDED if name not in allowed], empty=True)
    instead = "explain a TARGET" if option == "target" else f"leave out --{option}"
    refuse(useless, f"{path!r} is a saved plan, which fixes these options", f", or {instead}")
    from autopar.pipeline.plan_files import load_plan

    return load_plan(path)


def check_output(options: argparse.Namespace) -> None:
    """Check before planning that the output file can be written.

    Raises:
        PlanFileError: it cannot be written.
    """
    if options.output is not None:
        folder = Path(options.output).resolve().parent
        if Path(options.output).is_dir() or not os.access(folder, os.W_OK):
            raise PlanFileError(f"cannot write {options.output!r}: give -o a file in a folder that can be written to")


def check_html(options: argparse.Namespace) -> None:
    """Check before planning that the HTML page can be written.

    Raises:
        TargetError: `--verification` was given without `--html`.
    """
    if options.html is not None:
        from autopar.report.html.document import check_can_write

        check_can_write(options.html)
    elif getattr(options, "verification", None) is not None:
        raise TargetError(f"--verification {options.verification!r} is shown in the HTML page: add --html FILE")


def write_html(plan: AnyPlan, path: str, verification: Any = None) -> None:
    """Write the HTML page, and print its path to standard error."""
    from autopar.report.html.document import write_report

    write_report(plan, path, verification=verification)
    print(f"The page is written to {path}.", file=sys.stderr)
