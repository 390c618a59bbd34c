"""The files that commands read and write: saved plans, outputs, pages.

In: paths as a user gave them. Out: plans; or a refusal, before the work, of what cannot be read or written.
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

#: Options of planning, all decided in a saved plan.
_DECIDED = ("devices", "mesh", "hardware", *OF_PROGRAM)


def is_plan_file(target: str) -> bool:
    """Whether it is a saved plan, and no target."""
    return target.endswith(".json") or (Path(target).is_file() and not target.endswith(".py"))


def plan_within(path: str) -> str:
    """A plan file; of a checkpoint's folder, the plan that its state was laid out by."""
    within = Path(path) / "plan" / "metadata"
    return str(within) if within.is_file() else path


def refuse_planning(options: argparse.Namespace, saved: str, else_do: str, allowed: Sequence[str] = ()) -> None:
    """A saved plan takes no options of planning.

    Raises:
        TargetError: naming those that were given and are not allowed.
    """
    useless = given(options, [name for name in _DECIDED if name not in allowed], empty=True)
    refuse(useless, f"{saved!r} is a saved plan, already decided", f", {else_do}")


def check_output(options: argparse.Namespace) -> None:
    """Refuse what cannot be written to now, rather than when all is done."""
    if options.output is not None:
        folder = Path(options.output).resolve().parent
        if Path(options.output).is_dir() or not os.access(folder, os.W_OK):
            raise PlanFileError(f"cannot write {options.output!r}: give -o a file in a folder that can be written to")


def check_html(options: argparse.Namespace) -> None:
    """Refuse what cannot be written to now, rather than when all is done."""
    if options.html is not None:
        from autopar.report.html.document import check_can_write

        check_can_write(options.html)
    elif getattr(options, "verification", None) is not None:
        raise TargetError(f"--verification {options.verification!r} is shown in a page: add --html FILE")


def write_html(plan: AnyPlan, path: str, verification: Any = None) -> None:
    """The page, and on standard error where it is."""
    from autopar.report.html.document import write_report

    write_report(plan, path, verification=verification)
    print(f"The page is written to {path}.", file=sys.stderr)
