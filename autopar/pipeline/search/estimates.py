"""Estimate a planned stage: seconds of each phase of a microbatch, and bytes.

In: the program of a stage as planned, and its device program.
Out: `StageCost`s, one for each price of activations stashed between the passes. The device program runs all phases in
one loop; here each phase is simulated by itself, because the pipeline runs it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autopar.ir.device_program import DeviceProgram, Op
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.search.residuals import Crossing, Crossings
from autopar.planner.candidate import Candidate
from autopar.xla_model.simulation import simulate
from autopar.xla_model.timeline import Timeline

#: The phases of a stage, in the order in which they run.
PHASES = ("forward", "backward", "weight", "update")


class StageFigures:
    """The figures of a planned stage.

    Args:
        layout: the layout of the planned trace.
        splits_backward: whether the backward pass has an input part and a weight part.
        separate: whether forward and backward pass are separate programs.
        together: as in `Crossings`.
        by_layer: as in `Layout.phases`.
    """

    def __init__(
        self,
        candidate: Candidate,
        layout: Layout,
        *,
        splits_backward: bool = False,
        separate: bool = True,
        together: Sequence[int] | None = None,
        by_layer: bool = False,
    ) -> None:
        self.candidate, self.layout, self.splits_backward = candidate, layout, splits_backward
        self.phases = layout.phases(splits_backward, by_layer=by_layer)
        self.crossings = Crossings(candidate, layout, self.phases, separate=separate, together=together)
        self.forward_s, self.backward_s, self.weight_s, self.update_s = map(self._seconds, PHASES)
        prediction = candidate.parts.prediction
        state = (
            prediction.parameter_bytes + prediction.optimizer_bytes + prediction.data_bytes + prediction.output_bytes
        )
        self.state_bytes = state + sum(size for _, size in self.held_by_node()) - self._transferred_bytes()

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

    def timeline(self, phase: str) -> Timeline | None:
        """A phase, simulated by itself; None if nothing runs in it."""
        device, start = self.candidate.parts.device, self.layout.loop.enter[0]
        ops = tuple(op for op in device.ops if self._phase_of(op) == phase)
        if not ops:
            return None
        loops = tuple(one for one in device.loops if one.start != start)
        f = self.candidate.formulation
        return simulate(DeviceProgram(ops, device.buffers, loops), f.mesh, f.profile)

    def held_by_node(self) -> Iterator[tuple[int, float]]:
        """The node and the bytes of each buffer that is held during the whole loop besides arguments and outputs."""
        device = self.candidate.parts.device
        held = self._before_loop() | self._accumulators()
        seen: set[int] = set()
        for op in device.ops:
            for b in op.writes:
                if b in held and b not in seen:
                    seen.add(b)
                    yield op.node, device.buffers[b].num_bytes

    def _phase_of(self, op: Op) -> str:
        if not self.layout.loop.enter[0] <= op.node < self.layout.loop.exit[1]:
            return "update"
        phase = self.phases.get(op.node, "")
        return "backward" if phase == "input" else phase

    def _seconds(self, phase: str) -> float:
        timeline = self.timeline(phase)
        return 0.0 if timeline is None else timeline.step_time_s

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

    def _before_loop(self) -> set[int]:
        """Buffers that are produced or gathered before the first microbatch and read by all."""
        device, loop = self.candidate.parts.device, self.layout.loop
        candidate = {b for op in device.ops if op.node < loop.enter[1] for b in op.writes}
        read = {b for op in device.ops if loop.enter[1] <= op.node < loop.exit[0] for b in op.reads}
        return {b for b in candidate & read if not device.buffers[b].argument} - self._accumulators()

    def _accumulators(self) -> set[int]:
        """Buffers of accumulators."""
        device, carries = self.candidate.parts.device, self.layout.carries
        found = {b for op in device.ops if op.node in carries for b in op.writes}
        return {b for b in found if not device.buffers[b].argument}
