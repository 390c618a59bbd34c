"""XLA's own compiler, run for GPUs that are not there.

In: a lowered step as bytes, a hardware profile, how many devices on how many hosts. Out:
`CompiledStep`: XLA's program as text, its memory, and how long XLA's scheduler thinks it takes. It
runs in a process of its own (`compile_absent`): XLA reads its flags once per process, its estimate
is only in its log, and JAX complains of the missing GPU unless told to use the CPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autopar.cost.hardware import HardwareProfile
from autopar.errors import HardwareError, MeshError, VerifyError

#: What XLA is told besides a user's own XLA_FLAGS. No autotuning, for it runs kernels; then no
#: split-K either, which autotuning would seldom choose and the estimator prices far too dear; the
#: scheduler that overlaps communication, with its analytical estimate of times.
FLAGS = (
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_experimental_force_split_k=1",
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_analytical_sol_latency_estimator=true",
)

#: Keys of a profile's `xla_target` that do not go into the device description as they are.
_PLACED_ELSEWHERE = ("source", "date", "platform_name", "dnn_version", "active_links")
_TIME = re.compile(r"\] (?:Wasted cycles for ([\w\- ]+)|(Total cycles)): ([\d.e+\-]+)$", re.M)
_LOG_LINE = re.compile(r"^[IWEF]\d{4} ")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """What XLA made of a step. Bytes are per device.

    Args:
        step_time_s: XLA's estimate; None where it made none.
        exposed_s: by collective kind, the part of it that no computation hides; above zero only.
        compile_s: what XLA took. process_s: what the process took, start and end included.
        flags: XLA_FLAGS it was compiled with.
    """

    argument_bytes: float
    temp_bytes: float
    output_bytes: float
    alias_bytes: float
    step_time_s: float | None
    exposed_s: dict[str, float]
    compile_s: float
    process_s: float
    flags: tuple[str, ...]
    hlo_text: str = field(repr=False)

    @property
    def peak_bytes(self) -> float:
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes


def compile_absent(module: bytes, profile: HardwareProfile, num_devices: int, num_hosts: int) -> CompiledStep:
    """Compile a step lowered for CUDA.

    Raises:
        VerifyError: the wheels are missing, or XLA refuses the program.
        HardwareError: the profile does not describe a GPU to XLA.
        MeshError: the devices cannot be spread evenly over the hosts.
    """
    require_wheels()
    flags = (*_own_flags(os.environ.get("XLA_FLAGS", "")), *FLAGS)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as name:
        folder = Path(name)
        (folder / "module").write_bytes(module)
        (folder / "target").write_text(target_text(profile), encoding="utf-8")
        (folder / "topology").write_text(topology_text(num_devices, num_hosts), encoding="utf-8")
        start = time.perf_counter()
        log = _run(folder, flags)
        memory = json.loads((folder / "memory").read_text(encoding="utf-8"))
        text = (folder / "program").read_text(encoding="utf-8")
    total, exposed = read_times(log)
    process_s = time.perf_counter() - start
    return CompiledStep(**memory, step_time_s=total, exposed_s=exposed, process_s=process_s, flags=flags, hlo_text=text)


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


def read_times(log: str) -> tuple[float | None, dict[str, float]]:
    """The last estimate in XLA's log, that of the whole step: seconds, and exposed seconds by kind.

    The scheduler says cycles and means microseconds.
    """
    exposed: dict[str, float] = {}
    total, last = None, {}
    for kind, _, number in _TIME.findall(log):
        if kind:
            exposed[kind] = float(number) * 1e-6
        else:
            total, last, exposed = float(number) * 1e-6, exposed, {}
    return total, {kind: seconds for kind, seconds in sorted(last.items()) if seconds > 0}


def _own_flags(text: str) -> list[str]:
    """A user's flags for a run, but those of the CPU and those that `FLAGS` sets."""
    ours = {flag.split("=")[0] for flag in FLAGS}
    passed_over = ("--xla_force_host_platform_device_count", "--xla_cpu_")
    return [f for f in text.split() if f.split("=")[0] not in ours and not f.startswith(passed_over)]


def _run(folder: Path, flags: tuple[str, ...]) -> str:
    """Run the compiler; its log."""
    package = str(Path(__file__).resolve().parent.parent)
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "TF_CPP_VMODULE": "latency_hiding_scheduler=2",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
    }
    log = folder / "log"
    with log.open("wb") as file:
        command = [sys.executable, "-m", "autopar.compile_absent", str(folder)]
        # A session of its own: Ctrl-C reaches this process alone, which then ends the compiler.
        child = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = child.wait()
        finally:
            child.kill()
            child.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    if code != 0:
        said = [line for line in text.splitlines() if line.strip() and not _LOG_LINE.match(line)]
        raise VerifyError(
            f"XLA could not compile the planned step (exit code {code}); its last words:\n  "
            + "\n  ".join(line[:500] for line in said[-6:])
        )
    return text


# -- XLA's description of a GPU --------------------------------------------------------------


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
