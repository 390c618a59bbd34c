"""`autopar export`: write a plan as a Python file that needs JAX alone.

In: a saved plan, its target. Out: the file, or its text on standard output.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli.files import check_output
from autopar.cli.target import load_target
from autopar.cli.terminal import use_cpu_only


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "write a plan as plain JAX: a Python file that shards the step and needs no autopar"
    export = added.add_parser("export", help=about, description=about)
    export.add_argument("plan", metavar="PLAN.json", help="a saved plan")
    export.add_argument("target", metavar="TARGET", help="the target that the plan was made for")
    export.add_argument("-o", "--output", metavar="FILE.py", help="output file (default: standard output)")
    export.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the plan as code."""
    check_output(options)
    from autopar.pipeline.plan_files import load_plan

    plan = load_plan(options.plan)
    use_cpu_only()
    step, args = load_target(options.target)
    from autopar.code_export.export import export
    from autopar.plans.json_codec import write_text

    text = export(plan, step, *args)
    if options.output is None:
        print(text, end="")
        return
    write_text(text, options.output)
    print(f"Saved to {options.output}; it needs JAX alone.")
