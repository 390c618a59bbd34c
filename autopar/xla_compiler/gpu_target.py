"""Describe absent GPUs to XLA's compiler.

In: a hardware profile, the numbers of devices and hosts. Out: XLA's texts for a GPU target and a topology; an error
where the compiler's wheels are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autopar.errors import HardwareError, MeshError, VerifyError
from autopar.hardware.profile import HardwareProfile

#: Keys of a profile's `xla_target` that are not fields of XLA's device description.
_PLACED_ELSEWHERE = ("source", "date", "platform_name", "dnn_version", "active_links")


def require_wheels() -> None:
    """Check that the two CUDA wheels of the installed JAX version are there.

    Raises:
        VerifyError: they are missing or of another version; the text has the command that installs them.
    """
    wanted = version("jaxlib")
    found = {}
    for cuda in ("cuda12", "cuda13"):
        try:
            found[cuda] = {version(f"jax-{cuda}-plugin"), version(f"jax-{cuda}-pjrt")}
        except PackageNotFoundError:
            continue
        if found[cuda] == {wanted}:
            return
    has = "; ".join(f"jax-{cuda} is {' and '.join(sorted(versions))}" for cuda, versions in found.items())
    raise VerifyError(
        "compiling for absent GPUs needs the wheels jax-cuda12-plugin and jax-cuda12-pjrt of the version of jaxlib,"
        f" {wanted}{f' ({has})' if has else ', which are not installed'}. No GPU, driver or CUDA is needed."
        f" Install them, about 180 MB, with:\n  {sys.executable} -m pip install 'jax-cuda12-plugin=={wanted}'"
    )


def topology_text(num_devices: int, num_hosts: int) -> str:
    """XLA's topology `slices x hosts x GPUs per host`.

    Raises:
        MeshError: the devices do not divide evenly among the hosts.

    >>> topology_text(16, 2)
    '1x2x8'
    """
    if num_hosts < 1 or num_devices % num_hosts:
        raise MeshError(f"{num_devices} devices do not divide evenly among {num_hosts} hosts: change --hosts or --mesh")
    return f"1x{num_hosts}x{num_devices // num_hosts}"


def target_text(profile: HardwareProfile) -> str:
    """XLA's `GpuTargetConfigProto` as text, from a profile.

    Raises:
        HardwareError: the profile has no `xla_target`.
    """
    target = profile.xla_target
    if target is None:
        raise HardwareError(
            f"hardware profile {profile.name!r} has no [xla_target], XLA's description of the GPU to compile for; choose"
            " a GPU's profile, e.g. hardware h100-sxm"
        )
    described = {key: value for key, value in target.items() if key not in _PLACED_ELSEWHERE}
    return "\n".join(
        [
            "gpu_device_info {",
            *(_field(key, value) for key, value in described.items()),
            f"device_interconnect_info {{ active_links: {target['active_links']} }}",
            "}",
            _field("platform_name", target["platform_name"]),
            _version("dnn_version_info", target["dnn_version"]),
            _version("runtime_version", target["runtime_version"]),
            _field("device_description_str", target["name"]),
        ]
    )


def _field(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        # The compute capability. Its extension is an enum value, so it has no quotes.
        return f"{key} {{ " + " ".join(f"{name}: {part}" for name, part in value.items()) + " }"
    if isinstance(value, list):
        return f"{key} {{ {' '.join(map(_rate, value))} }}"
    return f'{key}: "{value}"' if isinstance(value, str) else f"{key}: {value}"


def _rate(row: list[float]) -> str:
    dtype, clock, units, operations = row
    rate = f"clock_rate_ghz: {clock} units_per_core: {units} ops_per_clock: {operations}"
    return f"rate_infos {{ key: {dtype} value {{ {rate} }} }}"


def _version(key: str, text: str) -> str:
    major, minor, patch = text.split(".")
    return f"{key} {{ major: {major} minor: {minor} patch: {patch} }}"
