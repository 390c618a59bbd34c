"""Estimate a planned stage: seconds of each phase of a microbatch, and bytes.

In: the program of a stage as planned, and its device program.
Out: `StageCost`s, one for each price of activations stashed between the passes. The device program runs all phases in
one loop; here each phase is simulated by itself, because the pipeline runs it by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.device_program import DeviceProgram, Op
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.search.residuals import Crossing, Crossings
from autopar.planner.candidate import Candidate
from autopar.xla_model.simulation import simulate


class StageFigures:
    """The figures of a planned stage.

    Args:
        layout: the layout of the planned trace.
        splits_backward: whether the backward pass has an input part and a weight part.
        separate: whether forward and backward pass are separate programs.
    """

    def __init__(
        self, candidate: Candidate, layout: Layout, *, splits_backward: bool = False, separate: bool = True
    ) -> None:
        self.candidate, self.layout = candidate, layout
        self.phases = layout.phases(splits_backward)
        self.crossings = Crossings(candidate, layout, self.phases, separate=separate)
        inside, phase_of = range(layout.loop.enter[0], layout.loop.exit[1]), self.phases
        self.forward_s = self._seconds(lambda op: phase_of.get(op.node) == "forward")
        self.backward_s = self._seconds(lambda op: phase_of.get(op.node) in ("backward", "input"))
        self.weight_s = self._seconds(lambda op: phase_of.get(op.node) == "weight")
        self.update_s = self._seconds(lambda op: op.node not in inside)
        prediction = candidate.parts.prediction
        state = (
            prediction.parameter_bytes + prediction.optimizer_bytes + prediction.data_bytes + prediction.output_bytes
        )
        self.state_bytes = state + self._accumulator_bytes() + self._before_loop_bytes() - self._transferred_bytes()

    def cost(self, crossing: Crossing) -> StageCost:
        """The stage's cost, given the values that pass from the forward to the backward pass."""
        prediction, state = self.candidate.parts.prediction, self.state_bytes
        return StageCost(
            forward_s=self.forward_s + crossing.written_s,
            backward_s=self.backward_s + crossing.written_s + crossing.recompute_s,
            weight_s=self.weight_s,
            update_s=self.update_s,
            state_bytes=state,
            flight_bytes=crossing.num_bytes + self._stashed_input_bytes(lambda value: value in crossing.read),
            working_bytes=max(0.0, prediction.peak_bytes - state - self._passes_bytes()) + crossing.recompute_bytes,
        )

    # -- helpers -----------------------------------------------------------------------------

    def _seconds(self, wanted: Callable[[Op], bool]) -> float:
        device, start = self.candidate.parts.device, self.layout.loop.enter[0]
        ops = tuple(op for op in device.ops if wanted(op))
        if not ops:
            return 0.0
        loops = tuple(one for one in device.loops if one.start != start)
        f = self.candidate.formulation
        return simulate(DeviceProgram(ops, device.buffers, loops), f.mesh, f.profile).step_time_s

    def _transferred_bytes(self) -> float:
        """Bytes that are received from or sent to other stages; they exist once per microbatch."""
        layout = self.layout
        return sum(
            tensor.num_bytes
            for tensor, value in zip(self.candidate.parts.inputs, layout.trace.inputs, strict=True)
            if layout.inputs[value].kind in ("inside", "buffer")
        )

    def _stashed_input_bytes(self, is_kept: Callable[[int], bool]) -> float:
        """Bytes that arrive in the forward pass and that the backward pass reads."""
        layout, num_bytes = self.layout, 0.0
        read = {v for unit in layout.body if self.phases[unit.start] == "forward" for v in unit.operands}
        for tensor, value in zip(self.candidate.parts.inputs, layout.trace.inputs, strict=True):
            port = layout.inputs[value]
            if port.kind == "inside":
                inner = layout.takes_inside[port.value]
                num_bytes += tensor.num_bytes if inner in read and is_kept(inner) else 0.0
        return num_bytes

    def _passes_bytes(self) -> float:
        """Bytes at the peak of the fused program that live from the forward to the backward pass."""
        device, candidate, read = self.candidate.parts.device, set[int](), set[int]()
        for op in device.ops:
            phase = self.phases.get(op.node)
            if phase == "forward":
                candidate.update(op.writes)
            elif phase is not None:
                read.update(op.reads)
        return sum(device.buffers[b].num_bytes for b in candidate & read if not device.buffers[b].argument)

    def _before_loop_bytes(self) -> float:
        """Bytes that are produced or gathered before the first microbatch and read by all."""
        device, loop = self.candidate.parts.device, self.layout.loop
        candidate = {b for op in device.ops if op.node < loop.enter[1] for b in op.writes}
        read = {b for op in device.ops if loop.enter[1] <= op.node < loop.exit[0] for b in op.reads}
        kept = {b for op in device.ops if op.node in self.layout.carries for b in op.writes}
        return sum(device.buffers[b].num_bytes for b in candidate & read - kept if not device.buffers[b].argument)

    def _accumulator_bytes(self) -> float:
        """Bytes of accumulators."""
        device, carries = self.candidate.parts.device, self.layout.carries
        accumulators = {b for op in device.ops if op.node in carries for b in op.writes}
        return sum(device.buffers[b].num_bytes for b in accumulators if not device.buffers[b].argument)
