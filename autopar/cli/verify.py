"""`autopar verify`: hold a plan against the program that XLA compiles; diagnose a step sharded by hand.

In: a target. Out: predicted beside compiled; an exit code of 1 where they differ, or something is sent that nobody meant.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli.files import check_html, check_output, refuse_planning, write_html
from autopar.cli.options import add_planning_command, device_count
from autopar.cli.planning import planning
from autopar.cli.target import load_target
from autopar.cli.terminal import given, progress, refuse, tell, use_cpu_only
from autopar.errors import TargetError

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.verification.verification import Verification
    from autopar.verification.verify_stages import StagesVerification

#: Options that say nothing of a step sharded by hand.
_OF_PLANS = (
    "plan",
    "html",
    "run_step",
    "no_rematerialize",
    "dims_as_written",
    "pin",
    "num_microbatches",
    "per_microbatch_statistics",
)


def add_command(added: Any) -> None:
    """The command and its options; `added` takes parsers of commands."""
    about = "hold a plan against the program that XLA compiles from it, for GPUs that need not exist"
    verify = add_planning_command(added, "verify", about)
    verify.add_argument("target", metavar="TARGET", help="file.py:function or package.module:function")
    verify.add_argument("--plan", metavar="PLAN.json", help="verify this saved plan of the target; do not plan")
    verify.add_argument(
        "--hosts", type=device_count, metavar="N", help="spread the GPUs over N hosts (default: as few as can be)"
    )
    about = "run the step too, and measure it; needs the GPUs themselves on this machine"
    verify.add_argument("--run", dest="run_step", action="store_true", help=about)
    about = "instead of a plan: a TARGET whose step is jitted with shardings given by hand; what it costs, which collectives"
    about += " nobody meant, and the few changes that help most"
    verify.add_argument("--as-is", action="store_true", help=about)
    about = "with --as-is: predict the changes, and do not compile them"
    verify.add_argument("--no-check", action="store_true", help=about)
    about = "write the page of `autopar explain --html`, with predicted beside compiled"
    verify.add_argument("--html", metavar="FILE", help=about)
    about = "save the verified plan, which is a tighter one where the first took too much memory"
    verify.add_argument("-o", "--output", metavar="FILE", help=about)
    verify.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit code 1 where the plan does not hold."""
    check_output(options)
    check_html(options)
    if options.as_is or options.no_check:
        return _run_diagnose(options)
    if options.plan is not None:
        refuse_planning(options, options.plan, "or leave out --plan", allowed=("hardware",))
    told = _verified(options)
    if options.output is not None:
        told.plan.save(options.output)
    if options.html is not None:
        write_html(told.plan, options.html, told)
    tell(options, told.to_json, lambda console: _render(told, console))
    if options.output is not None and not options.json:
        print(f"\nThe plan is saved to {options.output}.")
    return 0 if told.holds else 1


def _verified(options: argparse.Namespace) -> Verification | StagesVerification:
    from autopar.xla_compiler.compiler import Compiler

    # It gets ready while the target is loaded; and is told nothing of the CPU, for it may use GPUs.
    with Compiler() as compiler:
        more = planning(options) if options.plan is None else _saved(options)
        step, args = load_target(options.target)
        from autopar.verification.verify import verify

        more |= {"hosts": options.hosts, "run": options.run_step, "compiler": compiler}
        with progress() as report:
            return verify(step, *args, progress=report, **more)


def _saved(options: argparse.Namespace) -> dict[str, Any]:
    from autopar.pipeline.plan_files import load_plan

    more: dict[str, Any] = {"plan": load_plan(options.plan)}
    use_cpu_only()
    return more | ({"hardware": options.hardware} if options.hardware else {})


def _render(told: Verification | StagesVerification, console: Console) -> None:
    from autopar.verification.verification import render_verification
    from autopar.verification.verify_stages import StagesVerification, render_stages_verification

    if isinstance(told, StagesVerification):
        render_stages_verification(told, console)
    else:
        render_verification(told, console)


def _run_diagnose(options: argparse.Namespace) -> int:
    """Exit code 1 where something was sent that nobody meant."""
    if not options.as_is:
        raise TargetError("--no-check is about the changes to a step sharded by hand: add --as-is, or drop it")
    refuse(given(options, _OF_PLANS), "--as-is takes the shardings that the step has, and runs nothing")
    from autopar.xla_compiler.compiler import Compiler

    with Compiler() as compiler:
        if options.hardware:
            use_cpu_only()
        step, args = load_target(options.target)
        from autopar.diagnosis.diagnose import diagnose
        from autopar.diagnosis.diagnosis import render_diagnosis

        more: dict[str, Any] = {} if options.time_limit is None else {"time_limit_s": options.time_limit}
        more |= {"mesh": options.mesh, "num_devices": options.devices, "hardware": options.hardware}
        more |= {"memory_budget_bytes": options.memory_budget, "hosts": options.hosts, "check": not options.no_check}
        with progress() as report:
            told = diagnose(step, *args, compiler=compiler, progress=report, **more)
    if options.output is not None:
        told.changed.save(options.output)
    tell(options, told.to_json, lambda console: render_diagnosis(told, console))
    if options.output is not None and not options.json:
        print(f"\nThe plan with all changes is saved to {options.output}.")
    return 1 if told.unmeant else 0
