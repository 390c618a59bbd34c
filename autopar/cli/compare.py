"""`autopar plan --compare`: on which hardware a step fits, and how fast it is there.

In: targets and names of hardware profiles; without names, `--hardware` and `--devices`. Out: a table or JSON, and an exit
code: 2 where a target could not be planned, 130 where the user had seen enough.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from autopar.cli.planning import how_to_plan
from autopar.cli.target import load_target
from autopar.cli.terminal import given, progress, refuse, tell, use_cpu_only
from autopar.errors import TargetError

if TYPE_CHECKING:
    from autopar.comparison.by_hardware import Compared, Comparison, GridComparison

_Told = TypeVar("_Told")


def run_compare(options: argparse.Namespace) -> int:
    """Hardware beside hardware, on one device and on as few as fit.

    Raises:
        TargetError: options that say nothing here.
    """
    no_use = ("mesh", "hardware", "memory_budget", "pin", "output", "stages", "schedule")
    why = f"--compare {options.compare} plans for many meshes, each on the memory of its hardware, and saves none"
    refuse(given(options, no_use), why, ", or drop --compare")
    from autopar.comparison.by_hardware import MAX_DEVICES, compare, profiles_of
    from autopar.comparison.by_hardware_text import comparison_json, render_comparison

    profiles = profiles_of(options.compare.split(","))
    told = _compared(options, partial(compare, profiles=profiles, max_devices=options.devices or MAX_DEVICES))
    tell(options, lambda: comparison_json(told), lambda console: render_comparison(told, console))
    return _exit_code(told, told.compared)


def run_grid(options: argparse.Namespace) -> int:
    """Kinds by numbers of devices.

    Raises:
        TargetError: options that say nothing here, or no kinds or numbers.
    """
    _check_grid(options)
    from autopar.comparison.by_hardware import compare_grid, profiles_of
    from autopar.comparison.by_hardware_plot import plot_grid
    from autopar.comparison.by_hardware_text import grid_json, render_grid
    from autopar.report.all_reduce_table import check_can_plot

    if options.plot is not None:
        check_can_plot(options.plot)
    profiles = profiles_of(options.hardware.split(","))
    devices = options.devices if isinstance(options.devices, tuple) else (options.devices,)
    told = _compared(options, partial(compare_grid, profiles=profiles, devices=devices))
    tell(options, lambda: grid_json(told), lambda console: render_grid(told, console))
    if options.plot is not None:
        plot_grid(told, options.plot)
        print(f"Drawn into {options.plot}.", file=sys.stderr if options.json else sys.stdout)
    return _exit_code(told, told.grids)


def _check_grid(options: argparse.Namespace) -> None:
    why = "--compare plans each kind of device and each number of them, and saves no plan"
    refuse(given(options, ("mesh", "memory_budget", "pin", "output", "stages", "schedule")), why)
    if not options.hardware or not options.devices or "=" in options.hardware:
        raise TargetError(f"{why}: give --hardware NAME,NAME,... and --devices N,N,..., or --compare NAME,...")


def _compared(options: argparse.Namespace, compare: Callable[..., _Told]) -> _Told:
    use_cpu_only()
    more = how_to_plan(options)
    if more.get("num_microbatches") == "auto":
        del more["num_microbatches"]  # as few as fit
    targets = {target: partial(load_target, target) for target in options.target}
    with progress() as report:
        return compare(targets, progress=report, **more)


def _exit_code(told: Comparison | GridComparison, targets: Iterable[Compared]) -> int:
    for one in targets:
        if one.error:
            print(f"autopar: {one.target}: {one.error}", file=sys.stderr)
    if told.interrupted:
        print("autopar: interrupted; above is what was found until then", file=sys.stderr)
        return 130
    return 2 if told.failed else 0
