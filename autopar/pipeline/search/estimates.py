"""Estimate a planned stage: seconds of each phase of a microbatch, and bytes.

In: the program of a stage as planned, and its device program.
Out: `StageCost`s, one for each price of activations stashed between the passes. The device program runs all phases in
one loop; here each phase is simulated by itself, because the pipeline runs it by itself. Reductions that the executor
defers until after the loop run once per step, in the update.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.ir.device_program import Buffer, DeviceProgram, Op
from autopar.ir.explicit_program import Communicate, Operation
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.cut.deferred_reductions import DeferredReduction, deferred_reductions
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.partition.problem import StageCost
from autopar.pipeline.search.accumulated import accumulated_bytes
from autopar.pipeline.search.repeated_reshards import phases_of
from autopar.pipeline.search.residuals import Crossing, Crossings
from autopar.pipeline.search.sent_dtypes import Sent, in_sent_dtypes, sent_shares
from autopar.planner.candidate import Candidate
from autopar.planner.collective_uses import collective_uses
from autopar.plans.records import CollectiveUse
from autopar.rules.grouping import SMALL_SIZE
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
        #: The accumulators whose reduction over devices waits until after the loop, by the equation that they enter by.
        assigned, mesh = _AssignedShardings(candidate), candidate.formulation.mesh
        self.deferred = deferred_reductions(layout, assigned, mesh) if separate else {}
        self.sent_shares = self._sent_shares() if separate else {}
        #: Bytes of views of arguments that pieces copy, by the equation that brings them into the loop.
        ops = candidate.parts.device.ops
        self.copied = {op.node: op.written_bytes for op in ops if separate and self._is_copy(op)}
        each, once = self._with_deferred(list(self._in_sent_dtypes(self._as_piece(op) for op in ops)))
        each += self._reductions_in_loop()
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
        self.accumulated = accumulated_bytes(candidate, layout, self.deferred)
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
        explicit = in_sent_dtypes(self.candidate.parts.explicit, self.sent_shares)
        explicit = replace(explicit, ops=tuple(map(self._as_deferred, explicit.ops)))
        found, _ = collective_uses(self.candidate.formulation, explicit)
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
        held |= {b for op in device.ops if op.node in carries and op.node not in self.deferred for b in op.writes}
        seen: set[int] = set()
        for op in device.ops:
            for b in held.intersection(op.writes) - seen:
                seen.add(b)
                yield op.node, 0.0 if device.buffers[b].argument else device.buffers[b].num_bytes
        for enter, one in self.deferred.items():
            yield enter, self._deferred_bytes(one)
        yield from self.copied.items()

    def _seconds(self, phase: str) -> float:
        timeline = self.timeline(phase)
        return 0.0 if timeline is None else timeline.step_time_s

    def _is_copy(self, op: Op) -> bool:
        """Whether an operation brings a view of an argument into the loop, such as a batch in microbatches. Inside one
        program it is free; a piece returns the view as a new array."""
        trace, buffers = self.layout.trace, self.candidate.parts.device.buffers
        if op.kind != "border" or op.node not in self.layout.enters or not all(buffers[b].argument for b in op.writes):
            return False
        return trace.equations[op.node].operands[0] not in self.layout.inputs

    def _as_piece(self, op: Op) -> Op:
        """An operation as it runs in a piece."""
        is_copy = op.node in self.copied and op.kind == "border"
        return replace(op, kind="fusion", read_bytes=op.written_bytes) if is_copy else op

    def _sent_shares(self) -> dict[Sent, float]:
        """The collectives that send another dtype than the plan counts; see `sent_shares`."""
        equations, graph = self.layout.trace.equations, self.candidate.formulation.graph
        accumulators = {
            equations[one.leave].results[0]: graph.values[one.carry].itemsize for one in self.deferred.values()
        }
        return sent_shares(self.candidate.parts.explicit, graph, accumulators)

    def _in_sent_dtypes(self, ops: Iterable[Op]) -> Iterator[Op]:
        """The operations with what collectives send. Casts before a gather run on each device's part."""
        buffers, mesh = self.candidate.parts.device.buffers, self.candidate.formulation.mesh
        parts: dict[int, int] = {}  # a buffer that is gathered after the cast -> the parts
        for op in ops:
            of = [parts[b] for b in op.reads if b in parts]
            if of and len(of) == len(op.reads):
                op = replace(op, read_bytes=op.read_bytes / of[0], written_bytes=op.written_bytes / of[0])
            value = buffers[op.writes[0]].value if op.collective and op.writes and op.writes[0] >= 0 else -1
            share = self.sent_shares.get((value, op.collective, op.axes, op.payload_bytes), 1.0)
            if share < 1.0:
                parts |= dict.fromkeys(op.writes, mesh.sizes(op.axes))
            yield op if share == 1.0 else replace(op, payload_bytes=share * op.payload_bytes)

    def _reductions_in_loop(self) -> list[Op]:
        """All-reduces in every microbatch of accumulators that are planned unreduced, but that cannot wait."""
        explicit, graph = self.candidate.parts.explicit, self.candidate.formulation.graph
        found: list[Op] = []
        equations, producers = self.layout.trace.equations, self.layout.trace.producers
        for enter, leave in self.layout.carries.items() if self.separate else ():
            (carry,), total = equations[enter].results, equations[leave].operands[0]
            array = explicit.made.get(carry)
            sharding = None if array is None else explicit.arrays[array].sharding
            if enter in self.deferred or sharding is None or not sharding.unreduced or not isinstance(total, int):
                continue
            size = sharding.local_size(graph.values[carry].shape, self.candidate.formulation.mesh)
            num_bytes = size * graph.values[carry].itemsize
            found.append(
                Op(
                    kind="collective",
                    node=producers[total],
                    reads=(),
                    writes=(),
                    read_bytes=0.0,
                    written_bytes=0.0,
                    collective="all-reduce",
                    axes=tuple(sharding.unreduced),
                    payload_bytes=num_bytes,
                )
            )
        return found

    def _with_deferred(self, ops: Sequence[Op]) -> tuple[list[Op], list[Op]]:
        """The operations without the reductions that wait until after the loop, and these."""
        sums, buffers = self._sums, self.candidate.parts.device.buffers
        holds = dict[int, int]()  # value -> buffer
        for op in ops:
            holds.update({buffers[b].value: b for b in op.writes if b >= 0})
        each, once = list[Op](), list[Op]()
        for op in ops:
            of = [sums[v] for b in op.writes if b >= 0 and (v := buffers[b].value) in sums]
            of = [one for one in of if op.collective == "all-reduce" and set(op.axes) == set(one.axes)]
            share = sum(self._deferred_bytes(one) for one in of)
            if not of:
                each.append(op)
                continue
            totals = [self.layout.trace.equations[one.leave].operands[0] for one in of]
            sent = tuple(holds[total] for total in totals if isinstance(total, int) and total in holds)
            once.append(replace(op, reads=sent, writes=sent, payload_bytes=share))
            left = op.payload_bytes - sum(self._deferred_bytes(one, of_term=True) for one in of)
            if left > 0:  # combined with others
                each.append(replace(op, payload_bytes=left))
        return each, once

    def _as_deferred(self, op: Operation) -> Operation:
        """A reduction that waits until after the loop, as it runs there; other operations as they are."""
        if not isinstance(op, Communicate) or op.operand is None or op.collective != "all-reduce":
            return op
        value = self.candidate.parts.explicit.arrays[op.operand].value
        one = self._sums.get(value)
        if one is None or set(op.axes) != set(one.axes):
            return op
        times = op.num_times / self.candidate.formulation.graph.values[value].repeat
        return replace(op, num_bytes=self._deferred_bytes(one), num_times=times)

    @functools.cached_property
    def _sums(self) -> dict[int, DeferredReduction]:
        """The deferred reductions, by the values that each microbatch adds."""
        equations = self.layout.trace.equations
        return {v: one for one in self.deferred.values() for n in one.term for v in equations[n].results}

    def _deferred_bytes(self, one: DeferredReduction, *, of_term: bool = False) -> float:
        """Bytes of an accumulator on a device, or of what a microbatch adds to it."""
        graph = self.candidate.formulation.graph
        value = self.layout.trace.equations[one.term[-1]].results[0] if of_term else one.carry
        tensor = graph.values[value]
        return one.sharding.local_size(tensor.shape, self.candidate.formulation.mesh) * tensor.itemsize

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


class _AssignedShardings:
    """The shardings of a candidate's values; see `KnownShardings`."""

    def __init__(self, candidate: Candidate) -> None:
        self.explicit, self.sizes = candidate.parts.explicit, candidate.formulation.graph.values

    def of_operand(self, node: int, index: int, value: int) -> TensorSharding | None:
        array = self.explicit.reads.get((node, index))
        return self._known(value, array)

    def of_value(self, value: int) -> TensorSharding | None:
        return self._known(value, self.explicit.made.get(value))

    def _known(self, value: int, array: int | None) -> TensorSharding | None:
        """None for values too small to plan for, which constraints leave to XLA."""
        return None if array is None or self.sizes[value].size <= SMALL_SIZE else self.explicit.arrays[array].sharding
