"""Define the timeline of a step on one device: kernels, collectives and live memory.

In: filled when a plan is made. Out: columns of numbers that reports read. There is no record per kernel, so that a plan
file stays small and two plans differ in few lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Phase
from autopar.plans.json_codec import WrongFieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRuns:
    """Runs of consecutive kernels of one place, as columns: run *i* is position *i* of each column.

    Args:
        place: position in `StepTrace.places`.
        start_ns: time since the start of the step.
        ns: total time of its kernels.
    """

    place: tuple[int, ...]
    start_ns: tuple[int, ...]
    ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRuns:
    """Runs of consecutive collectives of one kind and place, as columns.

    Args:
        kind: position in `StepTrace.kinds`.
        place: position in `StepTrace.places`.
        start_ns, ns: start and total time, as for kernels.
        exposed_ns: exposed part of the time.
        num_bytes: payload on one device over all iterations.
        count: number of collectives over all iterations.
    """

    kind: tuple[int, ...]
    place: tuple[int, ...]
    start_ns: tuple[int, ...]
    ns: tuple[int, ...]
    exposed_ns: tuple[int, ...]
    num_bytes: tuple[float, ...]
    count: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """The timeline of one device at the predicted rates: one stream of kernels and one concurrent stream of collectives.

    Args:
        places: phase and module path of each place.
        kinds: kinds of collectives, with the mesh axes that they run over.
        loops: start, end and trip count of each loop; all iterations are drawn as one.
    """

    places: tuple[tuple[Phase, str], ...]
    kinds: tuple[tuple[str, tuple[str, ...]], ...]
    kernels: KernelRuns
    collectives: CollectiveRuns
    loops: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBuffer:
    """A set of similar values that are live at peak memory.

    Args:
        path: module path of their producers, or path of the input that they are gathered from; `h_{0..11}` if paths
            differ in a number only.
        primitive: their producer; "" for a gathered input.
        shape: global shape of one value.
        num_bytes: size of all of them on one device.
    """

    path: str
    primitive: str
    phase: Phase
    source: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    num_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """The operation at peak memory."""

    path: str
    primitive: str
    phase: Phase
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverStep:
    """The live temporaries on one device over a step.

    Args:
        live_bytes: maximum in each of a number of equal parts of the step time; the largest is the plan's prediction.
        phases: consecutive phases, with the number of parts of each.
        peak: operation at peak memory.
        at_peak: largest sets of values live at peak memory, largest first.
        loops: first part, part after the last, and trip count of each loop; all iterations are drawn as one.
    """

    live_bytes: tuple[float, ...]
    phases: tuple[tuple[Phase, int], ...]
    peak: Instant
    at_peak: tuple[LiveBuffer, ...]
    loops: tuple[tuple[int, int, int], ...] = ()


def check_trace(trace: StepTrace | None, memory: MemoryOverStep | None) -> None:
    """Check that columns have equal lengths and that positions are in range.

    Raises:
        WrongFieldError: a check fails; it names the field.
    """
    if memory is not None and sum(parts for _, parts in memory.phases) != len(memory.live_bytes):
        raise WrongFieldError("memory.phases", f"must have {len(memory.live_bytes)} parts together")
    if trace is None:
        return
    kernels, sent = trace.kernels, trace.collectives
    streams = (
        ("kernels", (kernels.place, kernels.start_ns, kernels.ns)),
        ("collectives", (sent.kind, sent.place, sent.start_ns, sent.ns, sent.exposed_ns, sent.num_bytes, sent.count)),
    )
    for name, columns in streams:
        if len(set(map(len, columns))) > 1:
            raise WrongFieldError(f"trace.{name}", f"has columns of {sorted(set(map(len, columns)))} entries")
    for name, positions, size in (
        ("kernels.place", kernels.place, len(trace.places)),
        ("collectives.place", sent.place, len(trace.places)),
        ("collectives.kind", sent.kind, len(trace.kinds)),
    ):
        if any(not 0 <= position < size for position in positions):
            raise WrongFieldError(f"trace.{name}", f"points outside a list of {size}")
