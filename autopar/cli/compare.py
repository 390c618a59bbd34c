"""`autopar compare`: compare hardware for a step: the fewest devices that fit, or time, memory and price by device count.

In: targets, hardware profiles, device counts. Out: tables, JSON or a plot; exit code 2 if a target could not be
planned, 130 if the user interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from autopar.cli import options as shared
from autopar.cli.planning import how_to_plan
from autopar.cli.target import load_target
from autopar.cli.terminal import output, progress, use_cpu_only
from autopar.errors import TargetError
from autopar.hardware.profile import known_names

if TYPE_CHECKING:
    from autopar.comparison.by_hardware import Compared, Comparison, GridComparison

_Found = TypeVar("_Found")


_EXAMPLES = """
compare small.py:make large.py:make --hardware v100-sxm-16,a100-sxm-40,h100-sxm
compare train.py:make --hardware h100-sxm,h200,b200 --devices 4,8,16,64 --plot gpus.svg
compare train.py:make --hardware h100-sxm --devices ..64 --plot devices.html
"""


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "compare hardware for each TARGET: the fewest devices that fit, or time, memory and price by device count"
    command = shared.add_command(added, "compare", about, _EXAMPLES)
    about = "file.py:function or package.module:function; may be several"
    command.add_argument("target", nargs="+", metavar="TARGET", help=about)
    about = f"hardware profiles to compare, of {', '.join(known_names())}, or paths of .toml files"
    command.add_argument("--hardware", required=True, metavar="NAME,NAME...", help=about)
    about = "plan each of these device counts, or 1, 2, 4, ... up to N (default: one device, and the fewest that fit)"
    command.add_argument("--devices", type=shared.device_counts, metavar="N,N...|..N", help=about)
    about = "without --devices: the most devices to try (default: 1024)"
    command.add_argument("--max-devices", type=shared.device_count, metavar="N", help=about)
    about = "with --devices: draw the comparison too: a page (.html), or a picture (needs `autopar[plot]`)"
    command.add_argument("--plot", metavar="FILE", help=about)
    shared.add_program_options(command, any_mesh=True)
    command.add_argument("--time-limit", type=shared.seconds, metavar="S", help="seconds for the solver, per problem")
    shared.add_json(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compare, and print the tables.

    Returns:
        The exit code: 2 where a target could not be planned, 130 where the user interrupted.

    Raises:
        TargetError: options exclude each other.
    """
    if "=" in options.hardware:
        raise TargetError(f"--hardware {options.hardware!r}: `compare` plans one kind at a time: give NAME,NAME,...")
    if options.devices is not None and options.max_devices is not None:
        raise TargetError("--devices gives the device counts, --max-devices a limit for finding the fewest: give one")
    if options.plot is not None and options.devices is None:
        raise TargetError("--plot draws time over device counts: add --devices N,N,..., or drop it")
    return _run_fewest(options) if options.devices is None else _run_grid(options)


def _run_fewest(options: argparse.Namespace) -> int:
    """Compare one device and the fewest devices that fit."""
    from autopar.comparison.by_hardware import MAX_DEVICES, compare, profiles_of
    from autopar.comparison.by_hardware_text import comparison_json, render_comparison

    profiles = profiles_of(options.hardware.split(","))
    found = _compared(options, partial(compare, profiles=profiles, max_devices=options.max_devices or MAX_DEVICES))
    output(options, lambda: comparison_json(found), lambda console: render_comparison(found, console))
    return _exit_code(found, found.compared)


def _run_grid(options: argparse.Namespace) -> int:
    """Compare every kind of device at every device count."""
    from autopar.comparison.by_hardware import compare_grid, profiles_of
    from autopar.comparison.by_hardware_plot import plot_grid
    from autopar.comparison.by_hardware_text import grid_json, render_grid
    from autopar.comparison.page import write_grid_page
    from autopar.report.all_reduce_table import check_can_plot
    from autopar.report.html.document import check_can_write

    path: str = options.plot or ""
    is_page = path.endswith(".html")
    if path:
        (check_can_write if is_page else check_can_plot)(path)
    profiles = profiles_of(options.hardware.split(","))
    found = _compared(options, partial(compare_grid, profiles=profiles, devices=options.devices))
    output(options, lambda: grid_json(found), lambda console: render_grid(found, console))
    if path:
        (write_grid_page if is_page else plot_grid)(found, path)
        print(f"Drawn into {path}.", file=sys.stderr if options.json else sys.stdout)
    return _exit_code(found, found.grids)


def _compared(options: argparse.Namespace, compare: Callable[..., _Found]) -> _Found:
    use_cpu_only()
    more = how_to_plan(options)
    if more.get("num_microbatches") == "auto":
        del more["num_microbatches"]  # the comparison takes the fewest that fit
    targets = {target: partial(load_target, target) for target in options.target}
    with progress() as report:
        return compare(targets, progress=report, **more)


def _exit_code(found: Comparison | GridComparison, targets: Iterable[Compared]) -> int:
    for one in targets:
        if one.error:
            print(f"autopar: {one.target}: {one.error}", file=sys.stderr)
    if found.interrupted:
        print("autopar: interrupted; the tables above show the plans made until then", file=sys.stderr)
        return 130
    return 2 if found.failed else 0
