"""Compare the measured time and memory of a step with its plan, to detect a wrong hardware profile.

In: a plan, its program and profile, the times of calls, the devices. Out: `StepReport`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from autopar.api.call_clock import Calls
from autopar.api.step_report import StepReport, Suspect
from autopar.formulate.model_flops import model_flops
from autopar.hardware.profile import HardwareProfile, load
from autopar.ir.graph import Graph
from autopar.plans.plan import Plan
from autopar.runtime.jitted_step import JittedStep
from autopar.transforms.program import Program

#: A prediction whose error exceeds this part of the measured value suggests a wrong profile.
FAR_OFF = 0.30
#: The fewest steps for a median.
FEWEST_STEPS = 3
#: A part of the step is no suspect if it would need more than this multiple of its predicted time.
_MOST_FACTOR = 100.0


def measure(
    plan: Plan,
    program: Program,
    run: JittedStep,
    arguments: Sequence[Any],
    calls: Calls,
    mesh: Mesh,
    hardware: str | HardwareProfile | None,
) -> StepReport:
    """Report on steps that have run.

    Args:
        run: the prepared step that ran. arguments: the shapes of its first call.
        hardware: the plan's hardware profile, if it cannot be found by name.
    """
    num_steps = calls.num_steps
    step_time_s, host_was_ahead = calls.step_time_s(wait)
    peak_bytes, memory_from = _peak_bytes(run, arguments, mesh)
    return report_on(
        plan,
        program.as_traced.graph,
        hardware if isinstance(hardware, HardwareProfile) else load(hardware or plan.hardware),
        device_kind=mesh.devices.flat[0].device_kind,
        num_steps=num_steps,
        step_time_s=step_time_s,
        host_was_ahead=host_was_ahead,
        peak_bytes=peak_bytes,
        memory_from=memory_from,
    )


def wait() -> None:
    """Wait until the devices are idle, without a result of the step to wait for."""
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])


def _peak_bytes(
    run: JittedStep, arguments: Sequence[Any], mesh: Mesh
) -> tuple[float | None, Literal["devices", "compiled"] | None]:
    """The peak memory of a device of this process; if devices do not report it, the memory of XLA's program."""
    peak = device_peak_bytes([device for device in mesh.devices.flat if device.process_index == jax.process_index()])
    if peak is not None:
        return peak, "devices"
    sizes = run.compiled(arguments).memory_analysis()
    if sizes is None:
        return None, None
    held = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    return float(held - sizes.alias_size_in_bytes), "compiled"


def device_peak_bytes(devices: Sequence[Any]) -> float | None:
    """The peak memory of these devices; None if they do not report it."""
    stats = [device.memory_stats() for device in devices]
    peaks = [float(each["peak_bytes_in_use"]) for each in stats if each and "peak_bytes_in_use" in each]
    return max(peaks, default=None)


def report_on(
    plan: Plan,
    graph: Graph,
    profile: HardwareProfile,
    *,
    device_kind: str,
    num_steps: int,
    step_time_s: float,
    host_was_ahead: bool,
    peak_bytes: float | None,
    memory_from: Literal["devices", "compiled"] | None,
) -> StepReport:
    """Compare measurements with a plan.

    Args:
        graph: the graph of the step as written by the user. profile: the plan's hardware profile.
    """
    predicted = plan.prediction
    flops = model_flops(graph)
    ideal_s = sum(amount / profile.peak_rate(dtype) for dtype, amount in flops.items()) / plan.mesh.num_devices
    matrix_s = sum(amount / profile.matrix_rate(dtype) for dtype, amount in flops.items()) / plan.mesh.num_devices
    far = abs(predicted.step_time_s - step_time_s) > FAR_OFF * step_time_s
    suspects = (
        _suspects(plan, profile, step_time_s, matrix_s, max(flops, key=lambda one: flops[one], default=""))
        if far
        else ()
    )
    other_device = device_kind.lower() not in {kind.lower() for kind in profile.device_kinds}
    memory_far = peak_bytes is not None and abs(predicted.peak_bytes - peak_bytes) > FAR_OFF * peak_bytes
    return StepReport(
        program=plan.program.name,
        mesh=plan.mesh.describe(),
        hardware=profile.name,
        device_kind=device_kind,
        num_steps=num_steps,
        step_time_s=step_time_s,
        predicted_s=predicted.step_time_s,
        host_was_ahead=host_was_ahead,
        peak_bytes=peak_bytes,
        memory_from=memory_from,
        predicted_peak_bytes=predicted.peak_bytes,
        model_flops=sum(flops.values()),
        utilisation=ideal_s / step_time_s,
        suspects=suspects,
        advice=tuple(_advice(plan, profile, step_time_s, device_kind, suspects, other_device, memory_far, memory_from)),
    )


def _suspects(
    plan: Plan, profile: HardwareProfile, measured_s: float, matrix_s: float, dtype: str
) -> tuple[Suspect, ...]:
    predicted = plan.prediction
    exposed_s = sum(predicted.exposed_s.values())
    rates = f"compute_efficiency = {profile.compute_efficiency:g} of peak_flops_per_s.{dtype}"
    if 2 * matrix_s < predicted.compute_s or dtype not in profile.peak_flops_per_s:
        rates = f"hbm_bytes_per_s = {profile.hbm_bytes_per_s:.3g}"
    network = plan.mesh.num_devices > profile.devices_per_domain
    link, name = (profile.network_link, "network_link") if network else (profile.host_link, "host_link")
    links = f"{name}.bytes_per_s = {link.bytes_per_s:.3g}, collective_launch_s = {profile.collective_launch_s:.3g}"
    parts = [
        ("kernels", predicted.compute_s, measured_s - exposed_s, rates),
        ("collectives", exposed_s, measured_s - predicted.compute_s, links),
    ]
    found = [
        Suspect(part=part, predicted_s=seconds, factor=needed / seconds, check=check)
        for part, seconds, needed, check in parts
        if seconds > 0 and needed > 0 and needed / seconds <= _MOST_FACTOR
    ]
    return tuple(sorted(found, key=lambda one: abs(math.log(one.factor))))


def of_another_machine(hardware: str, device_kind: str) -> str:
    """The advice if a plan runs on other devices than it was made for."""
    return (
        f"the plan is for {hardware}, but runs on {device_kind!r}, which is another kind: its predictions are"
        " of another machine. Leave out `hardware`, or give the profile of these devices"
    )


def _advice(
    plan: Plan,
    profile: HardwareProfile,
    measured_s: float,
    device_kind: str,
    suspects: tuple[Suspect, ...],
    other_device: bool,
    memory_far: bool,
    memory_from: str | None,
) -> list[str]:
    advice = []
    far = abs(plan.prediction.step_time_s - measured_s) > FAR_OFF * measured_s
    if other_device:
        advice.append(of_another_machine(profile.name, device_kind))
    if far:
        slower = measured_s > plan.prediction.step_time_s
        direction = "slower" if slower else "faster"
        first = "First check that the step does not wait for its data: time the loop with the same batch. Then measure"
        advice.append(
            f"a step is {direction} than predicted by more than {100 * FAR_OFF:.0f} %. {first if slower else 'Measure'} these devices,"
            ' `autopar calibrate -o mine.toml`, and plan with `hardware="mine.toml"`: another profile may mean'
            " another plan"
        )
    if memory_far:
        subject = "a device held" if memory_from == "devices" else "XLA's program takes"
        advice.append(
            f"{subject} another amount of memory than predicted by more than {100 * FAR_OFF:.0f} %: what else lives on the"
            " devices (a second state, an evaluation) counts too; `autopar verify` holds the step alone against XLA's"
            " program"
        )
    return advice
