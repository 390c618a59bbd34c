"""What a planned stage takes: seconds of each phase of a microbatch, and bytes.

In: the program of a stage as it was planned, and its device's program. Out: `StageCost`. The device's program runs all
phases in one loop; here each is scheduled by itself, as it will run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.device_program import DeviceProgram, Op
from autopar.pipeline.extract import Port
from autopar.pipeline.partition_problem import StageCost
from autopar.pipeline.pieces import Layout
from autopar.timeline import simulate
from autopar.within_budget import Made


def stage_cost(made: Made, layout: Layout, *, splits_backward: bool = False) -> StageCost:
    """The price of a planned stage.

    Args:
        layout: of the trace that was planned.
        splits_backward: whether the backward pass runs in two parts.
    """
    device = made.parts.device
    loop = layout.loop
    inside = range(loop.enter[0], loop.exit[1])
    phase_of = layout.phases(splits_backward)

    def seconds(wanted: Callable[[Op], bool]) -> float:
        ops = tuple(op for op in device.ops if wanted(op))
        if not ops:
            return 0.0
        loops = tuple(one for one in device.loops if one.start != loop.enter[0])
        program = DeviceProgram(ops, device.buffers, loops)
        profile = replace(made.formulation.profile, xla_estimator=None)
        return simulate(program, made.formulation.mesh, profile).step_time_s

    flight = _flight_bytes(device, layout, phase_of)
    passing = sum(  # what comes from other stages, or is sent to them, is there once for each microbatch
        tensor.num_bytes
        for tensor, value in zip(made.parts.inputs, layout.trace.inputs, strict=True)
        if layout.inputs[value].kind in ("inside", "buffer")
    )
    arrives = sum(
        tensor.num_bytes
        for tensor, value in zip(made.parts.inputs, layout.trace.inputs, strict=True)
        if layout.inputs[value].kind == "inside" and _is_kept(layout, layout.inputs[value], phase_of)
    )
    told = made.parts.prediction
    state = told.parameter_bytes + told.optimizer_bytes + told.data_bytes + told.output_bytes - passing
    state += _accumulated(device, layout)
    return StageCost(
        forward_s=seconds(lambda op: phase_of.get(op.node) == "forward"),
        backward_s=seconds(lambda op: phase_of.get(op.node) in ("backward", "input")),
        weight_s=seconds(lambda op: phase_of.get(op.node) == "weight"),
        update_s=seconds(lambda op: op.node not in inside),
        state_bytes=state,
        flight_bytes=flight + arrives,
        working_bytes=max(0.0, told.peak_bytes - state - flight - arrives),
    )


def _flight_bytes(device: DeviceProgram, layout: Layout, phase_of: dict[int, str]) -> float:
    """What a microbatch leaves behind for its backward pass."""
    made: set[int] = set()
    read: set[int] = set()
    for op in device.ops:
        phase = phase_of.get(op.node)
        if phase == "forward":
            made.update(op.writes)
        elif phase is not None:
            read.update(op.reads)
    return sum(device.buffers[b].num_bytes for b in made & read if not device.buffers[b].argument)


def _is_kept(layout: Layout, port: Port, phase_of: dict[int, str]) -> bool:
    """Whether the backward pass reads what came for the forward pass."""
    value = layout.takes_inside[port.value]
    read = {phase_of.get(n) for n in range(*layout.loop.sections[0]) if value in layout.trace.equations[n].operands}
    return "forward" in read and len(read) > 1


def _accumulated(device: DeviceProgram, layout: Layout) -> float:
    """Bytes of what is summed up from microbatch to microbatch."""
    held = {b for op in device.ops if op.node in layout.carries for b in op.writes}
    return sum(device.buffers[b].num_bytes for b in held if not device.buffers[b].argument)
