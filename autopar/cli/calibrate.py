"""`autopar calibrate`: measure this machine's devices, and write a hardware profile.

In: a time budget and an output path. Out: files with the profile and its samples, and a summary.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli.options import seconds
from autopar.cli.terminal import progress


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "measure the devices of this machine, and write a hardware profile that --hardware takes"
    calibrate = added.add_parser("calibrate", help=about, description=about)
    where = "the profile, .toml; its samples go next to it as .json (default: calibrated/DEVICE-jaxVERSION.toml)"
    calibrate.add_argument("-o", "--output", metavar="FILE", help=where)
    calibrate.add_argument(
        "--seconds", type=seconds, default=150.0, metavar="S", help="how long to measure (default: 150)"
    )
    about = "profile for what cannot be measured here, e.g. the network (default: that of the devices)"
    calibrate.add_argument("--base", metavar="NAME", help=about)
    calibrate.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, and print the profile and where it is saved."""
    from autopar.calibration.calibrate import calibrate
    from autopar.calibration.calibration import describe

    with progress() as report:
        found, profile, samples = calibrate(options.output, seconds=options.seconds, base=options.base, progress=report)
    print(describe(found))
    print(f"\nSaved to {profile}, its samples to {samples}; use it as --hardware {profile}.")
