"""Replay any lowered or compiled JAX program for a GPU that need not be there.

In: `jax.stages.Lowered`, `jax.stages.Compiled`, HLO text or its file; the name of a device. Out: `Replay`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from autopar.errors import VerifyError
from autopar.hardware.profile import HardwareProfile
from autopar.hardware.profile import load as load_profile
from autopar.jax_interop.compilation import compiled_platforms, lowered_for, module_bytes
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_compiler.hlo_text import parse_module, read_hlo_file
from autopar.xla_replay import rates
from autopar.xla_replay.device_prices import DevicePrices
from autopar.xla_replay.library_calls import LibraryCall
from autopar.xla_replay.program import replay_module
from autopar.xla_replay.replay import Replay

_LOWER = "lower it for one: jax.jit(f).trace(*args).lower(lowering_platforms=('cuda',))"


def replay(
    program: Any,
    *,
    hardware: str,
    devices_per_domain: int | None = None,
    num_hosts: int | None = None,
    unknown_trip_count: int = 1,
    custom_kernels: Mapping[str, LibraryCall] | None = None,
) -> Replay:
    """Estimate the step time of a compiled GPU program from the device's rates, without the planner's formulas.

    The program is replayed as XLA scheduled it: kernels in order, collectives and host copies on streams of their own,
    loops by their trip counts. An estimate by formulas, never a measurement; docs/replay.md states its errors.

    Args:
        program: `jax.stages.Lowered` for CUDA, which XLA then compiles for `hardware` in a worker process;
            `jax.stages.Compiled` of a GPU; or the optimized HLO as text, or the path of a file with it.
        hardware: name of a device in `cost_models/replay`, e.g. `h100-sxm`.
        devices_per_domain: devices that NVLink connects; by default as the hardware has it.
        num_hosts: number of hosts that a lowered program is compiled for; by default the fewest that hold its devices.
        unknown_trip_count: assumed trip count of a loop whose trip count XLA does not know.
        custom_kernels: target of a custom call, or a part of its name stack -> what one run of it computes on one device,
            where the HLO does not say, e.g. `{"my_kernel": LibraryKernel(flops=2e12)}` or an `Attention`.

    Raises:
        HardwareError: no rates for the hardware.
        VerifyError: the program is no scheduled HLO, or XLA cannot compile it.
    """
    found = rates.load(hardware)
    text = _text(program, hardware, num_hosts)
    prices = DevicePrices(found, devices_per_domain or found.domain_size, custom_kernels or {})
    return replay_module(parse_module(text), prices, unknown_trip_count=unknown_trip_count)


def _text(program: Any, hardware: str, num_hosts: int | None) -> str:
    if isinstance(program, Path) or (isinstance(program, str) and "\n" not in program):
        return read_hlo_file(Path(program))
    if isinstance(program, str):
        return program
    if isinstance(program, jax.stages.Lowered):
        return _compiled(program, load_profile(hardware), num_hosts)
    if isinstance(program, jax.stages.Compiled):
        if platforms := compiled_platforms(program) - {"cuda", "gpu"}:
            raise VerifyError(f"the program is compiled for {', '.join(platforms)}, not for a GPU; {_LOWER}")
        return program.as_text() or ""
    raise VerifyError(
        f"cannot replay a {type(program).__name__}: pass jax.jit(f).lower(...), its .compile(), or the text of the HLO"
    )


def _compiled(lowered: jax.stages.Lowered, profile: HardwareProfile, num_hosts: int | None) -> str:
    platforms, num_devices = lowered_for(lowered)
    if not {"cuda", "gpu"} & set(platforms):
        raise VerifyError(f"the program is lowered for {', '.join(platforms)}, not for a GPU; {_LOWER}")
    hosts = num_hosts or -(-num_devices // profile.devices_per_host)
    with Compiler(None) as compiler:
        return compiler.compile(module_bytes(lowered), profile, num_devices, hosts).hlo_text
