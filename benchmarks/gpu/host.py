"""Describe the host of a measurement: GPUs, driver, versions. In: this process's devices. Out: a record."""

from __future__ import annotations

import datetime
import shutil
import subprocess
from typing import Any

import jax

from autopar.errors import HardwareError
from autopar.hardware.profile import detect
from benchmarks.machine import machine, versions


def host() -> dict[str, Any]:
    """Card and number of GPUs; driver, clocks and power as the driver reports them; versions, machine and date."""
    devices = jax.local_devices()
    return {
        "card": devices[0].device_kind,
        "platform": devices[0].platform,
        "num_devices": len(devices),
        "profile": profile_name(devices[0]),
        "driver": _driver(),
        "versions": versions(),
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def profile_name(device: Any) -> str | None:
    """The hardware profile of a device; None if autopar has none."""
    try:
        return detect(device.device_kind, device.platform)
    except HardwareError:
        return None


def _driver() -> dict[str, str]:
    """Driver figures of the first GPU; empty without an NVIDIA driver."""
    fields = ("driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit")
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = ran.stdout.splitlines()
    if ran.returncode or not lines:
        return {}
    return dict(zip(fields, (cell.strip() for cell in lines[0].split(",")), strict=False))
