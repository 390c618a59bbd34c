"""Align the kernels of a measured step with the instructions of its compiled program.

In: a scheduled HLO module, and the kernels of one step in order. Out: the instructions that launch kernels, each with
its kernels and their seconds.

XLA launches kernels in the order of its schedule. A fusion launches one kernel, after memory operations where it needs
them. The kernel has the fusion's name up to the number behind it, because identical fusions share one kernel. A library
call launches kernels with the library's names: one, with kernels that prepare it before it and kernels that finish it
after it, such as a memory operation and a split-K reduction. A loop of known trip count launches its body's kernels once per iteration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from autopar.xla_compiler.hlo_text import Computation, Instruction, Module

Kernel = tuple[str, float]

#: Instructions that launch nothing.
_FREE = frozenset(
    ["parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "add-dependency"]
)
_MEMORY = re.compile(r"mem(cpy|set)", re.I)
#: Kernels that prepare the kernel after them, and kernels that finish the library call before them.
_PREPARES = re.compile(rf"{_MEMORY.pattern}|init_device_workspace|compute_dot_do_o", re.I)
_FINISHES = re.compile(r"reduce|execute_split_k|convert_dq", re.I)


class AlignmentError(Exception):
    """The kernels are not those of the program, or a rule of this module does not hold for it."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """One run of an instruction, with the names of its kernels and their seconds."""

    instruction: Instruction
    kernels: tuple[str, ...]
    seconds: float


def align(module: Module, kernels: Sequence[Kernel]) -> list[Aligned]:
    """Align kernels with instructions.

    Raises:
        AlignmentError: the first kernel or instruction that does not match.
    """
    launching = list(_launching(module, module.main))
    stems = {stem(name) for name, _ in kernels}
    fusions = {stem(one.name) for one in launching if one.opcode == "fusion"} & stems
    found: list[Aligned] = []
    calls: list[Instruction] = []  # library calls, and fusions around one, before the next fusion
    at = 0
    for one in launching:
        if one.opcode != "fusion" or stem(one.name) not in fusions:
            calls.append(one)
            continue
        end = _next(kernels, at, fusions)
        matches = end < len(kernels) and stem(kernels[end][0]) == stem(one.name)
        if not matches and at < end < len(kernels):  # a fusion around a sort launches the library's kernels
            calls.append(one)
            continue
        if not matches:
            name = "the end" if end == len(kernels) else kernels[end][0]
            raise AlignmentError(f"kernel {end} of {len(kernels)} is {name!r}, not that of {one.name!r}")
        own = end
        while own > at and is_memory(kernels[own - 1][0]):
            own -= 1
        if calls and own == at:  # only memory operations: those of the calls
            own = end
        found += _of_calls(calls, kernels[at:own])
        found.append(_aligned(one, kernels[own : end + 1]))
        calls, at = [], end + 1
    end = _next(kernels, at, fusions)
    if end < len(kernels):
        raise AlignmentError(f"kernel {end} of {len(kernels)} is {kernels[end][0]!r}, after the last fusion's")
    return found + _of_calls(calls, kernels[at:])


def _next(kernels: Sequence[Kernel], at: int, fusions: Set[str]) -> int:
    """The number of the next kernel of a fusion; that of all kernels if there is none."""
    return next((number for number in range(at, len(kernels)) if stem(kernels[number][0]) in fusions), len(kernels))


def stem(name: str) -> str:
    """A kernel's or an instruction's name without the numbers behind it.

    >>> stem("loop_add_fusion_198"), stem("loop_add_fusion.12.3"), stem("wrapped-transpose")
    ('loop_add_fusion', 'loop_add_fusion', 'wrapped_transpose')
    """
    return re.sub(r"(_\d+)+$", "", name.replace(".", "_").replace("-", "_"))


def is_memory(kernel: str) -> bool:
    """Whether a kernel copies or sets memory."""
    return _MEMORY.search(kernel) is not None


def _launching(module: Module, computation: Computation) -> Iterator[Instruction]:
    """The instructions that launch kernels, in order, those of loops and calls in place."""
    for one in computation.instructions:
        if one.opcode in _FREE:
            continue
        if one.opcode == "while":
            if one.trip_count is None:
                raise AlignmentError(f"loop {one.name!r} has no known trip count")
            body = module.computations[one.attribute("body").lstrip("%")]
            for _ in range(one.trip_count):
                yield from _launching(module, body)
        elif one.opcode == "call":
            yield from _launching(module, module.called(one)[0])
        elif one.opcode == "conditional":
            raise AlignmentError(f"the branch of {one.name!r} is not known")
        elif not one.opcode.endswith("-done"):
            yield one


def _of_calls(calls: Sequence[Instruction], kernels: Sequence[Kernel]) -> list[Aligned]:
    """The kernels between two fusions, one group for each library call."""
    groups: list[list[Kernel]] = []
    for name, seconds in kernels:
        continues = bool(groups) and bool(_PREPARES.search(groups[-1][-1][0]) or _FINISHES.search(name))
        if not continues:
            groups.append([])
        groups[-1].append((name, seconds))
    if len(calls) == len(kernels):
        groups = [[kernel] for kernel in kernels]
    elif len(calls) == 1 and kernels:
        groups = [list(kernels)]
    if len(groups) < len(calls):  # a copy whose source and destination share memory launches nothing
        calls = [one for one in calls if not one.opcode.startswith("copy")]
    if len(groups) != len(calls):
        raise AlignmentError(
            f"{len(calls)} library calls ({', '.join(one.name for one in calls[:3])}) and {len(groups)} groups of"
            f" kernels ({', '.join(group[0][0][:40] for group in groups[:3])})"
        )
    return [_aligned(one, group) for one, group in zip(calls, groups, strict=True)]


def _aligned(one: Instruction, kernels: Sequence[Kernel]) -> Aligned:
    return Aligned(one, tuple(name for name, _ in kernels), sum(seconds for _, seconds in kernels))
