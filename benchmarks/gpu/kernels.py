"""Time each kernel with JAX's profiler.

In: a function to run. Out: what ran on the devices, summed by kernel, or in order of execution.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

#: Patterns for what a kernel computes; the first match counts. Names are those of cuBLAS, cuDNN, NCCL, XLA and Triton.
_FAMILIES = (
    ("collective", re.compile(r"nccl|all[-_]?reduce|all[-_]?gather|reduce[-_]?scatter|all[-_]?to[-_]?all", re.I)),
    ("attention", re.compile(r"fmha|flash|sdpa|attention", re.I)),
    ("convolution", re.compile(r"conv(?!ert)|implicit|dgrad|wgrad|fprop|winograd", re.I)),
    ("matmul", re.compile(r"gemm|cutlass|xmma|nvjet|cublas|matmul|\bdot", re.I)),
    ("copy", re.compile(r"memcpy|memset|copy|transpose", re.I)),
    ("reduction", re.compile(r"reduce", re.I)),
)
#: Number of kernels that a record names; the rest become one entry.
_MOST_NAMED = 40


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel or memory operation that a device ran."""

    device: str
    name: str
    begin_s: float
    seconds: float


def profiled(run: Callable[[], Any], num_runs: int) -> list[Event]:
    """Everything that XLA's programs run in `num_runs` calls of `run`, which blocks."""
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        try:
            for _ in range(num_runs):
                run()
        finally:
            jax.profiler.stop_trace()
        return [event for path in Path(folder).rglob("*.xplane.pb") for event in _events(path)]


def _events(path: Path) -> list[Event]:
    found: list[Event] = []
    for plane in ProfileData.from_file(str(path)).planes:
        on_device = plane.name.startswith("/device:")
        if not on_device and plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            if on_device and not line.name.startswith("Stream"):
                continue  # the same events again, by module and by operation
            for event in line.events:
                stats = {key: value for key, value in event.stats if key in ("hlo_op", "device_ordinal")}
                if not on_device and "hlo_op" not in stats:
                    continue
                device = plane.name if on_device else f"cpu:{stats.get('device_ordinal', 0)}"
                found.append(Event(device, event.name, event.start_ns * 1e-9, event.duration_ns * 1e-9))
    return found


def summed(events: Sequence[Event], num_runs: int) -> dict[str, Any]:
    """Times per run and device.

    Returns:
        `busy_s`, the time in which any kernel runs; `kernel_s`, the sum over kernels; `families`, seconds by what they
            compute; `kernels`, seconds and count by name, the slowest first.
    """
    devices = sorted({event.device for event in events})
    parts = max(1, len(devices)) * num_runs
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event in events:
        seconds[event.name] += event.seconds / parts
        counts[event.name] += 1
    families: dict[str, float] = defaultdict(float)
    for name, each in seconds.items():
        families[family(name)] += each
    ranked = sorted(seconds, key=lambda name: -seconds[name])
    named = {name: {"seconds": seconds[name], "count": counts[name] / parts} for name in ranked[:_MOST_NAMED]}
    rest = ranked[_MOST_NAMED:]
    if rest:
        named["all others"] = {
            "seconds": sum(seconds[name] for name in rest),
            "count": sum(counts[name] for name in rest) / parts,
        }
    spans = {one: [(e.begin_s, e.begin_s + e.seconds) for e in events if e.device == one] for one in devices}
    return {
        "busy_s": sum(map(_union, spans.values())) / parts,
        "kernel_s": sum(seconds.values()),
        "families": dict(sorted(families.items(), key=lambda one: -one[1])),
        "kernels": named,
    }


def in_order(events: Sequence[Event], num_runs: int) -> list[tuple[str, float]] | None:
    """Name and mean seconds of each kernel of a run, in order of execution.

    If the runs differ in their order, the last one counts alone; if they differ in number, there is no result.
    """
    ordered = sorted(events, key=lambda event: event.begin_s)
    num, rest = divmod(len(ordered), num_runs)
    if rest:
        return None
    same = list(zip(*(ordered[number * num : (number + 1) * num] for number in range(num_runs)), strict=True))
    if any(len({event.name for event in each}) > 1 for each in same):
        same = [each[-1:] for each in same]
    return [(each[0].name, sum(event.seconds for event in each) / len(each)) for each in same]


def family(name: str) -> str:
    """What a kernel computes, by its name.

    >>> family("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN"), family("loop_add_fusion_3")
    ('matmul', 'elementwise')
    >>> family("convert_reduce_fusion"), family("sm90_xmma_fprop_implicit_gemm_bf16bf16")
    ('reduction', 'convolution')
    """
    return next((words for words, pattern in _FAMILIES if pattern.search(name)), "elementwise")


def _union(spans: list[tuple[float, float]]) -> float:
    """Seconds covered by the union of the spans."""
    covered, last = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, last))
        last = max(last, end)
    return covered
