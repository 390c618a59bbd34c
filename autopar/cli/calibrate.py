"""`autopar calibrate`: measure the devices of this machine, or read a JAX profile, and write a hardware profile.

In: a time budget and an output path, or a JAX profile. Out: files with the hardware profile and its samples, and a summary.
"""

from __future__ import annotations

import argparse
from typing import Any

from autopar.cli.options import seconds
from autopar.cli.terminal import given, progress, refuse, use_cpu_only


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "measure the devices of this machine, or read a profile of a run, and write a profile for --hardware"
    calibrate = added.add_parser("calibrate", help=about, description=about)
    where = "the profile, .toml; its samples go next to it as .json (default: calibrated/DEVICE-jaxVERSION.toml)"
    calibrate.add_argument("-o", "--output", metavar="FILE", help=where)
    calibrate.add_argument(
        "--seconds", type=seconds, default=None, metavar="S", help="how long to measure (default: 150)"
    )
    about = (
        "fit the constants to a JAX profile of a run on GPUs instead: its folder, or an .xplane.pb file; the rates of"
    )
    about += " the replay go to FILE.replay.toml"
    calibrate.add_argument("--from", dest="profile", metavar="PROFILE", help=about)
    about = "with --from: optimized HLO of the program that ran, as text (default: the profile's own)"
    calibrate.add_argument("--hlo", metavar="FILE", help=about)
    about = "with --from: name of the HLO module (default: the one with the most device time)"
    calibrate.add_argument("--program", metavar="NAME", help=about)
    about = "profile for what cannot be measured here, e.g. the network (default: that of the devices)"
    calibrate.add_argument("--base", metavar="NAME", help=about)
    calibrate.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure or read, and print the fits and where they are saved."""
    if options.profile is not None:
        refuse(given(options, ["seconds"]), "--from measures nothing")
        _from_profile(options)
        return
    refuse(given(options, ["hlo", "program"]), "without --from the devices of this machine are measured")
    from autopar.calibration.calibrate import DEFAULT_SECONDS, calibrate
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
