"""Represent the result of a replay: step time, exposed communication, time per operation, a timeline.

In: made by `program`. Out: tables as text, and a trace for Perfetto.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.system.chrome_trace import named, slice_of, trace_of
from autopar.system.units import human_seconds


@dataclass(frozen=True, slots=True)
class OperationTime:
    """One instruction of the compiled program, over all its runs in a step, on one device.

    Args:
        name: name in the HLO.
        kind: `gemm`, `fusion`, `convolution`, `attention`, `all-reduce`, ...
        count: runs per step.
        seconds: time that it runs, hidden or not.
        exposed_s: time that kernels wait for this transfer; 0 for a kernel.
        flops, num_bytes: FLOPs; bytes of memory, or bytes sent by a transfer.
        bound: what limits it: `FLOPs`, `memory`, `latency`, `link` or `unknown`.
        op_name: JAX's name stack and primitive.
        source: `file.py:12` in the user's code; empty where XLA kept none.
    """

    name: str
    kind: str
    count: float
    seconds: float
    exposed_s: float
    flops: float
    num_bytes: float
    bound: str
    op_name: str = ""
    source: str = ""

    @property
    def is_transfer(self) -> bool:
        return self.bound == "link"


@dataclass(frozen=True, slots=True)
class Event:
    """A slice of the timeline: one run of a kernel or transfer, or the loop iterations that are not replayed one by
    one."""

    name: str
    stream: str
    start_s: float
    end_s: float
    op_name: str = ""


@dataclass(frozen=True, slots=True)
class Replay:
    """A step of one device as the replay runs it. An estimate by formulas, never a measurement.

    Args:
        step_time_s: time from the first kernel to the end of the last.
        kernels_s: time of all kernels.
        exposed_s: kind of transfer -> time that kernels wait for it; positive entries only.
        operations: the longest first.
        events: runs in order; a loop's second iteration stands for all later ones.
        notes: what the replay had to assume.
    """

    step_time_s: float
    kernels_s: float
    exposed_s: dict[str, float]
    operations: tuple[OperationTime, ...] = field(repr=False)
    events: tuple[Event, ...] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """FLOPs of matmuls, convolutions and attention on one device."""
        return sum(one.flops for one in self.operations)

    def by(self, key: Callable[[OperationTime], str]) -> dict[str, float]:
        """Seconds of the operations with each key, the longest first: a transfer's exposed time, a kernel's own."""
        total: dict[str, float] = defaultdict(float)
        for one in self.operations:
            total[key(one)] += one.exposed_s if one.is_transfer else one.seconds
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def by_kind(self) -> dict[str, float]:
        """Seconds by kind of operation."""
        return self.by(lambda one: one.kind)

    def by_source(self) -> dict[str, float]:
        """Seconds by source line."""
        return self.by(lambda one: one.source)

    def text(self, num_rows: int = 20) -> str:
        """The step time, where it goes by kind, and the longest operations."""
        exposed = ", ".join(f"{kind} {human_seconds(seconds)}" for kind, seconds in self.exposed_s.items())
        kinds = ", ".join(f"{kind} {human_seconds(seconds)}" for kind, seconds in self.by_kind().items() if seconds > 0)
        lines = [
            f"step time {human_seconds(self.step_time_s)}, replayed: an estimate by the device's rates, not a measurement",
            f"kernels {human_seconds(self.kernels_s)}, {self.flops / 1e12:.3g} TFLOP; exposed: {exposed or 'none'}",
            f"by kind: {kinds or 'nothing runs'}",
            *(f"note: {note}" for note in self.notes),
        ]
        return "\n".join([*lines, "", self.table(num_rows)])

    def __str__(self) -> str:
        return self.text()

    def table(self, num_rows: int = 20) -> str:
        """The longest operations as text: seconds, share, runs, what bounds each, and where it comes from."""
        rows = [("operation", "kind", "ms", "share", "exposed", "runs", "bound by", "from")]
        for one in self.operations[:num_rows]:
            share = 100 * one.seconds / self.step_time_s if self.step_time_s else 0.0
            exposed = f"{1e3 * one.exposed_s:.3f}" if one.is_transfer else ""
            where = one.source or one.op_name
            rows.append(
                (
                    one.name,
                    one.kind,
                    f"{1e3 * one.seconds:.3f}",
                    f"{share:.1f} %",
                    exposed,
                    f"{one.count:g}",
                    one.bound,
                    where,
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if len(self.operations) > num_rows:
            rest = sum(one.seconds for one in self.operations[num_rows:])
            lines.append(f"... {len(self.operations) - num_rows} more, {1e3 * rest:.3f} ms")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The replay without its timeline, as JSON types."""
        return {
            "step_time_s": self.step_time_s,
            "kernels_s": self.kernels_s,
            "exposed_s": self.exposed_s,
            "flops": self.flops,
            "notes": list(self.notes),
            "operations": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "count": one.count,
                    "seconds": one.seconds,
                    "exposed_s": one.exposed_s,
                    "flops": one.flops,
                    "num_bytes": one.num_bytes,
                    "bound": one.bound,
                    "op_name": one.op_name,
                    "source": one.source,
                }
                for one in self.operations
            ],
        }

    def perfetto(self, title: str = "one device, replayed") -> dict[str, Any]:
        """The timeline in Chrome's trace event format: a thread per stream; times in microseconds."""
        threads = {stream: n for n, stream in enumerate(_streams(self.events))}
        events = [named("process_name", 0, 0, title)]
        events += [named("thread_name", 0, thread, stream) for stream, thread in threads.items()]
        kinds = {one.name: one for one in self.operations}
        for event in self.events:
            known = kinds.get(event.name)
            about = {"op_name": event.op_name}
            if known is not None:
                about |= {"kind": known.kind, "bound by": known.bound, "source": known.source, "op_name": known.op_name}
            times = (1e6 * event.start_s, 1e6 * (event.end_s - event.start_s))
            kind = known.kind if known else event.stream
            events.append(slice_of(event.name, kind, (0, threads[event.stream]), times, about))
        return trace_of(events)

    def save_perfetto(self, path: str | os.PathLike[str], title: str = "one device, replayed") -> None:
        """Write the timeline to a file that ui.perfetto.dev loads."""
        Path(path).write_text(json.dumps(self.perfetto(title)), encoding="utf-8")


def _streams(events: Iterable[Event]) -> Sequence[str]:
    """The streams, kernels first."""
    found = dict.fromkeys(event.stream for event in events)
    return sorted(found, key=lambda stream: (stream != "kernels", stream == "loops", stream))
