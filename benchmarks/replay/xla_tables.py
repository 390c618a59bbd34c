"""Read the measured GEMMs and collectives that XLA's CUDA plugin carries.

The tables are read from the installed wheel each time and never copied into the repository.
"""

from __future__ import annotations

import importlib.util
import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BYTES = mmap.mmap | bytes


@dataclass(frozen=True, slots=True)
class Gemm:
    """A measured GEMM: dims, and operations per second by XLA's name of the dtypes."""

    batch: int
    m: int
    n: int
    k: int
    rates: Mapping[str, float]

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.m, self.n, self.k


@dataclass(frozen=True, slots=True)
class Collective:
    """A measured collective.

    Args:
        num_bytes: bytes of the full buffer: of an all-gather's result, of any other's operand.
        pattern: pairs of a collective-permute, `shift`, `exchange` or `one-way`; empty for other kinds.
    """

    kind: str
    num_devices: int
    num_bytes: int
    seconds: float
    pattern: str = ""


def plugin() -> mmap.mmap:
    """The shared object of the installed CUDA plugin."""
    for cuda in ("xla_cuda12", "xla_cuda13"):
        found = importlib.util.find_spec(f"jax_plugins.{cuda}")
        if found is not None and found.origin is not None:
            with (Path(found.origin).parent / "xla_cuda_plugin.so").open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    raise SystemExit("the tables are in the wheel jax-cuda12-pjrt: pip install 'autopar[verify]'")


def read_gemms(binary: mmap.mmap, device: str) -> list[Gemm]:
    """Rows of a device, from the text proto `xla.GemmPerfTable`."""
    inside = binary.find(b"proto-message: xla.GemmPerfTable")
    text = binary[binary.rfind(b"\0", 0, inside) + 1 : binary.find(b"\0", inside)].decode()
    block = next(b for b in re.split(r"\nentries \{\n  key: ", text)[1:] if b.startswith(f'"{device}"'))
    row = re.compile(r"entries \{\s+b: (\d+)\s+m: (\d+)\s+n: (\d+)\s+k: (\d+)((?:\s+flops \{[^}]*\})*)")
    rate = re.compile(r'key: "([^"]+)" value: (\d+)')
    return [
        Gemm(int(b), int(m), int(n), int(k), {name: float(value) for name, value in rate.findall(rates)})
        for b, m, n, k, rates in row.findall(block)
    ]


def read_collectives(binary: mmap.mmap, device: str) -> list[Collective]:
    """Rows of a device, from the binary proto `xla.gpu.DeviceHloInstructionProfiles`.

    Field numbers are those of openxla/xla: hlo_op_profile.proto, hlo.proto, xla_data.proto.
    """
    name = device.encode()
    prefix = bytes([0x0A, len(name)]) + name + b"\x12"
    size, start = _varint(binary, binary.find(prefix) + len(prefix))
    rows = []
    for _, entry in _fields(binary[start : start + size]):
        parts = dict(_fields(entry))
        fields = list(_fields(parts[1]))
        instruction = dict(fields)
        kind, pattern = instruction[2].decode(), ""
        num_bytes = 4 * _varint(dict(_fields(instruction[3]))[3], 0)[0]
        if kind == "collective-permute":
            pairs = [dict(_fields(pair)) for number, pair in fields if number == 52]
            num_devices, pattern = len(pairs), _pattern([(pair.get(1, 0), pair.get(2, 0)) for pair in pairs])
        else:
            num_devices = dict(_fields(instruction[92]))[2]
        if kind == "reduce-scatter":
            num_bytes *= num_devices
        rows.append(Collective(kind, num_devices, num_bytes, num_bytes / parts[6], pattern))
    return rows


def _pattern(pairs: list[tuple[int, int]]) -> str:
    both = {source for source, _ in pairs} & {target for _, target in pairs}
    return "one-way" if not both else "exchange" if (pairs[0][1], pairs[0][0]) in pairs else "shift"


def _varint(data: _BYTES, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
        else:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value
