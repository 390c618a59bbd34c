"""Calibrate this machine: devices -> samples -> fits -> a hardware profile and its samples, in two files.

In: the devices of this process, a time budget. Out: a profile for `hardware=`, and its samples as JSON. The steps are
in `measure`, `fit` and `calibration`.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from autopar.calibration.calibration import Calibration, Machine, fit_all, write
from autopar.calibration.measure import measure
from autopar.calibration.probes import CPU_SIZES, GPU_SIZES, Sizes
from autopar.errors import HardwareError
from autopar.hardware.profile import HardwareProfile, detect, load
from autopar.version import __version__

#: Default time budget of a calibration.
DEFAULT_SECONDS = 150.0


def calibrate(
    output: str | os.PathLike[str] | None = None,
    *,
    seconds: float = DEFAULT_SECONDS,
    base: str | None = None,
    sizes: Sizes | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> tuple[Calibration, Path, Path]:
    """Measure the devices of this process, and write the profile and its samples.

    Args:
        output: path of the profile, `.toml`; the samples get the same path with `.json`. By default
            `calibrated/<device>-jax<version>.toml`.
        seconds: approximate time budget.
        base: name of the profile with the figures that cannot be measured; by default that of these devices.
        sizes: benchmark sizes; by default those for the platform.
        progress: callback with the current stage and the elapsed fraction of the time budget.

    Returns:
        The calibration, the profile's path and the samples' path.

    Raises:
        HardwareError: there is no base profile, or the output is not writable. Both are checked before the measurement.
    """
    device = jax.local_devices()[0]
    known = _base(base, device)
    path = _output(output, known.name if base is None else _slug(device.device_kind))
    command = f"autopar calibrate --seconds {seconds:g}{f' --base {base}' if base else ''}"
    calibration = calibrated(known, seconds, command=command, sizes=sizes, progress=progress)
    return calibration, *write(calibration, path)


def calibrated(
    base: HardwareProfile,
    seconds: float,
    *,
    command: str,
    sizes: Sizes | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Calibration:
    """Measure the devices of this process without writing files.

    Args:
        base: profile with the figures that cannot be measured.
        seconds: approximate time budget.
        command: command that reproduces the measurement, for the record.
        sizes, progress: as in `calibrate`.
    """
    devices = jax.local_devices()
    chosen = sizes or (CPU_SIZES if devices[0].platform == "cpu" else GPU_SIZES)
    machine = _machine(devices, command)
    samples, skipped = measure(devices, chosen, base, seconds, progress)
    return Calibration(machine, base, samples, fit_all(samples), tuple(asdict(each) for each in skipped))


def _base(name: str | None, device: Any) -> HardwareProfile:
    if name is not None:
        return load(name)
    try:
        return load(detect(device.device_kind, device.platform))
    except HardwareError as error:
        raise HardwareError(
            f"{error}. To calibrate a device of an unknown kind, pass --base NAME, the most similar profile; it supplies the"
            " figures that cannot be measured"
        ) from None


def _output(output: str | os.PathLike[str] | None, device: str) -> Path:
    """The path of the profile, checked for writability before the long measurement."""
    version = ".".join(jax.__version__.split(".")[:3])
    path = Path("calibrated", f"{device}-jax{version}.toml") if output is None else Path(output)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.suffix != ".toml" or path.is_dir() or not os.access(folder, os.W_OK):
        raise HardwareError(f"cannot write {str(path)!r}: give -o a .toml file in a writable folder")
    return path


def _machine(devices: list[Any], command: str) -> Machine:
    return Machine(
        device_kind=devices[0].device_kind,
        platform=devices[0].platform,
        num_devices=len(devices),
        host=f"{_processor()}, {os.cpu_count()} cores, {_load()}",
        versions={
            "autopar": __version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.version.__version__,
            "python": platform.python_version(),
        },
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=command,
    )


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def _load() -> str:
    """The load average before the measurement, since other work slows every sample."""
    return f"load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else "load unknown"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
