"""Build the explicit program of an assignment: insert every communication as an operation.

In: `Formulation` and the solver's choices. Out: `ExplicitProgram`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.cost.context_method import Context, context_of
from autopar.cost.resharding_paths import rows_from_next
from autopar.formulate.formulation import Formulation
from autopar.formulate.group_communication import sent_by
from autopar.ir.explicit_program import Array, Communicate, Compute, ExplicitProgram, Extend, HaloSlice, Operation
from autopar.ir.sharding import TensorSharding, replicated
from autopar.rules.control_flow import BORDERS
from autopar.rules.grouping import Group
from autopar.rules.strategies import Strategy


def explicit_program(f: Formulation, choices: Sequence[int]) -> ExplicitProgram:
    """Build the explicit program of an assignment.

    Args:
        choices: strategy of each decision.
    """
    return _Builder(f, choices).run()


class _Rows(NamedTuple):
    """Rows that devices exchange because padded parts begin elsewhere.

    Args:
        coarse, fine: the axes that split their dim into few and into many parts.
    """

    coarse: tuple[str, ...]
    fine: tuple[str, ...]
    num_bytes: float


class _Builder:
    def __init__(self, f: Formulation, choices: Sequence[int]) -> None:
        self.f, self.choices, self.graph = f, choices, f.graph
        self.arrays: list[Array] = []
        self.ops: list[Operation] = []
        self.made: dict[int, int] = {}
        self.current: dict[int, int] = {}  # value -> the array that is read without resharding
        self.moved: dict[Array, int] = {}  # -> position of the operation that produces it
        self.flow_of = {use: index for index, flow in enumerate(f.flows) for use in flow.uses}
        self.into_copy = {flow.target: i for i, flow in enumerate(f.flows) if f.decisions[flow.target].kind == "copy"}
        self.sharding: dict[int, TensorSharding] = {}
        self.halo_slices: dict[HaloSlice, Communicate] = {}
        self.extended: dict[int, list[Extend]] = defaultdict(list)  # node -> its halo exchanges
        self.after: dict[int, list[Communicate]] = defaultdict(
            list
        )  # node -> communications after it; `operand` is the value
        for index, (decision, chosen) in enumerate(zip(f.decisions, choices, strict=True)):
            if decision.kind == "group":
                self._add_group(index, f.groups[decision.group], decision.strategies[chosen])
        for value, (decision, shardings) in f.value_made.items():
            self.sharding[value] = shardings[choices[decision]]

    def run(self) -> ExplicitProgram:
        for value in (*self.graph.inputs, *self.graph.constants):
            self._define(value)
        ends = {loop.stop: loop.stacks for loop in self.graph.loops}
        stacks = {n for loop in self.graph.loops for n in loop.stacks}
        for n in range(len(self.graph.nodes)):
            for piece in ends.get(n, ()):  # stacked outputs leave a loop after its last iteration
                self._compute(piece)
            if n not in stacks:
                self._compute(n)
        outputs = self._outputs()
        return ExplicitProgram(tuple(self.choices), tuple(self.arrays), tuple(self.ops), self.made, outputs)

    def _add_group(self, index: int, group: Group, strategy: Strategy) -> None:
        """Record the shardings of a group's results and the group's own communications."""
        for define in group.defines:
            self.sharding[define.value] = strategy.sharding(define.dims, define.pending)
        context = context_of(group, strategy, self.graph, self.f.mesh, self.f.profile)
        if context is not None:
            self._add_context(index, context)
        for op in sent_by(group, strategy, self.graph, self.f.mesh):
            if isinstance(op, Communicate):
                self.after[op.node].append(replace(op, decisions=(index,)))
                continue
            self.extended[op.node].append(op)
            for halo_slice in op.slices:
                new = Communicate(
                    halo_slice.kind,
                    "halo",
                    op.node,
                    halo_slice.value,
                    None,
                    halo_slice.axes,
                    halo_slice.num_bytes,
                    op.num_times,
                )
                known = self.halo_slices.setdefault(halo_slice, new)  # XLA sends it once for all users
                self.halo_slices[halo_slice] = replace(known, decisions=(*known.decisions, index))

    def _add_context(self, index: int, context: Context) -> None:
        """Record the collectives of an attention whose tokens are split."""
        node = self.graph.nodes[context.node]
        for sent in context.sent:
            times = node.repeat * sent.num_times
            one = Communicate(
                sent.kind, "context", context.node, node.results[0], None, context.axes, sent.num_bytes, times
            )
            self.after[context.node].append(replace(one, decisions=(index,)))

    # -- operations --------------------------------------------------------------------------

    def _compute(self, n: int) -> None:
        node = self.graph.nodes[n]
        if node.primitive in BORDERS and not node.results:
            return
        operands = tuple(None if v is None else self._read(n, i, v) for i, v in enumerate(node.operands))
        for extend in self.extended.get(n, ()):
            for halo_slice in extend.slices:
                if (one := self.halo_slices.pop(halo_slice, None)) is not None:
                    self.ops.append(replace(one, operand=self.current[halo_slice.value]))
            self.ops.append(extend)
        for kind, axes, num_bytes, times in node.params.get("collectives", ()):
            one = Communicate(kind, "program", n, None, None, axes, num_bytes, times * node.repeat)
            self.ops.append(one)
        cause = "rematerialization" if node.rematerialized else "program"
        self.ops.append(Compute(n, operands, cause, node.repeat))
        for value in node.results:
            self._define(value)
        for one in self.after.get(n, ()):
            value, result = one.operand, None
            assert value is not None
            if one.cause == "reduction":
                self.sharding[value] = self.sharding[value].resolved()
                result = self._array(value, self.sharding[value])
            self.ops.append(replace(one, operand=self.made[value], result=result))
            if result is not None:
                self.current[value] = result

    def _array(self, value: int, sharding: TensorSharding) -> int:
        self.arrays.append(Array(value, sharding))
        return len(self.arrays) - 1

    def _define(self, value: int) -> None:
        rank = len(self.graph.values[value].shape)
        self.made[value] = self.current[value] = self._array(value, self.sharding.setdefault(value, replicated(rank)))

    def _read(self, n: int, index: int, value: int) -> int:
        """The array that a node reads, after any resharding."""
        flow = self.flow_of.get((n, index))
        return self.current[value] if flow is None else self._passed(flow, n)

    def _passed(self, index: int, n: int) -> int:
        """The array that a flow passes to node `n`, or to the outputs."""
        flow = self.f.flows[index]
        value, wanted = flow.value, flow.wanted[self.choices[flow.target]]
        array = self.current[value]
        if wanted == self.arrays[array].sharding:  # no resharding, so no shared copy either
            return array
        if flow.source in self.into_copy:
            shared = self.f.decisions[flow.source].shardings[self.choices[flow.source]]
            array = self._moved(array, shared, self.into_copy[flow.source], n)
        return self._moved(array, wanted, index, n)

    def _moved(self, array: int, wanted: TensorSharding, index: int, n: int) -> int:
        value, made = self.arrays[array].value, self.arrays[array].sharding
        flow, times = self.f.flows[index], self.graph.values[value].repeat
        kept = tuple(axis for axis in wanted.unreduced if axis in made.unreduced)
        for move in self.f.moves(value, made, wanted):
            to = Array(value, TensorSharding(move.result.dims, (*move.result.unreduced, *kept)))
            if to not in self.moved:
                before, kind, axes, num_bytes = self.arrays[array].sharding, move.kind, move.axes, move.num_bytes
                if kind == "cut" and (rows := self._rows_of_neighbour(value, before, to.sharding)):
                    kind, axes, num_bytes = "collective-permute", rows.coarse, rows.num_bytes
                if kind == "all-gather" and (rows := self._rows_of_neighbour(value, to.sharding, before)):
                    shifted = self._array(value, before)
                    one = Communicate(
                        "collective-permute", "reshard", n, array, shifted, rows.fine, rows.num_bytes, times
                    )
                    decisions = (flow.source, flow.target)
                    self.ops.append(replace(one, combinable=flow.combinable, flows=(index,), decisions=decisions))
                    array = shifted
                self.moved[to] = len(self.ops)
                result = self._array(value, to.sharding)
                one = Communicate(kind, "reshard", n, array, result, axes, num_bytes, times)
                by = self.f.registered_for(value, move, before, combinable=flow.combinable)
                merges = flow.combinable and not by  # XLA merges only its own collectives
                self.ops.append(replace(one, combinable=merges, is_inner=move.is_inner, by=by))
            at = self.moved[to]
            op = self.ops[at]
            assert isinstance(op, Communicate) and op.result is not None
            if index not in op.flows:
                decisions = dict.fromkeys((*op.decisions, flow.source, flow.target))
                self.ops[at] = replace(op, flows=(*op.flows, index), decisions=tuple(decisions))
            array = op.result
        return array

    def _rows_of_neighbour(self, value: int, coarse: TensorSharding, fine: TensorSharding) -> _Rows | None:
        """The rows that each device gets from the next one when a dim that is split is cut into more parts, or sends to it when
        such parts are gathered; None if there are none."""
        array, mesh = self.graph.values[value], self.f.mesh
        local = fine.local_shape(array.shape, mesh)
        for dim, (size, few, many) in enumerate(zip(array.shape, coarse.dims, fine.dims, strict=True)):
            if few and len(many) > len(few) and many[: len(few)] == few:
                parts = mesh.sizes(few)
                rest = math.prod(local[:dim]) * math.prod(local[dim + 1 :])
                if rows := rows_from_next(size, parts, mesh.sizes(many) // parts):
                    return _Rows(few, many, float(rows * rest * array.itemsize))
        return None

    def _outputs(self) -> tuple[int | None, ...]:
        renewed, end = dict(self.graph.carried), len(self.graph.nodes)
        flows: dict[int, int] = {}
        for index, flow in enumerate(self.f.flows):
            target = self.f.decisions[flow.target]
            if not flow.uses and target.kind != "copy":
                flows[target.position if target.kind == "output" else renewed[target.position]] = index
        return tuple(
            None if value is None else self._passed(flows[i], end) if i in flows else self.current[value]
            for i, value in enumerate(self.graph.outputs)
        )
