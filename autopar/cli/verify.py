"""`autopar verify`: compare a plan's predictions with the program that XLA compiles from it.

In: a target. Out: a table of predicted and compiled figures; exit code 1 where they differ.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli import options as shared
from autopar.cli.files import check_html, check_output, load_saved, write_html
from autopar.cli.planning import planning
from autopar.cli.target import load_target
from autopar.cli.terminal import output, progress, use_cpu_only

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.pipeline.plan import AnyPlan
    from autopar.verification.verification import Verification
    from autopar.verification.verify_stages import StagesVerification

_EXAMPLES = """
verify train.py:make --mesh 8 --hardware h100-sxm
verify train.py:make --plan gpt.plan.json
"""


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "compare the plan of TARGET with the program that XLA's GPU compiler makes of it; no GPU is needed"
    verify = shared.add_command(added, "verify", about, _EXAMPLES)
    verify.add_argument("target", metavar="TARGET", help="file.py:function or package.module:function")
    verify.add_argument("--plan", metavar="PLAN.json", help="its saved plan (default: plan the target first)")
    about = "number of hosts that the GPUs are on (default: as few as possible)"
    verify.add_argument("--hosts", type=shared.device_count, metavar="N", help=about)
    about = "run and measure the step too, which needs the GPUs"
    verify.add_argument("--run", dest="run_step", action="store_true", help=about)
    about = "write the page of `autopar explain --html`, with predicted against compiled"
    verify.add_argument("--html", metavar="FILE", help=about)
    about = "save the verified plan; if the first plan needed too much memory, the plan with a lower budget"
    verify.add_argument("-o", "--output", metavar="FILE", help=about)
    shared.add_mesh_options(verify, of_stages=True)
    shared.add_program_options(verify)
    shared.add_solver_options(verify)
    verify.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Verify the plan. The exit code is 1 where predicted and compiled figures differ."""
    check_output(options)
    check_html(options)
    plan = None if options.plan is None else load_saved(options, "plan", allowed=("hardware",))
    found = _verified(options, plan)
    if options.output is not None:
        found.plan.save(options.output)
    if options.html is not None:
        write_html(found.plan, options.html, found)
    output(options, found.to_json, lambda console: _render(found, console))
    if options.output is not None and not options.json:
        print(f"\nThe plan is saved to {options.output}.")
    return 0 if found.holds else 1


def _verified(options: argparse.Namespace, plan: AnyPlan | None) -> Verification | StagesVerification:
    from autopar.xla_compiler.compiler import Compiler

    # The compiler process starts before JAX is restricted to CPUs, because it may use GPUs, and while the target is loaded.
    with Compiler() as compiler:
        more = planning(options) if plan is None else _planned(plan, options.hardware)
        step, args = load_target(options.target)
        from autopar.verification.verify import verify

        more |= {"hosts": options.hosts, "run": options.run_step, "compiler": compiler}
        with progress() as report:
            return verify(step, *args, progress=report, **more)


def _planned(plan: AnyPlan, hardware: str | None) -> dict[str, Any]:
    use_cpu_only()
    return {"plan": plan} | ({"hardware": hardware} if hardware else {})


def _render(found: Verification | StagesVerification, console: Console) -> None:
    from autopar.verification.verification import render_verification
    from autopar.verification.verify_stages import StagesVerification, render_stages_verification

    if isinstance(found, StagesVerification):
        render_stages_verification(found, console)
    else:
        render_verification(found, console)
