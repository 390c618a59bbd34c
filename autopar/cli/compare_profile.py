"""`autopar compare-profile`: compare a plan with the JAX profile of a run of its step.

In: a saved plan, a profile. Out: predicted, replayed and measured time by module, phase and collective.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli import options as shared
from autopar.cli.files import plan_within
from autopar.cli.target import load_target
from autopar.cli.terminal import output, use_cpu_only

_EXAMPLES = """
compare-profile gpt.plan.json /tmp/profile
compare-profile gpt.plan.json /tmp/profile --hlo after_optimizations.txt
"""


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "compare a plan with a JAX profile of its step: predicted, replayed and measured time"
    command = shared.add_command(added, "compare-profile", about, _EXAMPLES)
    command.add_argument("plan", metavar="PLAN.json", help="the saved plan that the step ran by")
    about = "folder that `jax.profiler.trace` wrote, or an .xplane.pb file"
    command.add_argument("profile", metavar="PROFILE", help=about)
    about = "optimized HLO of the program that ran, as text (default: the profile's own)"
    command.add_argument("--hlo", metavar="FILE", help=about)
    about = "the step, file.py:function; it is compiled for the plan's GPUs where neither has the HLO"
    command.add_argument("--step", metavar="TARGET", help=about)
    about = "name of the HLO module, e.g. jit_run (default: the one with the most device time)"
    command.add_argument("--program", metavar="NAME", help=about)
    about = "replay rates: a device's name or a .toml file (default: those of the plan's hardware)"
    command.add_argument("--hardware", metavar="NAME", help=about)
    shared.add_json(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the comparison."""
    use_cpu_only()
    from autopar.pipeline.plan_files import load_plan
    from autopar.verification.compare_profile import compare_profile
    from autopar.verification.profile_comparison import render_comparison

    plan = load_plan(plan_within(options.plan))
    step = None if options.step is None else load_target(options.step)
    more = {"hlo": options.hlo, "step": step, "hardware": options.hardware, "program": options.program}
    found = compare_profile(plan, options.profile, **more)
    output(options, found.to_json, lambda console: render_comparison(found, console))
