"""`autopar plan`: plan a step, print a summary, and save the plan.

In: a target. Out: a plan in a file, and its summary.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli import options as shared
from autopar.cli.files import check_output
from autopar.cli.planning import plan_target
from autopar.cli.terminal import print_json, show

_EXAMPLES = """
plan train.py:make --mesh 2x4 --hardware h100-sxm -o gpt.plan.json
plan my_package.train:make --devices 8 --memory-budget 40GB -o gpt.plan.json
plan train.py:make --devices 8 --pin 'state/params/*/kernel=P(None, "model")'
plan train.py:make --devices 64 --hardware h100-sxm --everything auto
plan train.py:make --devices 64 --stages auto --num-microbatches auto
plan train.py:make --devices 8 --stages 4 --consistency 2bw -o gpt.plan.json
plan train.py:make --devices 8 --stages 2 --mesh 2x2 --pin 'state/params/*/kernel=P(None, "model")'
plan train.py:evaluate --like gpt.plan.json
"""


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    plan = shared.add_command(added, "plan", "plan how to shard TARGET, print a summary, and save the plan", _EXAMPLES)
    plan.add_argument("target", metavar="TARGET", help="file.py:function or package.module:function")
    plan.add_argument("-o", "--output", metavar="FILE", help="plan file to write, e.g. gpt.plan.json")
    about = "write what each planner pass produces into this folder, as text: graph, problem, solution, timeline, ..."
    about = "a saved plan of another step: state that both steps have stays in its sharding, and on its stages"
    plan.add_argument("--like", metavar="PLAN.json", help=about)
    plan.add_argument("--dump", metavar="DIR", help=about)
    shared.add_mesh_options(plan, of_stages=True)
    shared.add_program_options(plan, chooses=True)
    shared.add_solver_options(plan)
    plan.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Plan the target, save the plan, and print its summary."""
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
