"""Give the copies of one operand that several matmuls read one order of dims, where XLA's layout assignment does.

In: a `LocalProgram` whose matmuls are merged. Out: the same program with fewer copies. Source: openxla/xla,
xla/backends/gpu/transforms/layout_assignment.cc; its effect as found by compiling attention layers (JAX 0.12).
"""

from __future__ import annotations

from collections.abc import Hashable

from autopar.ir.graph import Graph
from autopar.rules.contraction import is_matmul
from autopar.rules.table import traits_of
from autopar.xla_model.local_program import Instruction, LocalProgram


def share_copies(program: LocalProgram, graph: Graph) -> None:
    """Replace all but the first copy of each operand, in place.

    A kernel of a library writes its result in row-major order, so that matmuls that read it in different orders need a
    copy each. A computed operand (a slice of a merged matmul, a rotated key) has the order that its first reader asks for,
    and the other matmuls read that as well.
    """
    first: dict[Hashable, int] = {}
    same: dict[int, int] = {}  # an instruction -> the one that replaces it
    for at, one in enumerate(program.instructions):
        one.operands = {same.get(operand, operand): times for operand, times in one.operands.items()}
        key = _key(one, graph)
        if key is None or not _is_computed(program, next(iter(one.operands))):
            continue
        if key in first:
            same[at] = first[key]
            program.instructions[first[key]].moves_rows |= one.moves_rows
        else:
            first[key] = at


def _key(one: Instruction, graph: Graph) -> Hashable | None:
    """What equal copies share; None for an instruction that is not a copy that a matmul reads, or a computation on one."""
    if one.node < 0 or one.kind != "loop" or len(one.operands) < 1 or not is_matmul(graph.nodes[one.node]):
        return None
    return one.primitive, one.value, tuple(one.operands)


def _is_computed(program: LocalProgram, at: int) -> bool:
    """Whether an instruction has no order of dims of its own.

    It has that of an array in row-major order if it is a chain of elementwise operations on one, and row-major order if it
    reads a reduction of its rows, as a softmax does, since one kernel computes whole rows.
    """
    is_computed, left, seen = False, [at], set[int]()
    while left:
        one = program.instructions[left.pop()]
        if one.kind != "loop":
            continue
        if not traits_of(one.primitive).elementwise:
            is_computed = True
            continue
        if any(program.instructions[o].kind == "reduce" for o in one.operands):
            return False
        full = [o for o in one.operands if program.instructions[o].elements == one.elements]
        is_computed |= len(full) != 1
        left += [o for o in full if o not in seen]
        seen |= set(full)
    return is_computed
