"""Hold the runs of one program in a profile, and sum them by HLO instruction.

In: made by `read`. Out: `Profile`; `OperationRuns` per instruction, on average over devices and steps.

Exposed time: at each instant of a step, one operation counts. A kernel counts before a transfer, and the one that
started first before a later one. So the exposed times of all operations and the idle time sum to the step time.
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.xla_compiler.hlo_collectives import KINDS
from autopar.xla_compiler.hlo_text import Instruction, Module

_KIND = re.compile(rf"(?:{'|'.join(sorted(KINDS, key=len, reverse=True))})(?=$|[-.\d])")
#: Parts of the names of NCCL's kernels, and the collectives that they run.
_NCCL = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "sendrecv": "collective-permute",
    "broadcast": "collective-broadcast",
}
#: A kernel counts as concurrent with a transfer if they overlap for more than this fraction of its time.
_CONCURRENT = 0.05
_HOST_COPY = re.compile(r"Memcpy(?:H2D|D2H|HtoD|DtoH)")


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One run of a kernel on a device.

    Args:
        operation: name of its HLO instruction; empty where the profile has none.
        kernel: name of the kernel.
        kind: collective or `host-copy` for a transfer; empty for other kernels.
        stream: name of the stream or host thread.
    """

    operation: str
    kernel: str
    kind: str
    start_s: float
    end_s: float
    stream: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Step:
    """One run of the program on one device, with its kernels in the order of their starts."""

    start_s: float
    end_s: float
    runs: tuple[KernelRun, ...] = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class DeviceRuns:
    """The complete steps of one device."""

    name: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class OperationRuns:
    """All runs of one HLO instruction. Seconds per step are means over devices and steps.

    Args:
        operation: name of the instruction; the kernel's name in parentheses where the profile has no instruction.
        kind: collective or `host-copy`; empty for kernels.
        num_runs: runs in the whole profile.
        runs_per_step: runs per device and step.
        median_s: median of one run.
        total_s: all runs together.
        seconds: time per step, hidden or not.
        exposed_s: time per step that counts towards the step time.
        alone_s: time of one execution without a concurrent transfer: the sum of the medians of its kernels, of which a
            library may run several. None if a kernel always ran during a transfer.
        fastest_s: the least time over devices, because the other devices wait for the last one; the median over runs of
            a collective.
    """

    operation: str
    kind: str
    num_runs: int
    runs_per_step: float
    median_s: float
    total_s: float
    seconds: float
    exposed_s: float
    alone_s: float | None
    fastest_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The runs of one program.

    Args:
        files: files that it was read from.
        program: name of the HLO module.
        platform: `gpu` or `cpu`.
        device_kind: as the driver names the device; empty where the profile does not say.
        hlo_text: optimized HLO of the program; empty where the profile does not hold it.
        other_programs: device seconds of the other programs in the profile.
        notes: what was left out or assumed.
    """

    files: tuple[str, ...]
    program: str
    platform: str
    device_kind: str
    devices: tuple[DeviceRuns, ...] = field(repr=False)
    hlo_text: str = field(default="", repr=False)
    other_programs: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of all devices."""
        return tuple(step for device in self.devices for step in device.steps)

    @property
    def num_steps(self) -> int:
        """Steps of the device with the fewest."""
        return min(len(device.steps) for device in self.devices)

    @property
    def step_time_s(self) -> float:
        """Mean time of a step, from its first kernel to the end of its last."""
        return statistics.fmean(step.seconds for step in self.steps)

    @property
    def period_s(self) -> float | None:
        """Median time from the start of a step to that of the next, which includes waits for the host."""
        found = [
            later.start_s - step.start_s
            for device in self.devices
            for step, later in zip(device.steps, device.steps[1:], strict=False)
        ]
        return statistics.median(found) if found else None

    @property
    def idle_s(self) -> float:
        """Mean time of a step in which a device runs no kernel and no transfer."""
        return self.step_time_s - sum(one.exposed_s for one in operations(self))


def kind_of(operation: str, kernel: str = "") -> str:
    """The collective that an instruction or a kernel runs, by its name; `host-copy`; empty for other kernels.

    >>> kind_of("all-reduce-start.3"), kind_of("", "ncclDevKernel_AllGather_RING_LL"), kind_of("loop_add_fusion")
    ('all-reduce', 'all-gather', '')
    """
    if found := _KIND.match(operation):
        return found[0]
    if kernel.startswith("nccl"):
        return next((kind for part, kind in _NCCL.items() if part in kernel.lower()), "all-reduce")
    return "host-copy" if _HOST_COPY.match(kernel) else ""


def by_instruction(module: Module) -> dict[str, Instruction]:
    """The instructions of all computations by name; XLA's names are unique in a module."""
    return {
        one.name: one
        for computation in module.computations.values()
        for one in computation.instructions
        if one.opcode not in ("parameter", "constant")
    }


def issued_kind(module: Module, one: Instruction) -> str:
    """The collective of an instruction: its own, or the one in the computation of an asynchronous pair."""
    opcode = one.opcode.removesuffix("-start").removesuffix("-done")
    if opcode in KINDS:
        return opcode
    if one.opcode == "async-start" and (called := module.called(one)):
        return issued_kind(module, called[0].root)
    return ""


def operations(profile: Profile) -> tuple[OperationRuns, ...]:
    """The operations of a profile, the one with the most exposed time first."""
    runs: dict[str, list[KernelRun]] = defaultdict(list)
    alone: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    exposed: dict[str, float] = defaultdict(float)
    for step in profile.steps:
        transfers = merged((run.start_s, run.end_s) for run in step.runs if run.kind)
        for run, seconds in exposed_seconds(step.runs):
            name = run.operation or f"({run.kernel})"
            runs[name].append(run)
            exposed[name] += seconds
            by_kernel = alone[name][run.kernel]
            if run.kind or overlap_s(transfers, run.start_s, run.end_s) < _CONCURRENT * run.seconds:
                by_kernel.append(run.seconds)
    num_steps = len(profile.steps)
    fastest = _fastest(profile)
    found = (
        OperationRuns(
            operation=name,
            kind=members[0].kind,
            num_runs=len(members),
            runs_per_step=len(members) / num_steps,
            median_s=statistics.median(run.seconds for run in members),
            total_s=sum(run.seconds for run in members),
            seconds=sum(run.seconds for run in members) / num_steps,
            exposed_s=exposed[name] / num_steps,
            alone_s=sum(map(statistics.median, alone[name].values())) if all(alone[name].values()) else None,
            fastest_s=fastest.get(name, statistics.median(run.seconds for run in members)),
        )
        for name, members in runs.items()
    )
    return tuple(sorted(found, key=lambda one: (-one.exposed_s, -one.seconds, one.operation)))


def _fastest(profile: Profile) -> dict[str, float]:
    """For each collective, the median over its runs of the least time over devices."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(profile.num_steps):
        steps = [device.steps[number] for device in profile.devices]
        by_device = [_by_operation(step) for step in steps]
        for name in set.intersection(*map(set, by_device)):
            found[name] += [min(runs) for runs in zip(*(runs[name] for runs in by_device), strict=False)]
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _by_operation(step: Step) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for run in step.runs:
        if run.kind:
            found[run.operation or f"({run.kernel})"].append(run.seconds)
    return found


# -- intervals -----------------------------------------------------------------------------------


def exposed_seconds(runs: Sequence[KernelRun]) -> list[tuple[KernelRun, float]]:
    """The exposed time of each run: kernels first, then transfers, each by its start."""
    claimed: list[tuple[float, float]] = []
    found = []
    for is_transfer in (False, True):
        members = sorted((run for run in runs if bool(run.kind) == is_transfer), key=lambda run: run.start_s)
        until, own = float("-inf"), []
        for run in members:
            start = max(run.start_s, until)
            seconds = max(0.0, run.end_s - start)
            hidden = overlap_s(claimed, start, run.end_s) if is_transfer and seconds else 0.0
            found.append((run, max(0.0, seconds - hidden)))
            own.append((run.start_s, run.end_s))
            until = max(until, run.end_s)
        claimed = merged([*claimed, *own])
    return found


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals as disjoint ones in order.

    >>> merged([(3, 4), (0, 1), (1, 2)])
    [(0, 2), (3, 4)]
    """
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlap_s(disjoint: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """How much of an interval a union of disjoint intervals in order covers."""
    at = max(0, bisect_left(disjoint, (start, start)) - 1)
    total = 0.0
    for low, high in disjoint[at:]:
        if low >= end:
            break
        total += max(0.0, min(high, end) - max(low, start))
    return total
