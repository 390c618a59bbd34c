"""`autopar estimate collectives`: price all-reduce by every algorithm over each axis of a mesh.

In: a mesh, a hardware profile. Out: a table or a plot of the seconds by formula and message by message, and the algorithm that
the back end uses.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.cli import options as shared
from autopar.cli.terminal import output

if TYPE_CHECKING:
    from autopar.hardware.profile import HardwareProfile
    from autopar.ir.mesh import MeshShape

_EXAMPLES = "estimate collectives --mesh 2x8 --hardware h100-sxm --plot all-reduce.png"


def add_command(added: Any) -> None:
    """Add the command to the parser of `estimate`."""
    about = "estimate an all-reduce by every algorithm over each axis of a mesh, and show which one the back end uses"
    command = shared.add_command(added, "collectives", about, _EXAMPLES)
    about = "time every message too, next to the formulas"
    command.add_argument("--messages", action="store_true", help=about)
    command.add_argument("--plot", metavar="FILE.png", help="draw it too (needs `autopar[plot]`)")
    shared.add_mesh_options(command)
    shared.add_json(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the table, and draw the plot."""
    from autopar.report.all_reduce_table import check_can_plot, plot_all_reduce, price_all_reduce, render_all_reduce

    if options.plot is not None:
        check_can_plot(options.plot)
    mesh, profile = _mesh_and_hardware(options)
    if options.plot is not None:
        plot_all_reduce(mesh, profile, options.plot)

    def to_json() -> dict[str, Any]:
        axes = [asdict(axis) for axis in price_all_reduce(mesh, profile, by_messages=options.messages)]
        return {"mesh": mesh.describe(), "hardware": profile.name, "axes": axes}

    output(options, to_json, lambda console: render_all_reduce(mesh, profile, console, by_messages=options.messages))
    if options.plot is not None:
        print(f"Drawn into {options.plot}.", file=sys.stderr if options.json else sys.stdout)


def _mesh_and_hardware(options: argparse.Namespace) -> tuple[MeshShape, HardwareProfile]:
    """The given mesh and hardware profile; by default those of the visible devices."""
    from autopar.hardware import profile as hardware
    from autopar.ir.mesh import parse_mesh

    if options.hardware and (options.devices or options.mesh):
        devices = []
    else:
        import jax

        devices = jax.devices()
    mesh = parse_mesh(options.mesh or str(options.devices or len(devices)))
    return mesh, hardware.load(options.hardware or hardware.detect(devices[0].device_kind, devices[0].platform))
