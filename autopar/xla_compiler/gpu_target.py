"""Describe absent GPUs to XLA's compiler.

In: a hardware profile, the numbers of devices and hosts. Out: XLA's texts for a GPU target and a topology; an error
where the compiler's wheels are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
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


def gpus_per_host(num_devices: int, num_hosts: int) -> int:
    """The number of GPUs of each host.

    Raises:
        MeshError: the devices do not divide evenly among the hosts.
    """
    if num_hosts < 1 or num_devices % num_hosts:
        raise MeshError(f"{num_devices} devices do not divide evenly among {num_hosts} hosts: change --hosts or --mesh")
    return num_devices // num_hosts


def gpus_per_slice(profile: HardwareProfile, num_devices: int, num_hosts: int) -> int:
    """The number of GPUs of each slice, XLA's word for an NVLink domain.

    Raises:
        MeshError: the devices do not divide evenly among the hosts.
    """
    per_host = gpus_per_host(num_devices, num_hosts)
    return min(num_devices, replace(profile, devices_per_host=per_host).domain_in(num_devices))


def topology_text(profile: HardwareProfile, num_devices: int, num_hosts: int) -> str:
    """XLA's topology `slices x hosts per slice x GPUs per host`.

    XLA takes the GPUs of a slice for peers over NVLink: it generates its own all-reduce kernels for them, which do not
    run between domains.

    Raises:
        MeshError: the devices do not divide evenly among the hosts.

    >>> from autopar.hardware.profile import load
    >>> topology_text(load("h100-sxm"), 16, 2), topology_text(load("gb200-nvl72"), 16, 4)
    ('2x1x8', '1x4x4')
    """
    per_host, per_slice = gpus_per_host(num_devices, num_hosts), gpus_per_slice(profile, num_devices, num_hosts)
    return f"{num_devices // per_slice}x{per_slice // per_host}x{per_host}"


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
