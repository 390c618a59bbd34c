"""Say what operations of a planned stage its pieces run, and how.

In: the program of a stage as planned for one program, and its device program.
Out: `OpsInPieces`. Pieces copy views of arguments, send some values in another dtype, and reduce most accumulators once per step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autopar.ir.device_program import Op
from autopar.ir.explicit_program import Communicate, ExplicitProgram, Operation
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.cut.deferred_reductions import DeferredReduction, deferred_reductions
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.search.sent_dtypes import Sent, in_sent_dtypes, sent_shares
from autopar.planner.candidate import Candidate
from autopar.rules.grouping import SMALL_SIZE


class OpsInPieces:
    """The operations of a planned stage as its pieces run them.

    Args:
        layout: the layout of the planned trace.
        separate: whether forward and backward pass are separate programs.

    Attributes:
        deferred: the accumulators whose reduction over devices waits until after the loop, by the equation that they enter
            by.
        sent_shares: see `sent_shares`.
        copied: bytes of views of arguments that pieces copy, by the equation that brings them into the loop.
    """

    def __init__(self, candidate: Candidate, layout: Layout, *, separate: bool) -> None:
        self.candidate, self.layout, self.separate = candidate, layout, separate
        assigned, mesh = _AssignedShardings(candidate), candidate.formulation.mesh
        self.deferred = deferred_reductions(layout, assigned, mesh) if separate else {}
        self.sent_shares = self._sent_shares() if separate else {}
        ops = candidate.parts.device.ops
        self.copied = {op.node: op.written_bytes for op in ops if separate and self._is_copy(op)}

    def each_and_once(self) -> tuple[list[Op], list[Op]]:
        """The operations that run with each microbatch or around the loop, and reductions that run once, after it."""
        pieces = (self._as_piece(op) for op in self.candidate.parts.device.ops)
        each, once = self._with_deferred(list(self._in_sent_dtypes(pieces)))
        return each + self._reductions_in_loop(), once

    def explicit(self) -> ExplicitProgram:
        """The explicit program in the dtypes that pieces send, with deferred reductions once per step."""
        explicit = in_sent_dtypes(self.candidate.parts.explicit, self.sent_shares)
        return replace(explicit, ops=tuple(map(self._as_deferred, explicit.ops)))

    def deferred_bytes(self, one: DeferredReduction, *, of_term: bool = False) -> float:
        """Bytes of an accumulator on a device, or of what a microbatch adds to it."""
        graph = self.candidate.formulation.graph
        value = self.layout.trace.equations[one.term[-1]].results[0] if of_term else one.carry
        tensor = graph.values[value]
        return one.sharding.local_size(tensor.shape, self.candidate.formulation.mesh) * tensor.itemsize

    # -- helpers -----------------------------------------------------------------------------

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
            share = sum(self.deferred_bytes(one) for one in of)
            if not of:
                each.append(op)
                continue
            totals = [self.layout.trace.equations[one.leave].operands[0] for one in of]
            sent = tuple(holds[total] for total in totals if isinstance(total, int) and total in holds)
            once.append(replace(op, reads=sent, writes=sent, payload_bytes=share))
            left = op.payload_bytes - sum(self.deferred_bytes(one, of_term=True) for one in of)
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
        return replace(op, num_bytes=self.deferred_bytes(one), num_times=times)

    @functools.cached_property
    def _sums(self) -> dict[int, DeferredReduction]:
        """The deferred reductions, by the values that each microbatch adds."""
        equations = self.layout.trace.equations
        return {v: one for one in self.deferred.values() for n in one.term for v in equations[n].results}


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
