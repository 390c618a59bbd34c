"""Compare the measured time and memory of a pipelined step with its plan.

In: a pipeline plan, its program and hardware profiles, the times of calls. Out: `StepReport`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from autopar.api.call_clock import Calls
from autopar.api.measure_step import FAR_OFF, device_peak_bytes, model_flops, of_another_machine, wait
from autopar.api.step_report import StepReport
from autopar.hardware.profile import HardwareProfile
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.transforms.program import Program


def measure_stages(
    plan: PipelinePlan,
    program: Program,
    calls: Calls,
    devices: list[Any],
    profiles: Mapping[str, HardwareProfile],
    measured: PipelineTimeline | None,
    *,
    streams: bool = False,
) -> StepReport:
    """Report on steps that have run.

    Args:
        devices: the devices that ran the steps.
        profiles: the hardware profile of each kind of device.
        measured: the measured timeline of a step, if there is one.
        streams: whether the times are those of batches of a stream, after filling.
    """
    num_steps = calls.num_steps
    step_time_s, host_was_ahead = calls.step_time_s(wait)
    local_devices = [device for device in devices if device.process_index == jax.process_index()]
    peak_bytes = device_peak_bytes(local_devices)
    flops = model_flops(program.as_traced.graph)
    groups = [(group.num_devices, profiles[group.kind]) for group in plan.cluster.groups]
    ideal_s = sum(
        amount / sum(number * profile.peak_rate(dtype) for number, profile in groups) for dtype, amount in flops.items()
    )
    predicted = plan.prediction
    advice = []
    kinds = {kind.lower() for profile in profiles.values() for kind in profile.device_kinds}
    if devices[0].device_kind.lower() not in kinds:
        advice.append(of_another_machine(plan.hardware, devices[0].device_kind))
    if abs(predicted.step_time_s - step_time_s) > FAR_OFF * step_time_s:
        direction = "slower" if step_time_s > predicted.step_time_s else "faster"
        advice.append(
            f"a step is {direction} than predicted by more than {100 * FAR_OFF:.0f} %: measure these devices, `autopar"
            ' calibrate -o mine.toml`, and plan with `hardware="mine.toml"`: another profile may mean other stages'
        )
    return StepReport(
        program=plan.program.name,
        mesh=f"{len(plan.stages)} stages, {plan.schedule}, {plan.num_microbatches} microbatches",
        hardware=plan.hardware,
        device_kind=devices[0].device_kind,
        num_steps=num_steps,
        step_time_s=step_time_s,
        predicted_s=predicted.step_time_s,
        host_was_ahead=host_was_ahead,
        peak_bytes=peak_bytes,
        memory_from=None if peak_bytes is None else "devices",
        predicted_peak_bytes=predicted.peak_bytes,
        model_flops=sum(flops.values()),
        utilisation=ideal_s / step_time_s,
        suspects=(),
        advice=tuple(advice),
        versions=plan.weight_versions if streams else (),
        simulated=plan.shown_timeline() if streams else plan.timeline(),
        measured=measured,
    )
