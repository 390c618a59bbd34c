"""`autopar calibrate`: measure the devices of this machine, and write a hardware profile.

In: a time limit, an output file. Out: the profile, its samples, and a summary.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli.options import seconds
from autopar.cli.terminal import given, progress, refuse, use_cpu_only


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "measure the devices of this machine, and write a hardware profile that --hardware takes"
    calibrate = added.add_parser("calibrate", help=about, description=about)
    about = "the profile, .toml; its samples go next to it as .json (default: calibrated/DEVICE-jaxVERSION.toml)"
    calibrate.add_argument("-o", "--output", metavar="FILE", help=about)
    calibrate.add_argument("--seconds", type=seconds, default=150.0, metavar="S", help="time to measure (default: 150)")
    about = "profile with the values that cannot be measured here, e.g. the network (default: that of the devices)"
    calibrate.add_argument("--base", metavar="NAME", help=about)
    calibrate.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure the devices, and print a summary and the path of the profile."""
    from autopar.calibration.calibrate import calibrate
    from autopar.calibration.calibration import describe

    budget = options.seconds or DEFAULT_SECONDS
    with progress() as report:
        found, profile, samples = calibrate(options.output, seconds=budget, base=options.base, progress=report)
    print(describe(found))
    print(f"\nSaved to {profile}, its samples to {samples}; use it as --hardware {profile}.")


def _from_profile(options: argparse.Namespace) -> None:
    use_cpu_only()
    from autopar.calibration.from_profile import calibrate_from_profile, describe

    more = {"hlo": options.hlo, "base": options.base, "program": options.program}
    found = calibrate_from_profile(options.profile, options.output, **more)
    rates, *planner = found.files
    print(describe(found))
    print(f"\nThe rates of the replay are saved to {rates}.")
    if planner:
        print(f"The planner's profile is saved to {planner[0]}, its samples to {planner[1]}.")
