"""Merge matmuls that share an operand, as XLA's dot merger does.

In: a `LocalProgram`. Out: the same program, in which one matmul reads the others' second operands side by side, and slices
of its result replace them: queries, keys and values; the two inputs of a gated layer; their weights' gradients. Source:
openxla/xla, xla/hlo/transforms/simplifiers/dot_merger.cc; the limits as found by compiling pairs of matmuls (JAX 0.12).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Graph
from autopar.xla_model.local_program import Instruction, LocalProgram

#: At least one of two merged matmuls has no more bytes in its result and its unshared operand.
MOST_BYTES = 64 << 20
#: Neither of two merged matmuls has more than this many times the columns of the other.
MOST_RATIO = 16


def merge_dots(program: LocalProgram, graph: Graph) -> None:
    """Merge matmuls of a program, in place."""
    merged = [one for one in _merged(program, graph) if len(one.members) > 1]
    if merged:
        _apply(program, merged)


@dataclass(frozen=True, slots=True)
class _Side:
    """What a matmul shares: an operand, and which of its dims are contracted.

    Args:
        at: position of the operand.
        contracts_last: whether its last dims are contracted.
        loop: start of the innermost loop around the matmul; -1 outside loops.
    """

    at: int
    contracts_last: bool
    loop: int
    batch: int
    k: int
    dtype: str
    out_dtype: str


@dataclass(slots=True)
class _Merged:
    """Matmuls that become one.

    Args:
        members: their positions.
        num_bytes: bytes of the results and of the unshared operands.
    """

    shared: int
    members: list[int] = field(default_factory=list)
    columns: int = 0
    num_bytes: float = 0.0

    def takes(self, columns: int, num_bytes: float) -> bool:
        """Whether XLA merges another matmul into these."""
        ratio = max(columns, self.columns) / max(1, min(columns, self.columns))
        return min(num_bytes, self.num_bytes) <= MOST_BYTES and ratio <= MOST_RATIO

    def add(self, at: int, columns: int, num_bytes: float) -> None:
        """Add a matmul."""
        self.members.append(at)
        self.columns += columns
        self.num_bytes += num_bytes


def _merged(program: LocalProgram, graph: Graph) -> Iterator[_Merged]:
    """The groups of matmuls that XLA merges."""
    classes: dict[_Side, list[int]] = defaultdict(list)
    for at, one in enumerate(program.instructions):
        if one.gemm is not None and "dimension_numbers" in graph.nodes[one.node].params and len(one.operands) == 2:
            for side in _sides(one, graph):
                classes[side].append(at)
    taken: set[int] = set()
    for side, members in sorted(classes.items(), key=lambda item: item[0].at):
        groups: list[_Merged] = []
        for at in members:
            if at in taken or len(members) < 2:
                continue
            one = program.instructions[at]
            other = next(operand for operand in one.operands if operand != side.at)
            assert one.gemm is not None
            columns = one.gemm.n if side.at == next(iter(one.operands)) else one.gemm.m
            num_bytes = program.instructions[other].num_bytes + one.num_bytes
            for group in groups:
                if group.takes(columns, num_bytes) and not _depends(program, at, group.members):
                    group.add(at, columns, num_bytes)
                    break
            else:
                groups.append(_Merged(side.at))
                groups[-1].add(at, columns, num_bytes)
        taken.update(at for group in groups if len(group.members) > 1 for at in group.members)
        yield from groups


def _sides(one: Instruction, graph: Graph) -> Iterator[_Side]:
    """A matmul's two operands, each as what it may share with others."""
    assert one.gemm is not None
    contracting, batch = graph.nodes[one.node].params["dimension_numbers"]
    values = [graph.values[value] for value in graph.nodes[one.node].operands if value is not None]
    starts = [(loop.stop - loop.start, loop.start) for loop in graph.loops if loop.start <= one.node < loop.stop]
    loop = min(starts)[1] if starts else -1
    for index, at in enumerate(one.operands):
        free = set(range(len(values[index].shape))) - {*contracting[index], *batch[index]}
        last = not free or max(contracting[index], default=-1) > max(free)
        yield _Side(at, last, loop, one.gemm.batch, one.gemm.k, one.gemm.dtype, one.gemm.out_dtype)


def _depends(program: LocalProgram, at: int, on: list[int]) -> bool:
    """Whether an instruction depends on one of others that come before it."""
    first, wanted, seen, left = min(on), set(on), set[int](), [at]
    while left:
        for operand in program.instructions[left.pop()].operands:
            if operand in wanted:
                return True
            if operand > first and operand not in seen:
                seen.add(operand)
                left.append(operand)
    return False


def _apply(program: LocalProgram, groups: list[_Merged]) -> None:
    """Add the merged matmuls, make slices of their members, and sort the instructions by dependency."""
    for group in groups:
        members = [program.instructions[at] for at in group.members]
        operands = {group.shared: 1.0}
        for one in members:
            operands |= dict.fromkeys(one.operands, 1.0)
        elements = sum(one.elements for one in members)
        gemm = members[0].gemm
        assert gemm is not None
        rows = gemm.m if group.shared == next(iter(members[0].operands)) else gemm.n
        whole = replace(
            members[0],
            operands=operands,
            elements=elements,
            num_bytes=sum(one.num_bytes for one in members),
            gemm=replace(gemm, m=rows, n=group.columns),
        )
        program.instructions.append(whole)
        at = len(program.instructions) - 1
        for member, one in zip(group.members, members, strict=True):
            program.instructions[member] = replace(
                one, kind="loop", primitive="slice", operands={at: one.elements / max(elements, 1.0)}, gemm=None
            )
    _sort(program)


def _sort(program: LocalProgram) -> None:
    """Renumber the instructions so that each follows its operands, otherwise in the order that they have."""
    order: list[int] = []
    place: dict[int, int] = {}
    for start in range(len(program.instructions)):
        left = [start]
        while left:
            at = left[-1]
            waits = [operand for operand in program.instructions[at].operands if operand not in place]
            if at not in place and not waits:
                place[at] = len(order)
                order.append(at)
            if not waits:
                left.pop()
            left += waits
    for one in program.instructions:
        one.operands = {place[operand]: times for operand, times in one.operands.items()}
    program.instructions = [program.instructions[at] for at in order]
    program.outputs = [at if at is None else place[at] for at in program.outputs]
    program.arguments = {position: place[at] for position, at in program.arguments.items()}
    program.at = {value: place[at] for value, at in program.at.items()}
    nodes = {place[at]: found for at, found in program.nodes.items()}
    program.nodes = defaultdict(list, nodes)
