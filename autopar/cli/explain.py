"""`autopar explain`: what a plan does and why; what a runner-up would cost; what an all-reduce costs.

In: a saved plan, or a target to plan. Out: text, JSON, a page or a timeline.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.cli.files import check_html, is_plan_file, refuse_planning, write_html
from autopar.cli.options import OF_PROGRAM, add_planning_command
from autopar.cli.planning import plan_target, planning
from autopar.cli.target import load_target
from autopar.cli.terminal import given, print_told, refuse, show, tell, use_cpu_only
from autopar.errors import TargetError

if TYPE_CHECKING:
    from autopar.cost.hardware_profile import HardwareProfile
    from autopar.ir.mesh import MeshShape
    from autopar.pipeline.plan import AnyPlan, PipelinePlan
    from autopar.plans.plan import Plan

#: Options that say nothing of a mesh and a hardware.
_OF_PROGRAMS = ("target", *OF_PROGRAM, "html", "timeline")


def add_command(added: Any) -> None:
    """The command and its options; `added` takes parsers of commands."""
    about = "say what a plan does and why: of a saved plan, or of a target planned for this"
    explain = add_planning_command(added, "explain", about)
    about = "a target as for `plan`, or a saved plan"
    explain.add_argument("target", metavar="TARGET|PLAN.json", nargs="?", help=about)
    about = "instead of a plan: what an all-reduce costs by each algorithm, over each axis of the mesh"
    explain.add_argument("--collectives", action="store_true", help=about)
    explain.add_argument("--plot", metavar="FILE.png", help="with --collectives: draw it too (needs `autopar[plot]`)")
    about = "what the step would lose by the runner-up: of the array or the module at PATH, planned again with that; PATH may be a glob"
    explain.add_argument("--why", metavar="PATH", help=about)
    about = "with --why of a saved plan: the step that it is of"
    explain.add_argument("--of", metavar="TARGET", help=about)
    about = "of a plan of stages: explain the plan of stage N alone"
    explain.add_argument("--stage", type=int, metavar="N", help=about)
    about = "write a step for Perfetto, where the file ends in .json; of a plan of stages, else draw it as SVG"
    explain.add_argument("--timeline", metavar="FILE", help=about)
    about = "write it all as one page for a browser, which needs no network: time, memory, the model with its shards,"
    about += " decisions"
    explain.add_argument("--html", metavar="FILE", help=about)
    about = "with --html: what `autopar verify --json` wrote of this plan, to be shown beside the predictions"
    explain.add_argument("--verification", metavar="FILE", help=about)
    explain.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Explain a plan; or why it is as it is, or the collectives alone."""
    if options.collectives:
        _run_collectives(options)
        return
    if options.target is None or options.plot is not None:
        missing = "a TARGET or a saved plan" if options.target is None else "--collectives with --plot"
        raise TargetError(f"`autopar explain` needs {missing}; `autopar explain --collectives` prices all-reduces")
    if options.why is not None or options.of is not None:
        _run_why(options)
    else:
        _run_plan(options)


def _run_plan(options: argparse.Namespace) -> None:
    check_html(options)
    plan = _load_saved(options) if is_plan_file(options.target) else plan_target(options)
    from autopar.report.explain import explain, explain_json, render

    if options.timeline is not None:
        explain(plan).draw(options.timeline)
        print(f"drawn to {options.timeline}", file=sys.stderr)
    if options.stage is not None:
        plan = _stage(_staged(plan), options.stage)
    if options.html is not None:
        write_html(plan, options.html, options.verification)
    if options.json or options.html is None:
        tell(options, lambda: explain_json(plan), lambda console: render(plan, console))


def _run_why(options: argparse.Namespace) -> None:
    """Plan again with a runner-up, and say what that costs."""
    saved = is_plan_file(options.target)
    if options.why is None or saved != (options.of is not None):
        raise TargetError("--why PATH is of a TARGET, or of a saved plan with --of TARGET, which it was made for")
    if options.stages not in (None, 1) or options.timeline is not None or options.stage is not None:
        raise TargetError("--why is of a step that is one program: drop --stages, --stage and --timeline")
    more = _saved_options(options) if saved else _options_of_one_program(options)
    step, args = load_target(options.of or options.target)
    from autopar.comparison.why import why

    print_told(options, why(options.why, step, *args, **more))


def _saved_options(options: argparse.Namespace) -> dict[str, Any]:
    from autopar.comparison.plan_check import options_of
    from autopar.pipeline.plan import PipelinePlan

    plan = _load_saved(options)
    if isinstance(plan, PipelinePlan):
        raise TargetError("--why is of a plan of one program, and this one is of stages")
    use_cpu_only()
    return options_of(plan)


def _options_of_one_program(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in planning(options).items() if name not in ("cache", "stages", "schedule")}


def _load_saved(options: argparse.Namespace) -> AnyPlan:
    refuse_planning(options, options.target, "or explain a TARGET")
    from autopar.pipeline.plan_files import load_plan

    return load_plan(options.target)


def _staged(plan: AnyPlan) -> PipelinePlan:
    from autopar.pipeline.plan import PipelinePlan

    if isinstance(plan, PipelinePlan):
        return plan
    raise TargetError(
        f"the plan of `{plan.program.name}` is of one program, on mesh {plan.mesh.describe()}: --stage is of plans of"
        " stages, which `autopar plan --stages` makes"
    )


def _stage(plan: PipelinePlan, number: int) -> Plan:
    if 0 <= number < len(plan.stages):
        return plan.stages[number].plan
    raise TargetError(f"there is no stage {number}: the plan has stages 0 to {len(plan.stages) - 1}")


def _run_collectives(options: argparse.Namespace) -> None:
    from autopar.report.all_reduce_table import check_can_plot, plot_all_reduce, price_all_reduce, render_all_reduce

    refuse(given(options, _OF_PROGRAMS), "--collectives is about a mesh and a hardware, not about a program")
    if options.plot is not None:
        check_can_plot(options.plot)
    mesh, profile = _mesh_and_hardware(options)
    if options.plot is not None:
        plot_all_reduce(mesh, profile, options.plot)
    if options.json:
        axes = [asdict(axis) for axis in price_all_reduce(mesh, profile)]
        print(json.dumps({"mesh": mesh.describe(), "hardware": profile.name, "axes": axes}, indent=2))
    else:
        show(lambda console: render_all_reduce(mesh, profile, console))
    if options.plot is not None:
        print(f"Drawn into {options.plot}.", file=sys.stderr if options.json else sys.stdout)


def _mesh_and_hardware(options: argparse.Namespace) -> tuple[MeshShape, HardwareProfile]:
    """What was asked for; what was not, as it is here."""
    from autopar.cost import hardware_profile as hardware
    from autopar.ir.mesh import parse_mesh

    if options.hardware and (options.devices or options.mesh):
        devices = []
    else:
        import jax

        devices = jax.devices()
    mesh = parse_mesh(options.mesh or str(options.devices or len(devices)))
    return mesh, hardware.load(options.hardware or hardware.detect(devices[0].device_kind, devices[0].platform))
