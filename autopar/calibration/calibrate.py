"""Measure this machine: devices -> samples -> fits -> a hardware profile, in two files.

In: the devices of this process and a number of seconds. Out: a profile that `hardware=` takes, and its samples as
JSON. The straight line over `measure`, `fit` and `calibration`.
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
from autopar.cost.hardware_profile import HardwareProfile, detect, load
from autopar.errors import HardwareError
from autopar.version import __version__

#: Seconds that a calibration takes unless told otherwise.
DEFAULT_SECONDS = 150.0


def calibrate(
    output: str | os.PathLike[str] | None = None,
    *,
    seconds: float = DEFAULT_SECONDS,
    base: str | None = None,
    sizes: Sizes | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> tuple[Calibration, Path, Path]:
    """Measure the devices of this process, and write what was found.

    Args:
        output: where the profile goes, `.toml`; the samples go beside it as `.json`. By default
            `calibrated/<device>-jax<version>.toml`.
        seconds: how long to measure, about.
        base: profile that states what cannot be measured here; by default the one of these devices.
        sizes: what to try; by default what suits the platform.
        progress: called with what is being timed and the fraction of the time that has gone.

    Returns:
        The calibration, the profile's path and the samples' path.

    Raises:
        HardwareError: no base, or nowhere to write to. Both are found before anything is measured.
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
    """Measure the devices of this process, and write nothing.

    Args:
        base: states what cannot be measured here. seconds: how long to measure, about.
        command: what a reader can run for the same. sizes, progress: as for `calibrate`.
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
            f"{error}. To calibrate a device of no known kind, pass --base NAME: the profile nearest to it, for what"
            " cannot be measured"
        ) from None


def _output(output: str | os.PathLike[str] | None, device: str) -> Path:
    """Where the profile goes; refused now rather than after minutes of measuring."""
    version = ".".join(jax.__version__.split(".")[:3])
    path = Path("calibrated", f"{device}-jax{version}.toml") if output is None else Path(output)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.suffix != ".toml" or path.is_dir() or not os.access(folder, os.W_OK):
        raise HardwareError(f"cannot write {str(path)!r}: give -o a .toml file in a folder that can be written to")
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
    """How busy the machine was before: other work is in every figure."""
    return f"load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else "load unknown"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
