"""The planned step as one device sees it: local shapes, and every collective an instruction of its own.

In: a formulation and an assignment. Out: `Instruction`s in program order, about as many as equations of the
step; they are what XLA's partitioner hands on to its fusion (`xla_model/fusion_pipeline.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.collectives import collective
from autopar.formulate.formulation import Formulation
from autopar.ir.device_program import Gemm
from autopar.ir.explicit_program import Array, Cause, Communicate, ExplicitProgram, Extend, Strip
from autopar.ir.graph import Graph, Loop, Node, Value
from autopar.ir.sharding import TensorSharding, replicated
from autopar.rules.control_flow import BORDERS
from autopar.rules.grouping import Work
from autopar.rules.node_view import NodeView
from autopar.rules.table import RULES, rule_for, unknown_rule
from autopar.xla_model.local_program import Instruction, InstructionKind, LocalProgram
from autopar.xla_model.ragged_dot import dense_product

#: How often XLA's cost analysis has an operand read for one element while kernels are formed, where it expands the
#: operation to polynomials: whatever would be fused into that is counted as often, so the operand is stored if
#: anything else reads it. In the kernel that comes out it is read once.
EXPANDED: Mapping[str, float] = {"erf": 25.0, "erfc": 25.0, "erf_inv": 25.0}

#: The same memory under another shape or name.
_ALIASES = frozenset(
    [
        "reshape",
        "squeeze",
        "expand_dims",
        "copy",
        "copy_p",
        "stop_gradient",
        "bitcast_convert_type",
        "random_wrap",
        "random_unwrap",
        "sharding_constraint",
        "reshard",
        "reduce_precision",
    ]
)
CUMULATIVE = frozenset(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
_REDUCTIONS = CUMULATIVE | {"argmax", "argmin"}
_IN_PLACE = frozenset(["dynamic_update_slice"])
#: Kernels that nothing is fused with: libraries, sorts, whole loops.
_HEROES = frozenset(
    [
        "dot_general",
        "ragged_dot",
        "ragged_dot_general",
        "conv_general_dilated",
        "sort",
        "top_k",
        "approx_top_k",
        "fft",
        "cholesky",
        "triangular_solve",
        "eigh",
        "svd",
        "qr",
        "lu",
        "custom_call",
        "ffi_call",
        "rng_bit_generator",
        "pallas_call",
        "paged_attention",
        "shard_map",
    ]
)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum over devices that one operation alone reads: its instruction, and how its dims are turned until there."""

    at: int
    order: tuple[int, ...]


def local_program(f: Formulation, explicit: ExplicitProgram, *, joins: bool = True) -> LocalProgram:
    """Make instructions of a program's operations.

    Args:
        joins: whether sums over devices that are added up are taken as one, as XLA does where nothing else reads them.
    """
    return _Lowering(f, explicit, joins=joins).run()


class _Lowering:
    def __init__(self, f: Formulation, explicit: ExplicitProgram, *, joins: bool) -> None:
        self.f, self.explicit, self.joins = f, explicit, joins
        self.graph: Graph = f.graph
        self.program = LocalProgram()
        self.at = self.program.at
        self._cheap = f.profile.flops_per_element("default", "")
        self.local: dict[int, TensorSharding] = {}  # value -> how it is made
        self.works: dict[int, tuple[Work, float]] = {}  # node -> its work, and how many points of it a device has
        self.moved: dict[int, int] = {}  # array that is sent -> instruction
        self.laid_out: dict[int, int] = {}
        self.kept: dict[int, int] = {}  # node of a loop's piece -> what is in memory as long as the loop runs
        self.known: dict[tuple[object, ...], int] = {}  # what was computed already, XLA computes once
        self.users, self.producers = self.graph.users, self.graph.producers
        self.leaving = frozenset(self.graph.outputs)
        self.added: dict[int, tuple[int, ...]] = {}  # sum of sums -> the values that they are of
        self.strips: dict[Strip, int] = {}
        for decision, chosen in zip(f.decisions, explicit.choices, strict=True):
            if decision.kind != "group":
                continue
            group, strategy = f.groups[decision.group], decision.strategies[chosen]
            for n, work in zip(group.nodes, group.works, strict=True):
                parts = ((group.factors[i].size, f.mesh.sizes(strategy.axes[i])) for i in work.factors)
                self.works[n] = work, float(math.prod(-(-size // count) for size, count in parts))
        arrays = self.explicit.arrays
        self.local = {value: arrays[array].sharding for value, array in self.explicit.made.items()}

    def run(self) -> LocalProgram:
        for position, value in enumerate(self.graph.inputs):
            self.program.arguments[position] = self._argument(value)
        for value in self.graph.constants:
            self._argument(value)
        loop_at = {loop.start: loop for loop in reversed(self.graph.loops)}
        ends = {loop.stop: loop for loop in self.graph.loops}
        for n, node in enumerate(self.graph.nodes):
            if n in ends:
                self._end(ends[n])
            if n in loop_at:
                self._allocate_stacks(loop_at[n])
            if node.primitive in BORDERS:
                if n not in self.kept:
                    self._piece(n, node)
            else:
                self._node(n, node)
        self._outputs()
        self.program.joined = tuple(self.added.values())
        return self.program

    # -- values ------------------------------------------------------------------------------

    def _sharding(self, value: int) -> TensorSharding:
        known = self.local.get(value)
        return replicated(len(self.graph.values[value].shape)) if known is None else known

    def _local_shape(self, value: int, sharding: TensorSharding) -> tuple[int, ...]:
        return sharding.local_shape(self.graph.values[value].shape, self.f.mesh)

    def _add(self, instruction: Instruction) -> int:
        self.program.instructions.append(instruction)
        return len(self.program.instructions) - 1

    def _argument(self, value: int) -> int:
        info, sharding = self.graph.values[value], self._sharding(value)
        elements = sharding.local_size(info.shape, self.f.mesh)
        self.at[value] = self._add(
            Instruction("argument", -1, value, "", {}, elements, elements * info.itemsize, dtype=info.dtype)
        )
        return self.at[value]

    def _operand(self, n: int, index: int) -> tuple[int, TensorSharding]:
        """The instruction that a node's operand is read from, after any resharding."""
        array = self.explicit.reads[n, index]
        return self._at(array), self.explicit.arrays[array].sharding

    def _at(self, array: int) -> int:
        """The instruction that an array is read from."""
        op = self.explicit.sent_as.get(array)
        if op is None or op.cause == "reduction":
            return self.at[self.explicit.arrays[array].value]
        if array not in self.moved:
            assert op.operand is not None
            self.moved[array] = self._moved(op, self._at(op.operand), self.explicit.arrays[array])
        return self.moved[array]

    def _moved(self, op: Communicate, start: int, array: Array) -> int:
        info = self.graph.values[array.value]
        if op.is_inner and op.kind == "reduce-scatter":
            start = self._reordered(start, op)
        elements = array.sharding.local_size(info.shape, self.f.mesh)
        source = self.program.instructions[start]
        is_cut = op.kind == "cut"
        at = self._add(
            Instruction(
                "loop" if is_cut else "collective",
                source.node,
                array.value,
                op.kind,
                {start: elements / max(source.elements, 1.0) if is_cut else 1.0},
                elements,
                elements * info.itemsize,
                collective="" if is_cut else op.collective,
                axes=op.axes,
                payload_bytes=op.num_bytes,
                combinable=not is_cut and collective(op.collective).is_merged,
                dtype=info.dtype,
            )
        )
        return self._reordered(at, op) if op.is_inner and op.kind == "all-gather" else at

    def _reordered(self, at: int, op: Communicate) -> int:
        """A copy in the order that devices' parts lie in, or from that."""
        one = self.program.instructions[at]
        return self._copied(one.node, one.value, "transpose", {at: 1.0}, one.elements, op.num_bytes / one.elements)

    # -- nodes -------------------------------------------------------------------------------

    def _node(self, n: int, node: Node) -> None:
        operands: list[tuple[int, tuple[int, ...]]] = []
        for index, value in enumerate(node.operands):
            if value is None:
                continue
            at, sharding = self._operand(n, index)
            operands.append((at, self._local_shape(value, sharding)))
        if node.primitive == "split":
            self._split(n, node, operands[0][0])
            return
        for one in self.explicit.extended.get(n, ()):
            index = sum(value is not None for value in node.operands[: one.operand])
            operands[index] = self._extended(one, operands[index][0]), one.shape
        kind = self._kind(node, operands)
        if kind == "alias":
            for value in node.results:
                self.at[value] = operands[0][0]
            return
        if node.primitive == "dot_general" and kind == "hero":
            operands = [(self._laid_out(n, node, i, at), shape) for i, (at, shape) in enumerate(operands)]
            operands = [(self._masked(n, node, i, at, shape), shape) for i, (at, shape) in enumerate(operands)]
        shapes = [self._local_shape(v, self._sharding(v)) for v in node.results]
        if node.primitive == "ragged_dot_general":
            operands = self._masked_rows(n, node, operands, shapes[0])
        elements = float(sum(math.prod(s) for s in shapes))
        infos = [self.graph.values[v] for v in node.results]
        num_bytes = sum(math.prod(s) * i.itemsize for s, i in zip(shapes, infos, strict=True))
        points = max([elements, *(math.prod(s) for _, s in operands)]) if kind == "reduce" else elements
        if node.primitive.startswith("scatter") and len(operands) == 3:  # target, indices, updates
            points = min(elements, math.prod(operands[2][1]))
        changed = math.prod(operands[1][1]) if node.primitive in _IN_PLACE else points
        used: dict[int, float] = {}
        for at, shape in operands:
            used[at] = max(used.get(at, 0.0), self._utilization(node, kind, elements, math.prod(shape)))
        if node.primitive == "paged_attention":  # of a pool, at most what the tables hold
            (_, (num_pages, *_)), (_, tables) = operands[1], operands[3]
            used |= dict.fromkeys((at for at, _ in operands[1:3]), min(1.0, math.prod(tables) / num_pages))
        added = self._added(n, node, operands)
        if added is not None:
            self.at[node.results[0]] = added
            return
        used |= dict.fromkeys(self._told(n, node, [at for at, _ in operands]), 0.0)
        gemm = self._gemm(node, operands, shapes)
        flops, matrix_flops = self._arithmetic(n, node, kind, gemm, changed)
        instruction = Instruction(
            kind,
            n,
            node.results[0] if node.results else -1,
            "mul" if _sums_nothing(node) else node.primitive,
            used,
            elements,
            num_bytes,
            flops=flops,
            matrix_flops=matrix_flops,
            reduces=points / max(elements, 1.0),
            rows=kind == "reduce" and _kept_columns(node.params.get("axes"), operands) == 0.0,
            columns=_kept_columns(node.params.get("axes"), operands) if kind == "reduce" else 0.0,
            gemm=gemm,
            dtype=infos[0].dtype if infos else "float32",
        )
        at = self._once(node, tuple(at for at, _ in operands), instruction)
        self.program.nodes[at].append(n)
        at = self._joined(n, at)
        for value in node.results:
            self.at[value] = at
        for op in self._beside(n, "reduction"):
            self._reduced(op)

    def _extended(self, one: Extend, at: int) -> int:
        """An operand with the strips that neighbours send, put together by a kernel; once for all who read the same."""
        parts = {at: 1.0}
        for strip in one.strips:
            if strip not in self.strips:
                size = float(math.prod(strip.shape))
                cut = self._copied(one.node, strip.value, "slice", {at: self._share(size, at)}, size, strip.itemsize)
                self.strips[strip] = self._add(
                    replace(
                        self.program.instructions[cut],
                        kind="collective",
                        primitive=strip.kind,
                        operands={cut: 1.0},
                        collective=strip.kind,
                        axes=strip.axes,
                        payload_bytes=strip.num_bytes,
                    )
                )
            parts[self.strips[strip]] = 1.0
        key = ("extended", tuple(parts), one.window)
        if key not in self.known:
            size, value = float(math.prod(one.shape)), self.program.instructions[at].value
            if one.strips:
                self.known[key] = self._copied(one.node, value, "pad", parts, size, one.itemsize)
            else:
                self.known[key] = self._copied(
                    one.node, value, "slice", {at: self._share(size, at)}, size, one.itemsize
                )
        return self.known[key]

    def _share(self, size: float, at: int) -> float:
        return size / max(self.program.instructions[at].elements, 1.0)

    def _copied(
        self, n: int, value: int, primitive: str, operands: dict[int, float], size: float, itemsize: float
    ) -> int:
        dtype = self.graph.values[value].dtype
        return self._add(Instruction("loop", n, value, primitive, operands, size, size * itemsize, dtype=dtype))

    def _told(self, n: int, node: Node, operands: Sequence[int]) -> list[int]:
        """What the program itself sends, inside a `shard_map`."""
        sent: list[int] = []
        for op in self._beside(n, "program"):
            size = op.num_times / node.repeat * op.num_bytes
            reads = dict.fromkeys(operands, 1.0)
            one = Instruction("collective", n, -1, op.kind, reads, size / 4, size, collective=op.kind, axes=op.axes)
            one.payload_bytes, one.combinable = size, False
            sent.append(self._add(one))
        return sent

    def _joined(self, n: int, at: int) -> int:
        """What a node makes of its parts: it gathers what each has found, and finishes from that."""
        sent = next(self._beside(n, "region"), None)
        if sent is None:
            return at
        own = self.program.instructions[at]
        gathered = self._add(
            Instruction(
                "collective",
                n,
                own.value,
                sent.kind,
                {at: sent.num_elements / max(own.elements, 1.0) / self.f.mesh.sizes(sent.axes)},
                sent.num_elements,
                sent.num_bytes,
                collective=sent.collective,
                axes=sent.axes,
                payload_bytes=sent.num_bytes,
                combinable=True,
                dtype=own.dtype,
            )
        )
        if own.primitive in CUMULATIVE:
            return self._add(replace(own, kind="loop", primitive="add", operands={at: 1.0, gathered: 1.0}, reduces=1.0))
        return self._add(replace(own, operands={gathered: 1.0}, reduces=1.0, flops=own.elements * self._cheap))

    def _once(self, node: Node, operands: tuple[int, ...], instruction: Instruction) -> int:
        """The instruction, or the same one made before; one that reads a literal is not compared."""
        literal = any(value is None for value in node.operands) and node.primitive != "convert_element_type"
        if literal or not operands or instruction.kind not in ("loop", "reduce") or node.effect:
            return self._add(instruction)
        key = (node.primitive, operands, repr(sorted(node.params.items())), instruction.elements, instruction.dtype)
        if key not in self.known:
            self.known[key] = self._add(instruction)
        return self.known[key]

    def _added(self, n: int, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]]) -> int | None:
        """What XLA makes of an addition, where that is not an operation of its own."""
        if node.primitive not in ("add", "add_any") or len(operands) != 2:
            return None
        scattered = self._scattered_sum(node, operands)
        return self._sum_of_sums(n, node) if scattered is None and self.joins else scattered

    def _scattered_sum(self, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]]) -> int | None:
        """`x + scatter(zeros, …)` scatters into x: XLA's simplifier says so where nothing else reads the scatter."""
        for (at, _), (other, _), value in (
            (*operands, node.operands[0]),
            (*reversed(operands), node.operands[1]),
        ):
            one = self.program.instructions[at]
            if one.primitive != "scatter-add" or value is None or len(self.users.get(value, ())) != 1:
                continue
            zeros = next(iter(one.operands))
            if self.program.instructions[zeros].primitive != "broadcast_in_dim" or zeros == other or other > at:
                continue
            del one.operands[zeros]
            one.operands = {other: 1.0, **one.operands}
            return at
        return None

    def _sum_of_sums(self, n: int, node: Node) -> int | None:
        """`sum(x) + sum(y)` over the same devices is `sum(x + y)`, in the dtype of the result: so XLA has it where nothing else
        reads either of them (openxla/xla, all_reduce_reassociate.cc)."""
        left, right = (self._sum_read_by(n, index, value) for index, value in enumerate(node.operands))
        if left is None or right is None or left.at == right.at or left.order != right.order:
            return None
        sums = [self.program.instructions[one.at] for one in (left, right)]
        if sums[0].axes != sums[1].axes or sums[0].elements != sums[1].elements:
            return None
        info = self.graph.values[node.results[0]]
        parts: dict[int, float] = {}
        for one in sums:
            source = next(iter(one.operands))
            if one.dtype != info.dtype:
                own = Instruction("loop", n, one.value, "convert_element_type", {source: 1.0}, one.elements, 0.0)
                own.num_bytes, own.dtype = one.elements * info.itemsize, info.dtype
                own.flops = one.elements * self.f.profile.flops_per_element(own.primitive, one.dtype)
                source = self._add(own)
            parts[source] = 1.0
        whole = replace(sums[0], node=n, value=node.results[0], dtype=info.dtype)
        whole.num_bytes = whole.elements * info.itemsize
        whole.payload_bytes = sums[0].payload_bytes / sums[0].num_bytes * whole.num_bytes
        flops = whole.elements * self.f.profile.flops_per_element(node.primitive, info.dtype)
        whole.operands = {
            self._add(
                replace(whole, kind="loop", primitive=node.primitive, operands=parts, flops=flops, collective="")
            ): 1.0
        }
        at = self._add(whole)
        self.added[at] = tuple(v for one in (left, right) for v in self._summed(one.at))
        for one in (left, right):
            self.added.pop(one.at, None)
        return at

    def _summed(self, at: int) -> tuple[int, ...]:
        return self.added.get(at, (self.program.instructions[at].value,))

    def _sum_read_by(self, n: int, index: int, value: int | None) -> _Sum | None:
        """The sum over devices that a node reads, perhaps cast or turned in between, if nothing else reads it."""
        if value is None:
            return None
        order = tuple(range(len(self.graph.values[value].shape)))
        while len(self.users.get(value, ())) == 1 and value not in self.leaving:
            at, _ = self._operand(n, index)
            sent, above = self.program.instructions[at].collective, self._unary(value)
            if sent:
                return _Sum(at, self._turned(order, value)) if collective(sent).sums_whole else None
            if above is None or at != self.at[value]:
                return None
            order = _composed(order, self.graph.nodes[self.producers[value]])
            (n, index), *_ = self.users[above]
            value = above
        return None

    def _turned(self, order: tuple[int, ...], value: int) -> tuple[int, ...]:
        """An order of dims, in that of what a value is computed as."""
        above = self._unary(value)
        return (
            order if above is None else self._turned(_composed(order, self.graph.nodes[self.producers[value]]), above)
        )

    def _unary(self, value: int) -> int | None:
        """What a value is, cast or turned."""
        node = self.graph.producer(value)
        return (
            node.operands[0] if node is not None and node.primitive in ("convert_element_type", "transpose") else None
        )

    def _reduced(self, op: Communicate) -> None:
        assert op.operand is not None and op.result is not None
        value = self.explicit.arrays[op.result].value
        source, info = self.at[value], self.graph.values[value]
        one = Instruction(
            "collective", self.program.instructions[source].node, value, op.kind, {source: 1.0}, info.size, 0.0
        )
        one.num_bytes = one.payload_bytes = op.num_bytes
        one.collective, one.axes, one.combinable, one.dtype = op.kind, op.axes, True, info.dtype
        self.at[value], self.local[value] = self._add(one), self.explicit.arrays[op.result].sharding

    def _beside(self, n: int, cause: Cause) -> Iterator[Communicate]:
        """What a node sends itself."""
        return (op for op in self.explicit.beside.get(n, ()) if op.cause == cause)

    def _split(self, n: int, node: Node, source: int) -> None:
        whole = self.program.instructions[source].elements
        for value in node.results:
            info, sharding = self.graph.values[value], self._sharding(value)
            elements = sharding.local_size(info.shape, self.f.mesh)
            self.at[value] = self._add(
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

    def _kind(self, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]]) -> InstructionKind:
        name = node.primitive
        if _sums_nothing(node):
            return "loop"
        if name in _HEROES or node.effect or not node.results or self._is_opaque(node):
            return "hero"
        if not operands:
            return "loop"
        if name in _ALIASES:
            return "alias"
        result = self.graph.values[node.results[0]] if node.results else None
        first = next((self.graph.values[v] for v in node.operands if v is not None), None)
        if result is not None and first is not None:
            if name == "convert_element_type" and result.dtype == first.dtype:
                return "alias"
            if name == "broadcast_in_dim" and result.size == first.size:
                return "alias"
            if name == "transpose" and self._is_layout(node):
                return "alias"
        if name.startswith("reduce_") or name in _REDUCTIONS:
            return "loop" if result is not None and first is not None and result.size == first.size else "reduce"
        if name.startswith("scatter") or name in _IN_PLACE or name == "select_and_scatter_add":
            return "inplace"
        return "loop"

    def _is_opaque(self, node: Node) -> bool:
        """Whether nobody knows what a node is made of but what could be counted of it: it is taken for one kernel."""
        if "work" in node.params:
            return True
        return node.primitive not in RULES and rule_for(NodeView.of(node, self.graph)) is None

    def _is_layout(self, node: Node) -> bool:
        """Whether a transpose copies nothing: a matrix product takes an operand and gives its result in either
        order of rows and columns."""
        if self._of_outer_product(node.operands[0]):
            return True
        beside = self._from_dot(node.operands[0]) or self._feeds_dots(node.results[0])
        return beside and _swaps_halves(node.params["permutation"])

    def _from_dot(self, value: int | None) -> bool:
        return value is not None and self.program.instructions[self.at[value]].gemm is not None

    def _of_outer_product(self, value: int | None) -> bool:
        """Whether a value is made by a product that sums nothing, which may write its dims in any order."""
        if value is None:
            return False
        one = self.program.instructions[self.at[value]]
        return one.node >= 0 and one.value == value and _sums_nothing(self.graph.nodes[one.node])

    def _feeds_dots(self, value: int) -> bool:
        """Whether all readers are matrix products, which take an operand in any order of its dims."""
        for n, _ in self.users.get(value, ()):
            reader = self.graph.nodes[n]
            if reader.primitive == "dot_general":
                continue
            if reader.primitive not in ("reshape", "transpose", "squeeze", "expand_dims"):
                return False
            if not self._feeds_dots(reader.results[0]):
                return False
        return value in self.users

    def _laid_out(self, n: int, node: Node, index: int, at: int) -> int:
        """A product's operand whose batch dims are not outermost is copied so that they are, once for all its
        readers; but the result of another product can be written in that order."""
        _, batch = node.params["dimension_numbers"]
        dims = batch[index]
        if tuple(dims) == tuple(range(len(dims))):
            return at
        if at in self.laid_out:
            return self.laid_out[at]
        # Layouts are settled for whole chains of elementwise operations, so the copy is made where it is smallest.
        chain, narrowest = [at], 0
        while (above := self._only_operand(chain[-1])) is not None:
            chain.append(above)
            if self.program.instructions[above].num_bytes < self.program.instructions[chain[narrowest]].num_bytes:
                narrowest = len(chain) - 1
        top = chain[narrowest]
        if top not in self.laid_out:
            one = self.program.instructions[top]
            self.laid_out[top] = self._add(
                replace(one, kind="loop", node=n, primitive="transpose", operands={top: 1.0}, flops=0.0, gemm=None)
            )
        for below in reversed(chain[:narrowest]):
            one = self.program.instructions[below]
            operands = {self.laid_out[top] if o == top else o: times for o, times in one.operands.items()}
            self.laid_out[below] = self._add(replace(one, node=n, operands=operands))
            top = below
        return self.laid_out[at]

    def _only_operand(self, at: int) -> int | None:
        """What an elementwise operation without any other operand of its size reads."""
        one = self.program.instructions[at]
        if one.primitive not in ("convert_element_type", "mul", "div", "neg") or not one.operands:
            return None
        full = [o for o in one.operands if self.program.instructions[o].elements == one.elements]
        small = all(o in full or self.program.instructions[o].elements <= 1.0 for o in one.operands)
        return full[0] if len(full) == 1 and small else None

    def _masked(self, n: int, node: Node, index: int, at: int, shape: tuple[int, ...]) -> int:
        """A product's operand that is unevenly split along a summed dim is copied with its padding set to zero."""
        contracting, _ = node.params["dimension_numbers"]
        value = node.operands[index]
        assert value is not None
        whole = self.graph.values[value].shape
        if all(whole[d] % max(shape[d], 1) == 0 for d in contracting[index]):  # of an empty batch there is none
            return at
        source = self.program.instructions[at]
        copy = Instruction(
            "loop", n, source.value, "select_n", {at: 1.0}, source.elements, source.num_bytes, dtype=source.dtype
        )
        return self._add(copy)

    def _masked_rows(
        self, n: int, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]], result: tuple[int, ...]
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Operands of a product in groups, copied for each group; all that read one so share the copies."""
        dense = dense_product(node.params, operands[0][1], operands[1][1], result)
        found: list[tuple[int, tuple[int, ...]]] = []
        for (at, shape), copies in zip(operands, (*dense.copies, *[0] * len(operands)), strict=False):
            if copies:
                source, key = self.program.instructions[at], ("masked rows", at, copies, operands[2][0])
                if key not in self.known:
                    one = replace(source, kind="loop", node=n, primitive="select_n", operands={at: float(copies)})
                    one.elements, one.num_bytes = copies * source.elements, copies * source.num_bytes
                    one.flops, one.gemm, one.collective = one.elements * self._cheap, None, ""
                    self.known[key] = self._add(one)
                at = self.known[key]
                if dense.beside:
                    at = self._add(replace(self.program.instructions[at], primitive="transpose", operands={at: 1.0}))
                    self.program.instructions[at].flops = 0.0
            found.append((at, shape))
        return found

    def _utilization(self, node: Node, kind: InstructionKind, elements: float, operand: float) -> float:
        if kind in ("reduce", "hero", "inplace") or operand == 0.0:
            return 1.0
        if node.primitive in ("pad", "concatenate"):
            return 1.0
        return elements / operand * EXPANDED.get(node.primitive, 1.0)

    def _arithmetic(
        self, n: int, node: Node, kind: InstructionKind, gemm: Gemm | None, elements: float
    ) -> tuple[float, tuple[tuple[str, float], ...]]:
        """Operations outside matrix units, and inside by dtype. Those of a kernel that nothing is fused with are counted by its
        rule, so that the solver and this program agree; a product's follow from its shape."""
        if kind != "hero" or gemm is not None:
            return elements * self._flops_per_element(node), ()
        if n in self.works:
            work, points = self.works[n]
            outside, inside = work.by_unit
        else:  # it touches small values alone, so nothing is split
            view = NodeView.of(node, self.graph)
            rule = rule_for(view) or unknown_rule(view)
            points = float(math.prod(factor.size for factor in rule.factors))
            outside, inside = rule.flops_per_point, rule.matrix_flops_per_point
        return points * outside, tuple((dtype, points * flops) for dtype, flops in inside)

    def _flops_per_element(self, node: Node) -> float:
        if node.primitive in ("dot_general", "ragged_dot_general") or not node.results:
            return self.f.profile.flops_per_element("mul", "") if _sums_nothing(node) else 0.0
        if node.primitive in ("broadcast_in_dim", "slice", "transpose", "iota", "pad", "concatenate", "rev"):
            return 0.0
        dtype = self.graph.values[node.results[0]].dtype
        return self.f.profile.flops_per_element(node.primitive, dtype)

    def _gemm(
        self, node: Node, operands: Sequence[tuple[int, tuple[int, ...]]], shapes: Sequence[tuple[int, ...]]
    ) -> Gemm | None:
        values: list[Value] = [self.graph.values[v] for v in node.operands if v is not None]
        if node.primitive == "ragged_dot_general":
            dense = dense_product(node.params, operands[0][1], operands[1][1], shapes[0])
            result = self.graph.values[node.results[0]].dtype
            return Gemm(dense.batch, dense.m, dense.n, dense.k, values[0].dtype, result)
        if node.primitive != "dot_general" or len(operands) != 2 or _sums_nothing(node):
            return None
        (left_contracting, right_contracting), (left_batch, right_batch) = node.params["dimension_numbers"]
        left, right = operands[0][1], operands[1][1]
        k = math.prod(left[d] for d in left_contracting)
        batch = math.prod(left[d] for d in left_batch)
        m = math.prod(s for d, s in enumerate(left) if d not in (*left_contracting, *left_batch))
        n = math.prod(s for d, s in enumerate(right) if d not in (*right_contracting, *right_batch))
        return Gemm(batch, m, n, k, values[0].dtype, self.graph.values[node.results[0]].dtype)

    # -- loops and branches ------------------------------------------------------------------

    def _border(self, n: int, value: int, operands: Sequence[int], num_bytes: float, elements: float) -> int:
        dtype = self.graph.values[value].dtype if value >= 0 else "float32"
        reads = dict.fromkeys(operands, 0.0)
        return self._add(Instruction("border", n, value, "border", reads, elements, num_bytes, dtype=dtype))

    def _piece(self, n: int, node: Node) -> None:
        """One value at the border of a loop or a branch."""
        if not node.results:
            return
        value = node.results[0]
        shape = self._local_shape(value, self._sharding(value))
        elements = float(math.prod(shape))
        num_bytes = elements * self.graph.values[value].itemsize
        sources = [self._operand(n, i)[0] for i, v in enumerate(node.operands) if v is not None]
        dtype = self.graph.values[value].dtype
        if node.primitive == "enter_slice":
            whole = self.program.instructions[sources[0]]
            stack = self._border(n, whole.value, sources, whole.num_bytes, whole.elements)
            self.kept[n] = stack
            part = {stack: elements / max(whole.elements, 1.0)}
            self.at[value] = self._add(
                Instruction("loop", n, value, "dynamic_slice", part, elements, num_bytes, dtype=dtype)
            )
        elif node.primitive == "exit_stack":
            reads = {self.kept[n]: 1.0, **dict.fromkeys(sources, 1.0)}
            last = max(loop.stop for loop in self.graph.loops if n in loop.stacks) - 1
            self.at[value] = self._add(
                Instruction("inplace", last, value, "dynamic_update_slice", reads, elements, num_bytes, dtype=dtype)
            )
        else:
            self.at[value] = self._border(n, value, sources, num_bytes, elements)
            if node.primitive == "enter_const":
                self.kept[n] = self.at[value]

    def _allocate_stacks(self, loop: Loop) -> None:
        """What all trips make is in memory from the first trip on."""
        for n in loop.stacks:
            value = self.graph.nodes[n].results[0]
            elements = float(self._sharding(value).local_size(self.graph.values[value].shape, self.f.mesh))
            num_bytes = elements * self.graph.values[value].itemsize
            self.kept[n] = self._border(loop.start, value, (), num_bytes, elements)

    def _end(self, loop: Loop) -> None:
        """What all trips make; and what every trip reads, which is in memory until the last one ends."""
        for n in loop.stacks:
            self._piece(n, self.graph.nodes[n])
        kept = [at for n, at in self.kept.items() if loop.start <= n < loop.stop]
        if kept:
            self._border(loop.stop - 1, -1, kept, 0.0, 0.0)

    # -- outputs -----------------------------------------------------------------------------

    def _outputs(self) -> None:
        for array in self.explicit.outputs:
            self.program.outputs.append(None if array is None else self._inside(self._at(array)))

    def _inside(self, at: int) -> int:
        """What a loop leaves as an output, it makes as one."""
        while (one := self.program.instructions[at]).kind == "border" and one.operands:
            at = next(iter(one.operands))
        return at


def _sums_nothing(node: Node) -> bool:
    """A product without contracted dims is a multiplication to XLA, of no kernel of its own (DotDecomposer)."""
    return node.primitive == "dot_general" and not node.params["dimension_numbers"][0][0]


def _composed(order: tuple[int, ...], node: Node) -> tuple[int, ...]:
    """An order of a result's dims in that of the operand's."""
    return tuple(node.params["permutation"][d] for d in order) if node.primitive == "transpose" else order


def _swaps_halves(permutation: Sequence[int]) -> bool:
    """Whether a transpose turns [a, b] to [b, a], each perhaps of several dims."""
    first = permutation.index(0)
    return list(permutation) == [*range(len(permutation) - first, len(permutation)), *range(len(permutation) - first)]


def _kept_columns(axes: object, operands: Sequence[tuple[int, tuple[int, ...]]]) -> float:
    """How many elements a reduction keeps inside the innermost dim that it sums: 0 where that is the last."""
    if not isinstance(axes, tuple) or len(operands) != 1 or not axes:
        return 0.0
    shape = operands[0][1]
    last = max(int(axis) for axis in axes)
    return float(math.prod(shape[last + 1 :])) if last + 1 < len(shape) else 0.0
