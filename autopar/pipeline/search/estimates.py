"""Estimate a planned stage: seconds of each phase of a microbatch, and bytes.

In: the program of a stage as planned, and its device program.
Out: `StageCost`s, one for each price of activations stashed between the passes. The device program runs all phases in
one loop; here each phase is simulated by itself, because the pipeline runs it by itself. Reductions that the executor
defers until after the loop run once per step, in the update.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.ir.device_program import Buffer, DeviceProgram, Op
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.search.accumulated import accumulated_bytes
from autopar.pipeline.search.ops_in_pieces import OpsInPieces
from autopar.pipeline.search.repeated_reshards import phases_of
from autopar.pipeline.search.residuals import Crossing, Crossings
from autopar.planner.candidate import Candidate
from autopar.planner.collective_uses import collective_uses
from autopar.plans.records import CollectiveUse
from autopar.transforms.microbatch.units import Unit
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
        self.candidate, self.layout, self.separate = candidate, layout, separate
        self.splits_backward = splits_backward
        self.phases = layout.phases(splits_backward, by_layer=by_layer)
        self.crossings = Crossings(candidate, layout, self.phases, separate=separate, together=together)
        phase_of = self.phases
        self.pieces = OpsInPieces(candidate, layout, separate=separate)
        each, once = self.pieces.each_and_once()
        entering, buffers = set(range(*layout.loop.enter)), candidate.parts.device.buffers
        runs = phases_of(each, buffers, phase_of, entering) if separate else [_own_phase(op, phase_of) for op in each]
        self._runs = list(zip(each, runs, strict=True))
        #: The collectives that several pieces run, with their phases.
        self.repeated = [(op, of) for op, of in self._runs if op.collective and len(of) > 1]
        #: Buffers of values that pieces reshard for themselves.
        self._resharded = {b for op, of in self._runs if of and op.node in entering for b in op.writes}
        around = [op for op, of in self._runs if not of]
        before = [op for op in around if op.node < layout.loop.exit[0]]
        #: The operations of each phase, in the order of the program.
        self.ops = {
            "forward": self.ops_of("forward"),
            "backward": self.ops_of("backward", "input"),
            "weight": self.ops_of("weight"),
            "update": [*before, *once, *around[len(before) :]],
        }
        self._timelines: dict[str, Timeline | None] = {}
        prediction = candidate.parts.prediction
        state = (
            prediction.parameter_bytes + prediction.optimizer_bytes + prediction.data_bytes + prediction.output_bytes
        )
        self.accumulated = accumulated_bytes(self.pieces)
        self.state_bytes = state + sum(size for _, size in self.held_by_node()) - self._transferred_bytes()

    @property
    def forward_s(self) -> float:
        return self._seconds("forward")

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass, or of its input part."""
        return self._seconds("backward")

    @property
    def weight_s(self) -> float:
        return self._seconds("weight")

    @property
    def update_s(self) -> float:
        return self._seconds("update")

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
            kept_bytes=self.crossings.num_bytes(crossing.passing & self.read_last)
            + self._stashed_input_bytes(lambda value: value in crossing.read and value in self.read_last),
            passed_bytes=self.crossings.num_bytes(self.passed_on(crossing)),
            working_bytes=max(0.0, prediction.peak_bytes - state - self._passes_bytes()) + crossing.recompute_bytes,
            accumulated_bytes=sum(self.accumulated.values()),
            num_accumulated=len(self.accumulated),
        )

    def collectives(self) -> tuple[CollectiveUse, ...]:
        """The collectives of the plan as pieces run them: in the dtype that they send, deferred reductions once, and one
        that several phases repeat for each."""
        found, _ = collective_uses(
            self.candidate.formulation, self.pieces.explicit(), self.candidate.parts.device.reassociated
        )
        uses = list(found)
        equal: dict[tuple[str, tuple[str, ...], float], list[CollectiveUse]] = defaultdict(list)
        for use in uses:
            equal[use.kind, use.axes, use.num_bytes].append(use)
        for op, phases in self.repeated:
            if same := equal[op.collective, op.axes, op.payload_bytes]:
                use = same.pop(0)
                again = replace(use, cause=f"{use.cause}, again for its gradient", phase="backward")
                uses += [again] * (len(phases) - 1)
        return tuple(uses)

    @functools.cached_property
    def read_last(self) -> frozenset[int]:
        """Values that the weight part of the backward pass reads."""
        return frozenset(value for unit in self.units("weight") for value in unit.operands)

    @functools.cached_property
    def _made_before(self) -> frozenset[int]:
        """Values that the input part makes."""
        return frozenset(value for unit in self.units("input") for value in unit.results)

    def passed_on(self, crossing: Crossing) -> frozenset[int]:
        """Values that the input part makes, or rematerializes, for the weight part."""
        again = self.crossings.produced_forward - crossing.read
        return self.read_last & (self._made_before | again)

    def ops_of(self, *phases: str) -> list[Op]:
        """The operations of pieces of these phases in the loop, in the order of the program."""
        return [op for op, of in self._runs if not set(phases).isdisjoint(of)]

    def timeline_of(self, ops: Sequence[Op], buffers: Sequence[Buffer]) -> Timeline:
        """Operations, simulated as a piece."""
        loops = tuple(one for one in self.candidate.parts.device.loops if one.start != self.layout.loop.enter[0])
        f = self.candidate.formulation
        return simulate(DeviceProgram(tuple(ops), tuple(buffers), loops), f.mesh, f.profile)

    # -- helpers -----------------------------------------------------------------------------

    def units(self, phase: str) -> Iterator[Unit]:
        """The units that run in a phase."""
        return (unit for unit in self.layout.body if self.phases[unit.start] == phase)

    def timeline(self, phase: str) -> Timeline | None:
        """A phase, simulated by itself; None if nothing runs in it."""
        if phase not in self._timelines:
            ops, buffers = self.ops[phase], self.candidate.parts.device.buffers
            self._timelines[phase] = self.timeline_of(ops, buffers) if ops else None
        return self._timelines[phase]

    def held_by_node(self) -> Iterator[tuple[int, float]]:
        """The node and the bytes of each array that is held during the whole loop besides arguments and outputs. A deferred
        accumulator has the sharding of its terms."""
        device, carries = self.candidate.parts.device, self.layout.carries
        held = self._before_loop()
        held |= {
            b for op in device.ops if op.node in carries and op.node not in self.pieces.deferred for b in op.writes
        }
        seen: set[int] = set()
        for op in device.ops:
            for b in held.intersection(op.writes) - seen:
                seen.add(b)
                yield op.node, 0.0 if device.buffers[b].argument else device.buffers[b].num_bytes
        for enter, one in self.pieces.deferred.items():
            yield enter, self.pieces.deferred_bytes(one)
        yield from self.pieces.copied.items()

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
        carried = {b for op in device.ops if op.node in self.layout.carries for b in op.writes}
        return candidate & read - carried - self._resharded


def _own_phase(op: Op, phase_of: Mapping[int, str]) -> tuple[str, ...]:
    """The phase of an operation's node; empty outside the microbatch loop."""
    return (phase_of[op.node],) if op.node in phase_of else ()
