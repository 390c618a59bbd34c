"""`autopar diagnose`: find the unintended collectives of a step sharded by hand, and the changes that help most.

In: a target whose step is jitted with shardings. Out: the collectives, their cost, and changes; exit code 1 where the step has
unintended collectives.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli import options as shared
from autopar.cli.files import check_output
from autopar.cli.target import load_target
from autopar.cli.terminal import output, progress, use_cpu_only


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "find the unintended collectives of TARGET, a step sharded by hand, and the few changes that help most"
    examples = "diagnose train.py:make_sharded --hardware h100-sxm"
    diagnose = shared.add_command(added, "diagnose", about, examples)
    about = "file.py:function or package.module:function, whose step is jitted with shardings"
    diagnose.add_argument("target", metavar="TARGET", help=about)
    about = "number of hosts that the GPUs are on (default: as few as possible)"
    diagnose.add_argument("--hosts", type=shared.device_count, metavar="N", help=about)
    diagnose.add_argument("--no-check", action="store_true", help="predict the changes without compiling them")
    diagnose.add_argument("-o", "--output", metavar="FILE", help="save the plan with all changes")
    shared.add_mesh_options(diagnose)
    shared.add_solver_options(diagnose, keeps_plans=False)
    diagnose.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Diagnose the step. The exit code is 1 where it has unintended collectives."""
    check_output(options)
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
            found = diagnose(step, *args, compiler=compiler, progress=report, **more)
    if options.output is not None:
        found.changed.save(options.output)
    output(options, found.to_json, lambda console: render_diagnosis(found, console))
    if options.output is not None and not options.json:
        print(f"\nThe plan with all changes is saved to {options.output}.")
    return 1 if found.unintended else 0
