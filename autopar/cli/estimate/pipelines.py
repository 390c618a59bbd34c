"""`autopar estimate pipelines`: plan pipelines over nodes that survive failures, and show them after one.

In: a target, a number of nodes. Out: the pipelines and their stages on each node, before and after the failure of given nodes.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli import options as shared
from autopar.cli.planning import how_to_plan
from autopar.cli.target import load_target
from autopar.cli.terminal import output, progress, use_cpu_only

_EXAMPLES = """
estimate pipelines train.py:make --nodes 8 --survive 1 --num-microbatches 32 --hardware h100-sxm
estimate pipelines train.py:make --nodes 8 --survive 2 --fail 3,4 --num-microbatches 32 --hardware h100-sxm
"""


def add_command(added: Any) -> None:
    """Add the command to the parser of `estimate`."""
    about = "plan pipelines of TARGET over nodes that may fail, and show what runs after a failure"
    command = shared.add_command(added, "pipelines", about, _EXAMPLES)
    command.add_argument("target", metavar="TARGET", help="file.py:function or package.module:function")
    command.add_argument("--nodes", type=shared.device_count, required=True, metavar="N", help="number of nodes")
    about = "number of failures, of any nodes, that must leave every layer on some node (default: 1)"
    command.add_argument("--survive", type=int, default=1, metavar="F", help=about)
    about = "show the pipelines after the failure of these nodes: 3,5"
    command.add_argument("--fail", type=_nodes, default=(), metavar="NODES", help=about)
    about = "devices of a node (default: those of a host of the hardware profile)"
    command.add_argument("--devices-per-node", type=shared.device_count, metavar="N", help=about)
    about = "microbatches of the global batch, divided over the pipelines"
    command.add_argument("--num-microbatches", type=shared.count, required=True, metavar="N", help=about)
    command.add_argument("--hardware", metavar="NAME", help="hardware profile (default: the visible devices)")
    command.add_argument("--schedule", metavar="NAME", help="pipeline schedule (default: 1f1b)")
    shared.add_solver_options(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Plan the templates, let the nodes fail, and print."""
    if options.hardware:
        use_cpu_only()
    step, args = load_target(options.target)
    from autopar.api.pipeline_templates import plan_templates
    from autopar.report.templates import render_templates, templates_json

    with progress() as report:
        templates = plan_templates(
            step,
            *args,
            num_nodes=options.nodes,
            survive=options.survive,
            devices_per_node=options.devices_per_node,
            hardware=options.hardware,
            memory_budget_bytes=options.memory_budget,
            cache=options.cache or not options.no_cache,
            progress=report,
            **how_to_plan(options),
        )
    found = templates.after(options.fail) if options.fail else templates
    output(options, lambda: templates_json(found), lambda console: render_templates(found, console))


def _nodes(text: str) -> tuple[int, ...]:
    """Parse numbers of nodes, as `3,5`."""
    return tuple(int(part) for part in text.split(","))
