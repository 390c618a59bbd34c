"""XLA's description of GPUs that are not there.

In: a hardware profile, how many devices on how many hosts. Out: the texts that XLA's compiler takes
for a GPU and for a topology; and a refusal where the compiler's wheels are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autopar.cost.hardware_profile import HardwareProfile
from autopar.errors import HardwareError, MeshError, VerifyError

#: Keys of a profile's `xla_target` that do not go into the device description as they are.
_PLACED_ELSEWHERE = ("source", "date", "platform_name", "dnn_version", "active_links")


def require_wheels() -> None:
    """Refuse to go on without the two CUDA wheels of this very JAX.

    Raises:
        VerifyError: with the command that installs them.
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
        "to compile for GPUs that are not there takes the wheels jax-cuda12-plugin and jax-cuda12-pjrt of the version"
        f" of jaxlib, {wanted}{f' ({has})' if has else ', which are not installed'}. No GPU, driver or CUDA is needed."
        f" Install them, some 180 MB, with:\n  {sys.executable} -m pip install 'jax-cuda12-plugin=={wanted}'"
    )


def topology_text(num_devices: int, num_hosts: int) -> str:
    """XLA's `slices x hosts x GPUs of a host`.

    Raises:
        MeshError: the devices cannot be spread evenly.

    >>> topology_text(16, 2)
    '1x2x8'
    """
    if num_hosts < 1 or num_devices % num_hosts:
        raise MeshError(
            f"{num_devices} devices cannot be spread evenly over {num_hosts} hosts: change --hosts or --mesh"
        )
    return f"1x{num_hosts}x{num_devices // num_hosts}"


def target_text(profile: HardwareProfile) -> str:
    """XLA's `GpuTargetConfigProto` as text.

    Raises:
        HardwareError: the profile has no `xla_target`.
    """
    target = profile.xla_target
    if target is None:
        raise HardwareError(
            f"hardware profile {profile.name!r} has no [xla_target], which tells XLA what GPU to compile for; choose a"
            " GPU's profile, e.g. hardware h100-sxm"
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
        # The compute capability. Its extension is a name of an enum, so it stands without quotes.
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
