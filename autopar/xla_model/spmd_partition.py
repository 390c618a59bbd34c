"""Partition the planned step into the program of one device, as XLA's SPMD partitioner does.

In: a formulation, an explicit program. Out: `LocalProgram`: instructions in program order, about one per equation of
the step (`xla_model/fusion_pipeline.py` fuses them into kernels). Source: openxla/xla,
xla/service/spmd/spmd_partitioner.cc.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.formulate.formulation import Formulation
from autopar.ir.device_program import Gemm
from autopar.ir.explicit_program import ExplicitProgram
from autopar.ir.graph import Node
from autopar.rules.control_flow import BORDERS
from autopar.rules.grouping import Work
from autopar.rules.node_view import NodeView, matrix_efficiency
from autopar.rules.table import rule_for, traits_of, unknown_rule
from autopar.xla_model.dot_operands import DotOperands
from autopar.xla_model.instruction_kinds import InstructionKinds, is_outer_product
from autopar.xla_model.local_program import Instruction, InstructionKind, LocalProgram
from autopar.xla_model.loop_borders import LoopBorders
from autopar.xla_model.partition_builder import PartitionBuilder
from autopar.xla_model.partition_communication import Communications
from autopar.xla_model.reduce_reassociate import ReduceReassociate

#: Reads of the operand per element that XLA's cost analysis counts, during fusion, for operations that it expands to
#: polynomials. A producer fused into one counts as often, so fusion stores the operand if anything else uses it. The
#: final kernel reads the operand once.
EXPANDED: Mapping[str, float] = {"erf": 18.0, "erfc": 18.0, "erf_inv": 18.0}
_NARROW = frozenset(["bfloat16", "float16"])


def local_program(f: Formulation, explicit: ExplicitProgram, *, reassociate: bool = True) -> LocalProgram:
    """Partition the operations of a program.

    Args:
        reassociate: whether to apply XLA's reassociation of reductions.
    """
    return _Partitioner(f, explicit, reassociate=reassociate).run()


class _Partitioner:
    def __init__(self, f: Formulation, explicit: ExplicitProgram, *, reassociate: bool) -> None:
        self.b = PartitionBuilder(f, explicit)
        self.sent = Communications(self.b)
        self.sums = ReduceReassociate(self.b, self.sent, reassociate=reassociate)
        self.kinds, self.gemms = InstructionKinds(self.b), DotOperands(self.b)
        self.borders = LoopBorders(self.b, self.sent)
        self.works: dict[int, tuple[Work, float]] = {}  # node -> its work, and its points on one device
        for decision, chosen in zip(f.decisions, explicit.choices, strict=True):
            if decision.kind != "group":
                continue
            group, strategy = f.groups[decision.group], decision.strategies[chosen]
            for n, work in zip(group.nodes, group.works, strict=True):
                parts = ((group.factors[i].size, f.mesh.sizes(strategy.axes[i])) for i in work.factors)
                self.works[n] = work, float(math.prod(-(-size // count) for size, count in parts))

    def run(self) -> LocalProgram:
        for position, value in enumerate(self.b.graph.inputs):
            self.b.program.arguments[position] = self._argument(value)
        for value in self.b.graph.constants:
            self._argument(value)
        loop_at = {loop.start: loop for loop in reversed(self.b.graph.loops)}
        ends = {loop.stop: loop for loop in self.b.graph.loops}
        for n, node in enumerate(self.b.graph.nodes):
            if n in ends:
                self.borders.end(ends[n])
            if n in loop_at:
                self.borders.allocate_stacks(loop_at[n])
            if node.primitive in BORDERS:
                if n not in self.borders.kept:
                    self.borders.piece(n, node)
            else:
                self._node(n, node)
        self._outputs()
        self.b.program.reassociated = tuple(self.sums.made.values())
        return self.b.program

    def _argument(self, value: int) -> int:
        info, sharding = self.b.graph.values[value], self.b.sharding(value)
        elements = sharding.local_size(info.shape, self.b.f.mesh)
        self.b.at[value] = self.b.add(
            Instruction("argument", -1, value, "", {}, elements, elements * info.itemsize, dtype=info.dtype)
        )
        return self.b.at[value]

    def _node(self, n: int, node: Node) -> None:
        operands: list[tuple[int, tuple[int, ...]]] = []
        for index, value in enumerate(node.operands):
            if value is None:
                continue
            at, sharding = self.sent.operand(n, index)
            operands.append((self._before_cast(node, at), self.b.local_shape(value, sharding)))
        traits = traits_of(node.primitive)
        if node.primitive == "split":
            self._split(n, node, operands[0][0])
            return
        for one in self.b.explicit.extended.get(n, ()):
            index = sum(value is not None for value in node.operands[: one.operand])
            operands[index] = self.sent.extended(one, operands[index][0]), one.shape
        kind = self.kinds.kind(node, operands)
        if kind == "alias":
            for value in node.results:
                self.b.at[value] = operands[0][0]
            return
        shapes = [self.b.local_shape(v, self.b.sharding(v)) for v in node.results]
        if kind == "unfusible":
            operands = self.gemms.prepared(n, node, operands, shapes)
        if traits.in_place == "window":
            self._unpool(n, node, operands, shapes[0])
            return
        elements = float(sum(math.prod(s) for s in shapes))
        infos = [self.b.graph.values[v] for v in node.results]
        num_bytes = sum(math.prod(s) * i.itemsize for s, i in zip(shapes, infos, strict=True))
        points = max([elements, *(math.prod(s) for _, s in operands)]) if kind == "reduce" else elements
        if traits.in_place == "scatter" and len(operands) == 3:  # target, indices, updates
            points = min(elements, math.prod(operands[2][1]))
        changed = math.prod(operands[1][1]) if traits.in_place == "slice" else points
        used: dict[int, float] = {}
        for at, shape in operands:
            used[at] = max(used.get(at, 0.0), self._utilization(node, kind, elements, math.prod(shape)))
        if node.primitive == "paged_attention":  # it reads at most the pages that the block tables list
            (_, (num_pages, *_)), (_, tables) = operands[1], operands[3]
            used |= dict.fromkeys((at for at, _ in operands[1:3]), min(1.0, math.prod(tables) / num_pages))
        added = self.sums.added_up(n, node, operands)
        if added is not None:
            self.b.at[node.results[0]] = added
            return
        used |= dict.fromkeys(self.sent.sent_by_program(n, node, [at for at, _ in operands]), 0.0)
        gemm = self.gemms.gemm(n, node, operands, shapes)
        flops, matrix_flops = self._arithmetic(n, node, kind, gemm, changed)
        instruction = Instruction(
            kind,
            n,
            node.results[0] if node.results else -1,
            "mul" if is_outer_product(node) else node.primitive,
            used,
            elements,
            num_bytes,
            flops=flops,
            matrix_flops=matrix_flops,
            matrix_efficiency=matrix_efficiency(node.params),
            convolution=_convolution(node, shapes, matrix_flops, infos[0].dtype) if matrix_flops else None,
            reduces=points / max(elements, 1.0),
            rows=kind == "reduce" and _kept_columns(node.params.get("axes"), operands) == 0.0,
            columns=_kept_columns(node.params.get("axes"), operands) if kind == "reduce" else 0.0,
            gemm=gemm,
            dtype=infos[0].dtype if infos else "float32",
        )
        context = self.sent.context(n)
        if context is not None:
            at = self.sent.context_parallel(instruction, context)
        else:
            at = self._once(node, tuple(at for at, _ in operands), instruction)
        self.b.program.nodes[at].append(n)
        at = self.sent.combine_partial_results(n, at)
        for value in node.results:
            self.b.at[value] = at
        self.sent.reduce(n)

    def _before_cast(self, node: Node, at: int) -> int:
        """The instruction that a node reads. XLA divides in float32, so that where a divisor is broadcast and was cast to a narrower
        dtype, a division reads it from before the cast. What broadcasts the narrower value is dead code then."""
        one, values, traits = self.b.program.instructions[at], self.b.graph.values, traits_of(node.primitive)
        divides = traits.scales and traits.linear == "first"
        if not divides or not traits_of(one.primitive).casts or one.dtype not in _NARROW:
            return at
        (source,) = one.operands
        elements = self.b.sharding(node.results[0]).local_size(values[node.results[0]].shape, self.b.f.mesh)
        if elements == one.elements or self.b.program.instructions[source].dtype != "float32":
            return at
        if ("dead", at, elements) not in self.b.known:
            reads = {at: elements / max(one.elements, 1.0)}
            dead = replace(
                one, primitive="broadcast_in_dim", operands=reads, elements=elements, num_bytes=4.0 * elements
            )
            dead.dtype, dead.is_dead = "float32", True
            self.b.known["dead", at, elements] = self.b.add(dead)
        return source

    def _split(self, n: int, node: Node, source: int) -> None:
        whole = self.b.program.instructions[source].elements
        for value in node.results:
            info, sharding = self.b.graph.values[value], self.b.sharding(value)
            elements = sharding.local_size(info.shape, self.b.f.mesh)
            self.b.at[value] = self.b.add(
                Instruction(
                    "loop",
                    n,
                    value,
                    "slice",
                    {source: elements / max(whole, 1.0)},
                    elements,
                    elements * info.itemsize,
                    dtype=info.dtype,
                )
            )

    def _unpool(
        self, n: int, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]], shape: tuple[int, ...]
    ) -> None:
        """Add the gradient of max pooling as XLA expands it: find the largest element of each window and its position
        in each dim, then scatter the gradient to these positions."""
        (source, source_shape), (image, image_shape) = operands
        window, places = math.prod(node.params["window_dimensions"]), float(math.prod(source_shape))
        read, info = window * places / max(math.prod(image_shape), 1), self.b.graph.values[node.results[0]]
        flops = self._flops_per_element(node) * window * places
        found = self.b.copied(n, node.results[0], "reduce_window_max", {image: read}, places, 4.0 * (1 + len(shape)))
        self.b.program.instructions[found].flops = flops
        made = Instruction(
            "inplace", n, node.results[0], node.primitive, {found: 1.0, source: 1.0}, float(math.prod(shape)),
            float(math.prod(shape)) * info.itemsize, dtype=info.dtype,
        )  # fmt: skip
        self.b.at[node.results[0]] = self.b.add(made)
        self.b.program.nodes[self.b.at[node.results[0]]].append(n)

    def _utilization(self, node: Node, kind: InstructionKind, elements: float, operand: float) -> float:
        if kind in ("reduce", "unfusible", "inplace") or operand == 0.0 or traits_of(node.primitive).joins:
            return 1.0
        return elements / operand * EXPANDED.get(node.primitive, 1.0)

    def _arithmetic(
        self, n: int, node: Node, kind: InstructionKind, gemm: Gemm | None, elements: float
    ) -> tuple[float, tuple[tuple[str, float], ...]]:
        """FLOPs outside matrix units, and inside by dtype. An unfusible kernel counts by its sharding rule, so that the
        solver and this program agree; a matmul counts by its shape."""
        if kind != "unfusible" or gemm is not None:
            return elements * self._flops_per_element(node), ()
        if n in self.works:
            work, points = self.works[n]
            outside, inside = work.by_unit
        else:  # all its values are small, so it is replicated
            view = NodeView.of(node, self.b.graph)
            rule = rule_for(view) or unknown_rule(view)
            points = float(math.prod(factor.size for factor in rule.factors))
            outside, inside = rule.flops_per_point, rule.matrix_flops_per_point
        return points * outside, tuple((dtype, points * flops) for dtype, flops in inside)

    def _flops_per_element(self, node: Node) -> float:
        traits = traits_of(node.primitive)
        if traits.contraction or not node.results:
            return self.b.f.profile.flops_per_element("mul", "") if is_outer_product(node) else 0.0
        if traits.moves == "fixed":
            return 0.0
        dtype = self.b.graph.values[node.results[0]].dtype
        return self.b.f.profile.flops_per_element(node.primitive, dtype)

    def _outputs(self) -> None:
        for array in self.b.explicit.outputs:
            self.b.program.outputs.append(None if array is None else self._inside(self.sent.array_at(array)))

    def _inside(self, at: int) -> int:
        """The instruction inside loops that produces an output: a loop writes its outputs directly."""
        while (one := self.b.program.instructions[at]).kind == "border" and one.operands:
            at = next(iter(one.operands))
        return at

    def _once(self, node: Node, operands: tuple[int, ...], instruction: Instruction) -> int:
        """The position of an instruction, which is added unless an identical one without literal operands exists."""
        literal = any(value is None for value in node.operands) and not traits_of(node.primitive).casts
        if literal or not operands or instruction.kind not in ("loop", "reduce") or node.effect:
            return self.b.add(instruction)
        key = (node.primitive, operands, repr(sorted(node.params.items())), instruction.elements, instruction.dtype)
        if key not in self.b.known:
            self.b.known[key] = self.b.add(instruction)
        return self.b.known[key]


def _convolution(
    node: Node, shapes: Sequence[tuple[int, ...]], matrix_flops: Sequence[tuple[str, float]], out_dtype: str
) -> Gemm | None:
    """The GEMM that an ungrouped convolution is; None for other nodes. Padding and holes contract nothing."""
    numbers, ((dtype, flops), *_) = node.params.get("dimension_numbers"), matrix_flops
    is_grouped = node.params.get("feature_group_count", 1) * node.params.get("batch_group_count", 1) > 1
    if not isinstance(numbers, Mapping) or "out_spec" not in numbers or is_grouped or flops <= 0.0:
        return None
    n = shapes[0][numbers["out_spec"][1]]
    m = math.prod(shapes[0]) // n
    return Gemm(1, m, n, max(1, round(flops / (2.0 * m * n))), dtype, out_dtype)


def _kept_columns(axes: object, operands: Sequence[tuple[int, tuple[int, ...]]]) -> float:
    """The number of kept elements minor to the innermost reduced dim; 0 where a reduction includes the last dim."""
    if not isinstance(axes, tuple) or len(operands) != 1 or not axes:
        return 0.0
    shape = operands[0][1]
    last = max(int(axis) for axis in axes)
    return float(math.prod(shape[last + 1 :])) if last + 1 < len(shape) else 0.0
