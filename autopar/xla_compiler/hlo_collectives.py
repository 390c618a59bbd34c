"""Parse the collectives in optimized HLO, so that a plan's predictions can be compared with them.

In: the HLO text of XLA's CPU or GPU compiler. Out: one `Collective` per operation that communicates. A combined
(tuple-shaped) operation counts once. So does an async pair, which is read at its `-done`: its shape is the result's,
while a `-start` lists operands and results.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.xla_compiler.hlo_metadata import Groups, read_groups
from autopar.xla_compiler.hlo_text import Computation, Instruction, Module, parse_module

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_KIND = re.compile(rf"({'|'.join(KINDS)})(-done)?")
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=(.+?)(?:, (?!device_ids=)[a-z_]+=|$)")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective operation of the compiled program.

    Args:
        kind: as in `KINDS`.
        name: name of the instruction.
        op_name: JAX's name stack and primitive; "" where XLA kept none.
        source: `file.py:12` in the user's code; "" where XLA kept none.
        replica_groups: the groups as XLA wrote them.
        groups: devices of each group, or (source, target) pairs of a permute; empty for one group of all devices.
        dtypes: distinct dtypes of the results, sorted.
        num_elements: elements of all results on one device.
        result_bytes: bytes of each result on one device; a combined collective has several.
        num_times: executions per step: the product of the trip counts of the loops around it, where XLA knows them.
        concatenated_bytes: bytes of each buffer that the operand is a concatenation of; empty where it is none.
        library_source: `file.py:12` of the innermost line outside JAX, Flax and Optax; "" where XLA kept none.
    """

    kind: str
    name: str
    op_name: str
    source: str
    replica_groups: str
    groups: Groups
    dtypes: tuple[str, ...]
    num_elements: int
    result_bytes: tuple[float, ...]
    num_times: int = 1
    concatenated_bytes: tuple[float, ...] = ()
    library_source: str = ""

    @property
    def num_results(self) -> int:
        return len(self.result_bytes)

    @property
    def num_bytes(self) -> float:
        """Bytes of all its results on one device."""
        return sum(self.result_bytes)

    def payloads(self, num_devices: int) -> tuple[float, ...]:
        """Payload bytes of each combined buffer, by the convention of `cost.collectives`."""
        if self.kind == "reduce-scatter":
            return tuple(self.group_size(num_devices) * size for size in self.result_bytes)
        # An all-to-all may list the parts of one buffer as a tuple.
        return (self.num_bytes,) if self.kind == "all-to-all" else self.result_bytes

    def parts(self, num_devices: int) -> tuple[float, ...]:
        """`payloads`, with concatenated buffers split again."""
        payloads, whole = self.payloads(num_devices), sum(self.concatenated_bytes)
        if len(payloads) != 1 or not whole:
            return payloads
        return tuple(payloads[0] * size / whole for size in self.concatenated_bytes)

    def group_size(self, num_devices: int) -> int:
        """Devices per group."""
        return len(self.groups[0]) if self.groups else num_devices


def collectives(hlo: Module | str, ignore_up_to: int = 64, unknown_trip_counts: int = 1) -> list[Collective]:
    """The collectives with more than `ignore_up_to` result elements, in the order of the text.

    The default leaves out scalars (a loss, a gradient norm) and other values too small to plan for.

    Args:
        unknown_trip_counts: assumed trip count of a loop whose trip count XLA does not know.
    """
    if isinstance(hlo, str):
        if not any(kind in hlo for kind in KINDS):  # a fast path: most programs of one device have none
            return []
        hlo = parse_module(hlo)
    module = hlo
    times = _num_times(module, unknown_trip_counts)
    starts = {
        one.callees[0]: (computation, one)
        for computation in module.computations.values()
        for one in computation.instructions
        if one.opcode == "async-start" and one.callees
    }
    found = (
        _collective(module, computation, one, times.get(computation.name, 1), starts)
        for computation in module.computations.values()
        for one in computation.instructions
    )
    return [one for one in found if one is not None and one.num_elements > ignore_up_to]


def count(hlo_text: str, ignore_up_to: int = 64) -> dict[str, int]:
    """Number of collectives by kind in the text.

    XLA combines gradient all-reduces into one on CPU (seen with JAX 0.10.2 and 0.12.0.1) and on GPU.
    """
    return dict(Counter(one.kind for one in collectives(hlo_text, ignore_up_to)))


def result_bytes(hlo_text: str, ignore_up_to: int = 64) -> dict[str, float]:
    """Result bytes on one device by kind of collective."""
    total: dict[str, float] = {}
    for one in collectives(hlo_text, ignore_up_to):
        total[one.kind] = total.get(one.kind, 0.0) + one.num_bytes
    return total


def sent_bytes(kind: str, payload: float, num_devices: int) -> float:
    """Bytes that one device sends in a ring, for a payload by the convention of `cost.collectives`.

    >>> sent_bytes("all-reduce", 800.0, 8), sent_bytes("all-gather", 800.0, 8), sent_bytes("collective-permute", 8.0, 8)
    (1400.0, 700.0, 8.0)
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return payload
    return (2 if kind == "all-reduce" else 1) * (num_devices - 1) / num_devices * payload


def groups_of(one: Instruction) -> tuple[str, Groups]:
    """Replica groups, or the source-target pairs of a permute: as XLA wrote them, and as device numbers."""
    found = _GROUPS.search(one.attributes)
    return (found[1], read_groups(found[1])) if found else ("", ())


def source_of(one: Instruction, sources: Mapping[int, tuple[str, str]]) -> tuple[str, str]:
    """The source lines of an instruction (see `read_sources`), from its own metadata where it has no stack frame."""
    if frame := re.search(r"stack_frame_id=(\d+)", one.attributes):
        return sources.get(int(frame[1]), ("", ""))
    place = re.search(r'source_file="([^"]*)" source_line=(\d+)', one.attributes)
    line = f"{place[1]}:{place[2]}" if place else ""
    return line, line


def _num_times(module: Module, unknown_trip_counts: int) -> dict[str, int]:
    """Executions per step of each computation."""
    times = {module.entry: 1}
    for computation in reversed(module.computations.values()):  # callers come after their callees
        for one in computation.instructions:
            here = times.get(computation.name, 1)
            if one.opcode == "while":
                here *= unknown_trip_counts if one.trip_count is None else one.trip_count
            for callee in one.callees:
                times[callee] = max(times.get(callee, 1), here)
    return times


def _collective(
    module: Module,
    computation: Computation,
    one: Instruction,
    num_times: int,
    starts: Mapping[str, tuple[Computation, Instruction]],
) -> Collective | None:
    kind = _KIND.fullmatch(one.opcode)
    if kind is None:
        return None
    # A `-done` has the shape of the result; its `-start` has groups and metadata.
    issued = computation.by_name[one.operands[0].name] if kind[2] else one
    text, groups = groups_of(issued)
    source, library_source = source_of(issued, module.sources)
    arrays = one.shape.leaves
    return Collective(
        kind=kind[1],
        name=issued.name,
        op_name=issued.op_name,
        source=source,
        library_source=library_source,
        replica_groups=text,
        groups=groups,
        dtypes=tuple(sorted({array.dtype for array in arrays})),
        num_elements=one.shape.num_elements,
        result_bytes=tuple(array.num_bytes for array in arrays),
        num_times=num_times,
        concatenated_bytes=_concatenated(module, computation, issued, starts) if len(arrays) == 1 else (),
    )


def _concatenated(
    module: Module,
    computation: Computation,
    issued: Instruction,
    starts: Mapping[str, tuple[Computation, Instruction]],
) -> tuple[float, ...]:
    """Bytes of the parts of a concatenated operand; XLA's combiner emits a fusion with the concatenate alone."""
    if not issued.operands:
        return ()
    operand = computation.by_name.get(issued.operands[0].name)
    if operand is not None and operand.opcode == "parameter" and computation.name in starts:
        computation, start = starts[computation.name]  # XLA may wrap an async collective in a computation
        operand = computation.by_name.get(start.operands[int(operand.literal)].name)
    while operand is not None and operand.opcode in ("bitcast", "copy", "reshape"):
        operand = computation.by_name.get(operand.operands[0].name)
    if operand is not None and operand.opcode == "fusion":
        computation = module.called(operand)[0]
        operand = next((one for one in computation.instructions if one.opcode == "concatenate"), None)
    if operand is None or operand.opcode != "concatenate":
        return ()
    sizes = [computation.shape_of(part).num_bytes for part in operand.operands]
    return tuple(sizes) if all(sizes) and len(sizes) > 1 else ()
