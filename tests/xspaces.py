"""JAX profiles made by hand: an XSpace protobuf with the planes, lines and events of a test."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxlib import xla_client as _xla_client

US = 1e-6
_xla: Any = _xla_client


@dataclass(frozen=True)
class Kernel:
    """One event on a stream: start and duration in seconds, and the HLO instruction and module in its statistics."""

    name: str
    start_s: float
    seconds: float
    hlo_op: str = ""
    hlo_module: str = ""
    program_id: int = 7


@dataclass(frozen=True)
class Device:
    """The streams of one GPU; `modules` are runs of programs, as (start, duration) in seconds."""

    streams: Mapping[str, Sequence[Kernel]]
    modules: Sequence[tuple[float, float]] = ()
    module: str = "jit_run"
    kind: str = "NVIDIA H100 80GB HBM3"


def gpu_profile(
    folder: Path, devices: Sequence[Device], hlo: str | bytes = "", module: str = "jit_run", host: str = "host"
) -> Path:
    """Write a profile as `jax.profiler.trace(folder)` does; with the HLO of a program unless it is empty."""
    planes = [_device_plane(number, device) for number, device in enumerate(devices)]
    if hlo:
        planes.append(_metadata_plane(f"{module}(7)", hlo))
    return write(folder, planes, host)


def write(folder: Path, planes: Iterable[bytes], host: str = "host") -> Path:
    path = folder / "plugins" / "profile" / "2026_11_26_00_00_00" / f"{host}.xplane.pb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(_message(1, plane) for plane in planes))
    return folder


@dataclass
class _Names:
    """Numbers of the names of events or statistics in a plane."""

    numbers: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers) + 1)

    def entries(self, field_number: int) -> bytes:
        metadata = ((number, _int(1, number) + _text(2, name)) for name, number in self.numbers.items())
        return b"".join(_message(field_number, _int(1, number) + _message(2, body)) for number, body in metadata)


def parsed(hlo: str) -> Any:
    """XLA's own module of an HLO text."""
    return _xla.hlo.hlo_module_from_text(hlo)


def _device_plane(number: int, device: Device) -> bytes:
    events, stats = _Names(), _Names()
    lines = [_line(name, kernels, events, stats) for name, kernels in device.streams.items()]
    if device.modules:
        runs = [Kernel(f"{device.module}(7)", start, seconds) for start, seconds in device.modules]
        lines.append(_line("XLA Modules", runs, events, stats))
    about = _stat(stats("gpu_device_name"), device.kind)
    body = _text(2, f"/device:GPU:{number}") + b"".join(_message(3, line) for line in lines)
    return body + events.entries(4) + stats.entries(5) + _message(6, about)


def _line(name: str, kernels: Sequence[Kernel], events: _Names, stats: _Names) -> bytes:
    body = _text(2, name)
    for kernel in kernels:
        given: dict[str, Any] = {"hlo_op": kernel.hlo_op, "hlo_module": kernel.hlo_module}
        if kernel.hlo_module:
            given["program_id"] = kernel.program_id
        event = _int(1, events(kernel.name)) + _int(2, round(kernel.start_s * 1e12))
        event += _int(3, round(kernel.seconds * 1e12))
        event += b"".join(_message(4, _stat(stats(key), value)) for key, value in given.items() if value != "")
        body += _message(4, event)
    return body


def _metadata_plane(name: str, hlo: str | bytes) -> bytes:
    module = hlo if isinstance(hlo, bytes) else _serialized(hlo)
    stats = _Names()
    stat = _int(1, stats("Hlo Proto")) + _message(6, _message(1, module))
    metadata = _int(1, 7) + _text(2, name) + _message(5, stat)
    return _text(2, "/host:metadata") + _message(4, _int(1, 7) + _message(2, metadata)) + stats.entries(5)


def _serialized(hlo: str) -> bytes:
    module: bytes = parsed(hlo).as_serialized_hlo_module_proto()
    partitions = re.search(r"num_partitions=(\d+)", hlo)
    if partitions is not None:  # as XLA assigns devices to a program that it compiles: one replica, n partitions
        devices = b"".join(_message(3, _message(1, _varint(number))) for number in range(int(partitions[1])))
        module += _message(15, _int(1, 1) + _int(2, int(partitions[1])) + devices)
    return module


def _stat(number: int, value: str | int) -> bytes:
    return _int(1, number) + (_int(4, value) if isinstance(value, int) else _text(5, value))


def _int(field_number: int, value: int) -> bytes:
    return _varint(field_number << 3) + _varint(value)


def _text(field_number: int, text: str) -> bytes:
    return _message(field_number, text.encode())


def _message(field_number: int, body: bytes) -> bytes:
    return _varint(field_number << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
