"""Parse the collectives in optimized HLO, so that a plan's predictions can be compared with them.

In: the HLO text of XLA's CPU or GPU compiler. Out: one `Collective` per operation that communicates. A combined
(tuple-shaped) operation counts once. So does an async pair, which is read at its `-done`: its shape is the result's,
while a `-start` lists operands and results.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.xla_compiler.hlo_metadata import Groups, read_groups, read_sources

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_KIND = re.compile(rf"({'|'.join(KINDS)})(-done)?")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+|c64|c128)\[([\d,]*)\]")
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=(.+?)(?:, (?!device_ids=)[a-z_]+=|$)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


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


@dataclass(frozen=True, slots=True)
class _Instruction:
    computation: str
    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def mentioned(self) -> list[str]:
        """Operands and called computations in order, without control dependencies."""
        data = re.sub(r"control-predecessors=\{[^}]*\}", "", self.rest.split(", metadata=")[0])
        return re.findall(r"%([\w.\-]+)", data)


def collectives(hlo_text: str, ignore_up_to: int = 64, unknown_trip_counts: int = 1) -> list[Collective]:
    """The collectives with more than `ignore_up_to` result elements, in the order of the text.

    The default leaves out scalars (a loss, a gradient norm) and other values too small to plan for.

    Args:
        unknown_trip_counts: assumed trip count of a loop whose trip count XLA does not know.
    """
    found = (one for _, one in _read(hlo_text, unknown_trip_counts) if one is not None)
    return [one for one in found if one.num_elements > ignore_up_to]


def has_loops(hlo_text: str) -> bool:
    """Whether the program has a loop."""
    return " while(" in hlo_text


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


def _read(hlo_text: str, unknown_trip_counts: int = 1) -> list[tuple[_Instruction, Collective | None]]:
    """The instructions in the order of the text, in which operands and callees precede their users."""
    computation, known = "", {}
    for line in hlo_text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif parts := _INSTRUCTION.match(line):
            instruction = _Instruction(computation, *parts.groups())
            known[computation, instruction.name] = instruction
    sources, times = read_sources(hlo_text), _num_times(list(known.values()), unknown_trip_counts)
    concatenates: dict[str, _Instruction] = {}  # computation -> its concatenate, or the async-start that calls it
    for one in known.values():
        if one.opcode == "concatenate":
            concatenates[one.computation] = one
        elif one.opcode == "async-start":
            concatenates[one.mentioned[-1]] = one
    return [(one, _collective(one, known, sources, times, concatenates)) for one in known.values()]


def _num_times(instructions: Sequence[_Instruction], unknown_trip_counts: int) -> dict[str, int]:
    """Executions per step of each computation."""
    times: dict[str, int] = {}
    if all(one.opcode != "while" for one in instructions):  # a fast path for the common case
        return times
    for instruction in reversed(instructions):  # callers come after their callees
        here = times.setdefault(instruction.computation, 1)
        if instruction.opcode == "while":
            trip_count = _TRIP_COUNT.search(instruction.rest)
            here *= int(trip_count[1]) if trip_count else unknown_trip_counts
        for name in instruction.mentioned:
            times[name] = max(times.get(name, 1), here)
    return times


def _collective(
    instruction: _Instruction,
    known: Mapping[tuple[str, str], _Instruction],
    sources: Mapping[int, tuple[str, str]],
    times: Mapping[str, int],
    concatenates: Mapping[str, _Instruction],
) -> Collective | None:
    kind = _KIND.fullmatch(instruction.opcode)
    if kind is None:
        return None
    # A `-done` has the shape of the result; its `-start` has groups and metadata.
    issued = known[instruction.computation, instruction.mentioned[0]] if kind[2] else instruction
    groups = _GROUPS.search(issued.rest)
    source, library_source = _source(issued.rest, sources)
    op_name = re.search(r'op_name="([^"]*)"', issued.rest)
    arrays = [(dtype, _size(dims)) for dtype, dims in _ARRAY.findall(instruction.shape)]
    return Collective(
        kind=kind[1],
        name=issued.name,
        op_name=op_name[1] if op_name else "",
        source=source,
        library_source=library_source,
        replica_groups=groups[1] if groups else "",
        groups=read_groups(groups[1]) if groups else (),
        dtypes=tuple(sorted({dtype for dtype, _ in arrays})),
        num_elements=sum(size for _, size in arrays),
        result_bytes=tuple(size * _bits(dtype) / 8 for dtype, size in arrays),
        num_times=times.get(instruction.computation, 1),
        concatenated_bytes=_concatenated(issued, known, concatenates) if len(arrays) == 1 else (),
    )


def _concatenated(
    issued: _Instruction, known: Mapping[tuple[str, str], _Instruction], concatenates: Mapping[str, _Instruction]
) -> tuple[float, ...]:
    """Bytes of the parts of a concatenated operand; XLA's combiner emits a fusion with the concatenate alone."""
    operand = known.get((issued.computation, issued.mentioned[0])) if issued.mentioned else None
    if operand is not None and operand.opcode == "parameter" and issued.computation in concatenates:
        caller = concatenates[issued.computation]  # XLA may wrap an async collective in a computation
        operands, index = caller.mentioned, int(operand.rest.split(")")[0])
        # A loop's body has another caller, with one operand: the tuple of carried values.
        operand = known.get((caller.computation, operands[index])) if index < len(operands) else None
    while operand is not None and operand.opcode in ("bitcast", "copy", "reshape"):
        operand = known.get((operand.computation, operand.mentioned[0]))
    if operand is not None and operand.opcode == "fusion":
        operand = next((concatenates[name] for name in operand.mentioned if name in concatenates), None)
    if operand is None or operand.opcode != "concatenate":
        return ()
    sizes = [_num_bytes(known.get((operand.computation, name))) for name in operand.mentioned]
    return tuple(sizes) if all(sizes) and len(sizes) > 1 else ()


def _num_bytes(instruction: _Instruction | None) -> float:
    arrays = _ARRAY.findall(instruction.shape) if instruction else []
    return sum(_size(dims) * _bits(dtype) / 8 for dtype, dims in arrays)


def _source(rest: str, sources: Mapping[int, tuple[str, str]]) -> tuple[str, str]:
    """The source lines of an instruction, from its own metadata (JAX up to 0.8) or from the table of stack frames."""
    if frame := re.search(r"stack_frame_id=(\d+)", rest):
        return sources.get(int(frame[1]), ("", ""))
    place = re.search(r'source_file="([^"]*)" source_line=(\d+)', rest)
    line = f"{place[1]}:{place[2]}" if place else ""
    return line, line


def _size(dims: str) -> int:
    """Number of elements of an array with dims `32,64`; a scalar has an empty text."""
    return math.prod(int(size) for size in dims.split(",") if size)


def _bits(dtype: str) -> int:
    """Bits of an element: the first number in the dtype's name, 8 for `pred`."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8
