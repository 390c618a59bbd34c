"""`autopar explain`: report what a plan does and why, as text, JSON, an HTML page or a timeline.

In: a saved plan, or a target to plan. Out: the report.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from autopar.cli import options as shared
from autopar.cli.files import check_html, is_plan_file, load_saved, write_html
from autopar.cli.planning import plan_target
from autopar.cli.terminal import output
from autopar.errors import TargetError

if TYPE_CHECKING:
    from autopar.pipeline.plan import AnyPlan, PipelinePlan
    from autopar.plans.plan import Plan

_EXAMPLES = """
explain gpt.plan.json
explain gpt.plan.json --html report.html
explain train.py:make --devices 8 --json
"""


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "report what a plan does and why: a saved plan, or TARGET planned first"
    explain = shared.add_command(added, "explain", about, _EXAMPLES)
    explain.add_argument("target", metavar="TARGET|PLAN.json", help="a target as for `plan`, or a saved plan")
    about = "of a pipeline plan: explain the plan of stage N alone"
    explain.add_argument("--stage", type=int, metavar="N", help=about)
    about = "write the timeline of a step: for Perfetto, where the file ends in .json; of a pipeline, else as SVG"
    explain.add_argument("--timeline", metavar="FILE", help=about)
    about = "write one HTML page that needs no network: time, memory, the sharded model, every decision"
    explain.add_argument("--html", metavar="FILE", help=about)
    about = "with --html: the output of `autopar verify --json` for this plan, shown next to the predictions"
    explain.add_argument("--verification", metavar="FILE", help=about)
    shared.add_mesh_options(explain, of_stages=True)
    shared.add_program_options(explain, chooses=True)
    shared.add_solver_options(explain)
    explain.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the report of a plan, and write its page and timeline."""
    check_html(options)
    plan = load_saved(options) if is_plan_file(options.target) else plan_target(options)
    from autopar.report.explain import explain, explain_json, render

    if options.timeline is not None:
        explain(plan).draw(options.timeline)
        print(f"drawn to {options.timeline}", file=sys.stderr)
    if options.stage is not None:
        plan = _stage(_staged(plan), options.stage)
    if options.html is not None:
        write_html(plan, options.html, options.verification)
    if options.json or options.html is None:
        output(options, lambda: explain_json(plan), lambda console: render(plan, console))


def _staged(plan: AnyPlan) -> PipelinePlan:
    from autopar.pipeline.plan import PipelinePlan

    if isinstance(plan, PipelinePlan):
        return plan
    raise TargetError(
        f"the plan of `{plan.program.name}` is for one program, on mesh {plan.mesh.describe()}: --stage is for pipeline"
        " plans, which `autopar plan --stages` makes"
    )


def _stage(plan: PipelinePlan, number: int) -> Plan:
    if 0 <= number < len(plan.stages):
        return plan.stages[number].plan
    raise TargetError(f"invalid stage {number}: the plan has stages 0 to {len(plan.stages) - 1}")
