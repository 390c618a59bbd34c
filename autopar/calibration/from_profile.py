"""Calibrate from the JAX profile of a run: fit the replay's rates and the planner's profile of the device.

In: a profile, the HLO of its program. Out: three files: a hardware profile for `--hardware`, its samples, and rates for
the replay that inherit from those of the device. Constants that the profile does not determine keep their values.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from autopar.calibration.calibration import Calibration, Machine, fit_all, profile_files, toml, write_files
from autopar.calibration.fit import Sample
from autopar.calibration.fit_rates import FEWEST, RatesFit, constant_of, fit_rates
from autopar.calibration.probes import ring
from autopar.calibration.profile_samples import KernelSample, kernel_gaps, kernel_samples
from autopar.cost.collectives import KINDS
from autopar.errors import HardwareError, ProfileFileError
from autopar.hardware.profile import detect
from autopar.hardware.profile import load as load_hardware
from autopar.version import __version__
from autopar.xla_compiler.hlo_collectives import groups_of
from autopar.xla_compiler.hlo_text import Module, parse_module, read_hlo_file
from autopar.xla_profile.profile import Profile
from autopar.xla_profile.read import read_profile, with_partitions
from autopar.xla_replay import rates as replay_rates
from autopar.xla_replay.rates import ReplayRates

#: Names of dtypes: the replay's, and those of hardware profiles.
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "s8": "int8",
    "f8": "float8",
}
#: Kernels bound by memory this many launches long show the bandwidth.
_LONG = 10.0


@dataclass(frozen=True, slots=True)
class ProfileCalibration:
    """What was fitted, and the files that hold it.

    Args:
        planner: the fit of the planner's profile.
        files: path of the replay's rates, then of the hardware profile and of its samples, unless nothing of it was fitted.
        notes: what was left out.
    """

    profile: Profile = field(repr=False)
    rates: RatesFit
    planner: Calibration
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def calibrate_from_profile(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    hlo: str | os.PathLike[str] | None = None,
    base: str | None = None,
    program: str | None = None,
) -> ProfileCalibration:
    """Fit constants to the kernels and collectives of a profile, and write them.

    Args:
        path: folder that `jax.profiler.trace` wrote, or an `.xplane.pb` file.
        output: path of the hardware profile, `.toml`; the samples get the same path with `.json`, the replay's rates with
            `.replay.toml`. Where no figure of the hardware profile is fitted, the rates are the only file. By default `calibrated/<device>-profile.toml`.
        hlo: file with the optimized HLO of the program, where the profile does not hold it.
        base: name of the device whose constants are kept where the profile does not determine them; by default that of
            the profile's devices.
        program: name of the HLO module; by default the one with the most device time.

    Raises:
        ProfileFileError: no profile of GPUs, no HLO, or too few samples for every constant. No file is written.
        HardwareError: no base, or the output cannot be written.
    """
    text = None if hlo is None else read_hlo_file(Path(hlo))
    profile = read_profile(path, program=program, hlo_text=text)
    if profile.platform != "gpu":
        raise ProfileFileError(
            f"the profile {os.fspath(path)!r} is of {profile.platform} devices; the replay has rates of GPUs. `autopar"
            " calibrate` without --from measures the devices of this machine"
        )
    if not profile.hlo_text:
        raise ProfileFileError(
            f"the profile {os.fspath(path)!r} does not hold the HLO of {profile.program!r}, which says what its kernels"
            " compute; pass --hlo FILE, XLA's dump `*after_optimizations.txt`"
        )
    name = base or _detected(profile)
    hardware = load_hardware(name)
    rates = replay_rates.load(hardware.rates_name)
    target = _target(output, f"{hardware.name}-profile")
    module = parse_module(with_partitions(profile.hlo_text, len(profile.devices)))
    samples, left_out = kernel_samples(profile, module, rates, rates.domain_size)
    fitted = fit_rates(samples, kernel_gaps(profile), rates, rates.domain_size)
    if not fitted.constants:
        reasons = "; ".join(f"{constant}: {why}" for constant, why in list(fitted.not_fitted.items())[:4])
        raise ProfileFileError(
            f"the profile {os.fspath(path)!r} determines no constant ({reasons}); record more steps, or a larger program"
        )
    command = f"autopar calibrate --from {os.fspath(path)}"
    replay_file = target.with_suffix(".replay.toml")
    base_profile = replace(hardware, replay_rates=replay_file.name)
    planner, few = _planner(profile, module, samples, rates, base_profile, command)
    source = f"`{command}`, {profile.num_steps} steps on {len(profile.devices)} x {profile.device_kind or 'GPU'}"
    files = {replay_file: toml(rates_table(fitted, hardware.rates_name, target.stem, source))}
    if planner.fits:
        files |= dict(reversed(profile_files(planner, target).items()))
    write_files(files)
    return ProfileCalibration(profile, fitted, planner, tuple(files), (*profile.notes, *left_out, *few))


def rates_table(fitted: RatesFit, base: str, name: str, source: str) -> dict[str, Any]:
    """The fitted rates as the tables of a file that inherits from the base."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    table: dict[str, Any] = {"name": name, "inherits": base.removesuffix(".toml")}
    for one in fitted.constants:
        block, *dtype, key = one.name.split(".")
        part = table.setdefault(block, {"source": "", "date": date})
        if dtype:
            part = part.setdefault(dtype[0], {})
        keys = (key, "sustained_share") if dtype and key == "efficiency" else (key,)
        part |= {name: float(f"{constant_of(fitted.rates, (block, *dtype, name)):.4g}") for name in keys}
    for block, part in table.items():
        if isinstance(part, dict):
            names = [one.name.removeprefix(f"{block}.") for one in fitted.constants if one.name.startswith(f"{block}.")]
            part["source"] = f"{', '.join(names)}: fitted by {source}; the rest: as in `{base}`"
    return table


def describe(found: ProfileCalibration) -> str:
    """The fit as text: constants, errors before and after, what was not fitted and why."""
    lines = ["Constants of the replay", ""]
    for group in found.rates.groups:
        lines.append(f"  {group.group}: {group.num_samples} samples{_errors(group.error_before, group.error_after)}")
        lines += [f"    {one.name:28} {one.before:.4g} -> {one.after:.4g}" for one in group.constants]
    if found.rates.not_fitted:
        lines += ["", "Not fitted", ""]
        lines += [f"  {name}: {why}" for name, why in found.rates.not_fitted.items()]
    lines += ["", "Fits of the planner's profile", ""]
    lines += [f"  {one.group}: {one.num_samples} samples" for one in found.planner.fits] or ["  none: too few samples"]
    if found.notes:
        lines += ["", "Notes", "", *(f"  - {note}" for note in found.notes)]
    return "\n".join(lines)


def _errors(before: float, after: float) -> str:
    if math.isnan(before):
        return ""
    return f", held-out error {before:.1%} before, {after:.1%} after"


def _detected(profile: Profile) -> str:
    try:
        return detect(profile.device_kind, "gpu")
    except HardwareError as error:
        raise HardwareError(f"{error}. Pass --base NAME, the most similar device") from None


def _target(output: str | os.PathLike[str] | None, name: str) -> Path:
    path = Path("calibrated", f"{name}.toml") if output is None else Path(output)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.suffix != ".toml" or path.is_dir() or not os.access(folder, os.W_OK):
        raise HardwareError(f"cannot write {str(path)!r}: give -o a .toml file in a writable folder")
    return path


# -- the planner's profile -----------------------------------------------------------------------


def _planner(
    profile: Profile,
    module: Module,
    samples: tuple[KernelSample, ...],
    rates: ReplayRates,
    hardware: Any,
    command: str,
) -> tuple[Calibration, tuple[str, ...]]:
    """The fits of the planner's cost model to the same samples; groups of too few samples are left out."""
    by_group: dict[str, list[Sample]] = {}
    for one in samples:
        group, counts = _counts(one, module, rates)
        if group:
            by_group.setdefault(group, []).append(Sample(group, one.name, counts, one.measured_s))
    enough = [sample for members in by_group.values() if len(members) >= FEWEST for sample in members]
    few = tuple(
        f"too few samples of the planner's {group}: {len(members)} of at least {FEWEST}"
        for group, members in by_group.items()
        if len(members) < FEWEST
    )
    machine = Machine(
        device_kind=profile.device_kind or hardware.name,
        platform="gpu",
        num_devices=len(profile.devices),
        host=f"profile of {profile.num_steps} steps of {profile.program}",
        versions={"autopar": __version__, "jax": jax.__version__},
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=command,
    )
    return Calibration(machine, hardware, tuple(enough), fit_all(enough)), few


def _counts(one: KernelSample, module: Module, rates: ReplayRates) -> tuple[str, Mapping[str, float]]:
    """The group and the counts of a sample in the planner's fits; an empty group where it has none."""
    if one.kind == "gemm":
        operand = one.instruction.operands[0]
        dtype = one.computation.shape_of(operand).leaves[0].dtype
        name = _DTYPES.get("f8" if dtype.startswith("f8") else dtype, "")
        return (f"matmul {name}" if name else ""), {"launch": 1.0, "flops": one.flops, "bytes": one.num_bytes}
    if one.kind in KINDS and one.link == "nvlink":
        groups = groups_of(one.instruction)[1]
        size = len(groups[0]) if groups else module.num_partitions
        payload = sum(one.computation.shape_of(operand).num_bytes for operand in one.instruction.operands)
        hops, moved = ring(one.kind, size, payload * size if one.kind == "all-gather" else payload)
        return one.kind, {"launch": 1.0, "hops": hops, "bytes": moved}
    if not one.link and one.kind == "fusion" and one.measured_s > _LONG * rates.kernels.launch_s:
        return "memory", {"flops": 0.0, "bytes": one.num_bytes}
    return "", {}
