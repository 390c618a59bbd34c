"""`autopar plan`: plan a step, print a summary, and save the plan.

In: a target, or what to search or to serve. Out: a plan in a file and in words; or a comparison.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli import compare, plan_inference, plan_search
from autopar.cli.files import check_output
from autopar.cli.options import add_planning_command
from autopar.cli.planning import plan_target
from autopar.cli.terminal import flags, given, print_json, show
from autopar.errors import TargetError


def add_command(added: Any) -> None:
    """The command and its options; `added` takes parsers of commands."""
    about = "plan a step, print a summary, and save the plan"
    plan = add_planning_command(added, "plan", about)
    about = "file.py:function or package.module:function; several with --compare"
    plan.add_argument("target", nargs="*", metavar="TARGET", help=about)
    plan.add_argument("-o", "--output", metavar="FILE", help="where the plan goes, e.g. gpt.plan.json")
    about = (
        "write what each pass of the planner made into this folder, as text: graph, problem, solution, timeline, ..."
    )
    plan.add_argument("--dump", metavar="DIR", help=about)
    about = "instead of a plan: on which of these hardware profiles a step fits, on one device and on how many at the"
    about += " least, of at most --devices (default: 1024)"
    about += (
        "; without names: on each kind of --hardware NAME,NAME,... and each of --devices N,N,...: time, memory, price"
    )
    plan.add_argument("--compare", metavar="NAME,NAME...", nargs="?", const="", help=about)
    plan.add_argument(
        "--plot", metavar="FILE", help="with --compare over --devices: draw it too (needs `autopar[plot]`)"
    )
    plan_search.add_options(plan)
    plan_inference.add_options(plan)
    plan.set_defaults(run=run)


def run(options: argparse.Namespace) -> int | None:
    """Plan what was asked for; of hardware beside hardware, the exit code says what came of it."""
    _check_kind(options)
    if options.plan_for == "search":
        return plan_search.run(options)
    if options.plan_for == "inference":
        return plan_inference.run(options)
    if options.compare == "":
        return compare.run_grid(options)
    if options.plot is not None:
        raise TargetError("--plot draws a comparison: add --compare --hardware NAME,... --devices N,..., or drop it")
    if options.compare is not None:
        return compare.run_compare(options)
    return _run_one(options)


def _check_kind(options: argparse.Namespace) -> None:
    """Refuse a plan of nothing, and options of the one kind with the other."""
    if options.dump is not None and (options.plan_for or options.compare is not None):
        raise TargetError("--dump writes what led to the plan of one step: drop it, or --for and --compare")
    of_search = given(options, plan_search.OWN, empty=True)
    of_inference = given(options, plan_inference.OWN, empty=True)
    if options.plan_for == "inference":
        plan_inference.check(options, [name for name in of_search if name != "batch"])
    elif options.plan_for == "search":
        plan_search.check(options, of_inference)
    elif of_search:
        raise TargetError(f"{flags(of_search)} say what to search: add --for search, or drop them")
    elif of_inference:
        raise TargetError(f"{flags(of_inference)} say what to serve: add --for inference, or drop them")
    elif not options.target:
        raise TargetError("`autopar plan` needs a TARGET, or --for search with --corpus NxD:DTYPE")


def _run_one(options: argparse.Namespace) -> None:
    if len(options.target) > 1:
        named = ", ".join(options.target)
        raise TargetError(
            f"{named}: `autopar plan` plans one target; give one, or compare them with --compare NAME,..."
        )
    (options.target,) = options.target
    check_output(options)
    plan = plan_target(options)
    from autopar.report.explain import explain_json, render_summary

    if options.output is not None:
        plan.save(options.output)
    if options.json:
        print_json(explain_json(plan))
        return
    show(lambda console: render_summary(plan, console))
    if options.output is None:
        print("\nThe plan was not saved: add -o FILE.")
    else:
        print(f"\nSaved to {options.output}; `autopar explain {options.output}` says why.")
