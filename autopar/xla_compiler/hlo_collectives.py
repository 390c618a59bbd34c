"""Reads the collectives out of a compiled program's text, to hold a plan's promises against it.

In: the text of a compiled program, from the CPU or the GPU compiler. Out: one `Collective` per
operation that talks to other devices. A combined (tuple-shaped) operation is one; so is an async
pair, read at its `-done`, whose shape is the result alone (a `-start` lists operands and results).
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
        name: of the instruction.
        op_name: where JAX made it: name stack and primitive; "" where XLA kept none.
        source: `file.py:12` in the user's code; "" where XLA kept none.
        replica_groups: the text, as the compiler wrote it.
        groups: the devices of each group, or (source, target) pairs of a permute; empty for all in one.
        dtypes: of its results, each once, sorted.
        num_elements: of all its results on one device.
        result_bytes: of each of its results on one device: as many as it combines.
        num_times: how often a step runs it: the trips of the loops around it, where XLA knows them.
        joined_bytes: of each of the buffers that its operand is a concatenation of; empty where it is none.
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
    joined_bytes: tuple[float, ...] = ()
    library_source: str = ""

    @property
    def num_results(self) -> int:
        return len(self.result_bytes)

    @property
    def num_bytes(self) -> float:
        """Bytes of all its results on one device."""
        return sum(self.result_bytes)

    def payloads(self, num_devices: int) -> tuple[float, ...]:
        """Bytes of each buffer it combines, by the convention of `cost.collectives`: the full (gathered
        or unscattered) local one."""
        if self.kind == "reduce-scatter":
            return tuple(self.group_size(num_devices) * size for size in self.result_bytes)
        # The parts of an all-to-all written as a tuple are one buffer.
        return (self.num_bytes,) if self.kind == "all-to-all" else self.result_bytes

    def parts(self, num_devices: int) -> tuple[float, ...]:
        """`payloads`, with what XLA has concatenated taken apart."""
        payloads, joined = self.payloads(num_devices), sum(self.joined_bytes)
        if len(payloads) != 1 or not joined:
            return payloads
        return tuple(payloads[0] * size / joined for size in self.joined_bytes)

    def group_size(self, num_devices: int) -> int:
        """Devices that take part together."""
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
        """Operands and called computations, in order; scheduling-only dependencies left out."""
        data = re.sub(r"control-predecessors=\{[^}]*\}", "", self.rest.split(", metadata=")[0])
        return re.findall(r"%([\w.\-]+)", data)


def collectives(hlo_text: str, ignore_up_to: int = 64, unknown_trips: int = 1) -> list[Collective]:
    """Every collective with more result elements than `ignore_up_to`, in the order of the text.

    The default leaves out scalars (a loss, a gradient norm) and other values too small to plan for.

    Args:
        unknown_trips: what a loop counts as whose trips XLA does not know.
    """
    found = (one for _, one in _read(hlo_text, unknown_trips) if one is not None)
    return [one for one in found if one.num_elements > ignore_up_to]


def has_loops(hlo_text: str) -> bool:
    """Whether some of the program runs more than once in a step."""
    return " while(" in hlo_text


def count(hlo_text: str, ignore_up_to: int = 64) -> dict[str, int]:
    """Collectives by kind, as they stand in the text.

    XLA combines gradient all-reduces into one, on CPU (seen on jax 0.10.2 and 0.12.0.1) as on GPU.
    """
    return dict(Counter(one.kind for one in collectives(hlo_text, ignore_up_to)))


def result_bytes(hlo_text: str, ignore_up_to: int = 64) -> dict[str, float]:
    """Bytes of the results on one device, by kind."""
    total: dict[str, float] = {}
    for one in collectives(hlo_text, ignore_up_to):
        total[one.kind] = total.get(one.kind, 0.0) + one.num_bytes
    return total


def _read(hlo_text: str, unknown_trips: int = 1) -> list[tuple[_Instruction, Collective | None]]:
    """Instructions in the order of the text, in which each follows its operands and callees."""
    computation, known = "", {}
    for line in hlo_text.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif parts := _INSTRUCTION.match(line):
            instruction = _Instruction(computation, *parts.groups())
            known[computation, instruction.name] = instruction
    sources, times = read_sources(hlo_text), _num_times(list(known.values()), unknown_trips)
    joins: dict[str, _Instruction] = {}  # computation -> what it concatenates, or where it is called from
    for one in known.values():
        if one.opcode == "concatenate":
            joins[one.computation] = one
        elif one.opcode == "async-start":
            joins[one.mentioned[-1]] = one
    return [(one, _collective(one, known, sources, times, joins)) for one in known.values()]


def _num_times(instructions: Sequence[_Instruction], unknown_trips: int) -> dict[str, int]:
    """How often a step runs each computation."""
    times: dict[str, int] = {}
    if all(one.opcode != "while" for one in instructions):  # the common case, in a fraction of the time
        return times
    for instruction in reversed(instructions):  # callers stand after what they call
        here = times.setdefault(instruction.computation, 1)
        if instruction.opcode == "while":
            trips = _TRIP_COUNT.search(instruction.rest)
            here *= int(trips[1]) if trips else unknown_trips
        for name in instruction.mentioned:
            times[name] = max(times.get(name, 1), here)
    return times


def _collective(
    instruction: _Instruction,
    known: Mapping[tuple[str, str], _Instruction],
    sources: Mapping[int, tuple[str, str]],
    times: Mapping[str, int],
    joins: Mapping[str, _Instruction],
) -> Collective | None:
    kind = _KIND.fullmatch(instruction.opcode)
    if kind is None:
        return None
    # A `-done` has the shape of the result; groups and origin stand at its `-start`.
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
        joined_bytes=_joined(issued, known, joins) if len(arrays) == 1 else (),
    )


def _joined(
    issued: _Instruction, known: Mapping[tuple[str, str], _Instruction], joins: Mapping[str, _Instruction]
) -> tuple[float, ...]:
    """What the operand is put together from: XLA's combiner concatenates in a fusion of that alone."""
    operand = known.get((issued.computation, issued.mentioned[0])) if issued.mentioned else None
    if operand is not None and operand.opcode == "parameter" and issued.computation in joins:
        caller = joins[issued.computation]  # XLA writes an async collective as a computation of its own, too
        operands, index = caller.mentioned, int(operand.rest.split(")")[0])
        # A loop's computation has another caller: one operand, which is all that it carries.
        operand = known.get((caller.computation, operands[index])) if index < len(operands) else None
    while operand is not None and operand.opcode in ("bitcast", "copy", "reshape"):
        operand = known.get((operand.computation, operand.mentioned[0]))
    if operand is not None and operand.opcode == "fusion":
        operand = next((joins[name] for name in operand.mentioned if name in joins), None)
    if operand is None or operand.opcode != "concatenate":
        return ()
    sizes = [_num_bytes(known.get((operand.computation, name))) for name in operand.mentioned]
    return tuple(sizes) if all(sizes) and len(sizes) > 1 else ()


def _num_bytes(instruction: _Instruction | None) -> float:
    arrays = _ARRAY.findall(instruction.shape) if instruction else []
    return sum(_size(dims) * _bits(dtype) / 8 for dtype, dims in arrays)


def _source(rest: str, sources: Mapping[int, tuple[str, str]]) -> tuple[str, str]:
    """The line itself (JAX up to 0.8), or a frame of the tables at the head of the text; and the same of a library."""
    if frame := re.search(r"stack_frame_id=(\d+)", rest):
        return sources.get(int(frame[1]), ("", ""))
    place = re.search(r'source_file="([^"]*)" source_line=(\d+)', rest)
    line = f"{place[1]}:{place[2]}" if place else ""
    return line, line


def _size(dims: str) -> int:
    """Elements of an array whose dims are written `32,64`, or empty for a scalar."""
    return math.prod(int(size) for size in dims.split(",") if size)


def _bits(dtype: str) -> int:
    """Width of an element: the first number in the dtype's name, 8 for `pred`."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8
