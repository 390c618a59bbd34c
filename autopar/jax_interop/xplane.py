"""Read JAX profiles (`*.xplane.pb`) with JAX's own reader: planes, lines, events, and the optimized HLO of each program.

In: the bytes of a profile. Out: `Plane`s with the events of devices; HLO text by program. `jax.profiler.ProfileData`
does not return the HLO, which is in the metadata of a plane without events; that plane is read from the protobuf itself.
"""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.profiler import ProfileData

#: A program: the name of its HLO module and the number that its process gave it; -1 where the profile has none.
ProgramKey: TypeAlias = tuple[str, int]

_METADATA_PLANE = "/host:metadata"
_READ_MODULE = """
import sys
from jaxlib import xla_client

module = xla_client.XlaComputation(sys.stdin.buffer.read()).get_hlo_module()
sys.stdout.buffer.write(module.to_string(xla_client.hlo.HloPrintOptions()).encode())
"""
#: Statistics of an event that are read.
_WANTED = frozenset(("hlo_op", "hlo_module", "program_id", "run_id", "device_ordinal"))
# Fields of XSpace, XPlane, XEventMetadata, XStat and HloProto (tsl/profiler/protobuf/xplane.proto, xla/service/hlo.proto).
_PLANES, _PLANE_NAME, _EVENT_METADATA, _STAT_METADATA = 1, 2, 4, 5
_ENTRY_VALUE, _METADATA_NAME, _METADATA_STATS = 2, 2, 5
_STAT_ID, _STAT_BYTES, _HLO_MODULE = 1, 6, 1
_DEVICE_ASSIGNMENT, _COMPUTATION_COUNT = 15, 2
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Event:
    """One event: a kernel, a copy, or the run of an operation on a host thread.

    Args:
        stats: those of `hlo_op`, `hlo_module`, `program_id`, `run_id`, `device_ordinal` that the event has.
    """

    name: str
    start_ns: float
    duration_ns: float
    stats: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """The events of one stream or thread."""

    name: str
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Plane:
    """The lines of one device, or of the host."""

    name: str
    stats: Mapping[str, Any]
    lines: tuple[Line, ...]


def read_planes(data: bytes) -> tuple[Plane, ...]:
    """The planes of a profile; on the host, only events that belong to an HLO instruction.

    Raises:
        ValueError: the bytes are no profile.
    """
    try:
        profile = ProfileData.from_serialized_xspace(data)
    except (RuntimeError, TypeError) as error:
        raise ValueError(str(error)) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the reader's own types, on Python 3.13
        return tuple(
            Plane(
                plane.name,
                {name: value for name, value in plane.stats if name},
                tuple(_line(line, is_host=not plane.name.startswith("/device:")) for line in plane.lines),
            )
            for plane in profile.planes
        )


def _line(line: Any, *, is_host: bool) -> Line:
    found = []
    for event in line.events:
        stats = {name: value for name, value in event.stats if name in _WANTED}
        if not is_host or "hlo_op" in stats:
            found.append(Event(event.name, event.start_ns, event.duration_ns, stats))
    return Line(line.name, tuple(found))


def hlo_modules(data: bytes, wanted: Collection[str]) -> dict[ProgramKey, bytes]:
    """The serialized HLO modules of the programs with these names, as far as the profile holds them.

    Raises:
        ValueError: the bytes are no profile.
    """
    found: dict[ProgramKey, bytes] = {}
    for field, _, plane in _fields(memoryview(data)):
        if field == _PLANES and _text(plane, _PLANE_NAME) == _METADATA_PLANE:
            for name, module in _hlo_protos(plane):
                if (key := _program(name))[0] in wanted:
                    found[key] = module
    return found


def module_text(module: bytes) -> str:
    """The text of a serialized module, with its number of partitions, which XLA does not print for a read module.

    XLA aborts its process on some damaged modules, so a process of its own reads them.

    Raises:
        ValueError: XLA cannot read the module.
    """
    read = subprocess.run([sys.executable, "-c", _READ_MODULE], input=module, capture_output=True, check=False)
    if read.returncode:
        raise ValueError("XLA cannot read the HLO module of the profile")
    text = read.stdout.decode("utf-8", "replace")
    assigned = next(_of(memoryview(module), _DEVICE_ASSIGNMENT), None)
    head, newline, rest = text.partition("\n")
    if assigned is not None and "num_partitions=" not in head:
        head += f", num_partitions={_number(assigned, _COMPUTATION_COUNT)}"
    return head + newline + rest


def _hlo_protos(plane: memoryview) -> Iterator[tuple[str, bytes]]:
    """The name of each program and its serialized HloModuleProto."""
    hlo_stats = {
        _number(value, _STAT_ID)
        for value in map(_entry, _of(plane, _STAT_METADATA))
        if _text(value, _METADATA_NAME) in ("Hlo Proto", "hlo_proto")
    }
    for metadata in map(_entry, _of(plane, _EVENT_METADATA)):
        for stat in _of(metadata, _METADATA_STATS):
            if _number(stat, _STAT_ID) in hlo_stats:
                for proto in _of(stat, _STAT_BYTES):
                    for module in _of(proto, _HLO_MODULE):
                        yield _text(metadata, _METADATA_NAME), bytes(module)


def _program(name: str) -> ProgramKey:
    """`jit_step(3)` as its name and number."""
    numbered = re.fullmatch(r"(.*)\((\d+)\)", name)
    return (numbered[1], int(numbered[2])) if numbered else (name, -1)


# -- protobuf ------------------------------------------------------------------------------------


def _fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Number, wire type and value of each field of a message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        field, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield field, wire, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)
        if wire == _LENGTH:
            size, at = _varint(data, at)
        if (size == 0 and wire != _LENGTH) or at + size > len(data):
            raise ValueError("a damaged protobuf message")
        yield field, wire, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a damaged protobuf message")


def _of(message: memoryview, field: int) -> Iterator[memoryview]:
    return (value for number, wire, value in _fields(message) if number == field and wire == _LENGTH)


def _entry(entry: memoryview) -> memoryview:
    """The value of a map's entry."""
    return next(_of(entry, _ENTRY_VALUE), memoryview(b""))


def _text(message: memoryview, field: int) -> str:
    return bytes(next(_of(message, field), memoryview(b""))).decode("utf-8", "replace")


def _number(message: memoryview, field: int) -> int:
    return next((value for number, wire, value in _fields(message) if number == field and wire == _VARINT), 0)
