"""One step on one device over time, as a plan keeps it: what runs when, and what is in memory meanwhile.

In: filled by `over_time` when a plan is made. Out: read by what explains a plan. A few columns of numbers, not a record for
each kernel, so that a plan's file stays small, and two plans in version control differ in few lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Phase
from autopar.plans.json_codec import WrongFieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRuns:
    """Kernels of one place that run one after another, as columns: a run is one position of all of them.

    Args:
        place: position in `StepTrace.places`.
        start_ns: from the start of the step. ns: how long its kernels take together.
    """

    place: tuple[int, ...]
    start_ns: tuple[int, ...]
    ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRuns:
    """Collectives of one kind and place that follow each other, as columns.

    Args:
        kind: position in `StepTrace.kinds`. place: in `StepTrace.places`.
        start_ns, ns: as of kernels. exposed_ns: of that, what no kernel hides.
        num_bytes: payload on one device, of all their trips. count: how many there are, trips included.
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
    """What one device runs when, at the rates that the plan is priced by. Kernels run one after another; collectives one
    after another beside them.

    Args:
        places: phase and module path.
        kinds: of collectives, with the mesh axes they run over.
        loops: start, end and number of trips; all trips are drawn as one.
    """

    places: tuple[tuple[Phase, str], ...]
    kinds: tuple[tuple[str, tuple[str, ...]], ...]
    kernels: KernelRuns
    collectives: CollectiveRuns
    loops: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Values alike that are in memory at the peak, on one device.

    Args:
        path: module path of what makes them, or of the input they are gathered from; `h_{0..11}` where they differ in a
            number alone.
        primitive: what makes them; "" for a gathered input.
        shape: of one of them, on all devices.
        num_bytes: of all of them together, on one device.
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
    """The operation that runs while most is in memory."""

    path: str
    primitive: str
    phase: Phase
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverStep:
    """Bytes on one device, besides arguments and outputs, over a step.

    Args:
        live_bytes: the most in each of so many equal parts of the step time. The largest is the plan's prediction.
        phases: what runs in how many of these parts, one after the other.
        loops: the first part, the one after the last, and the number of trips; all trips are drawn as one.
        peak: what runs while most is held. at_peak: the most of what is held then, the largest first.
    """

    live_bytes: tuple[float, ...]
    phases: tuple[tuple[Phase, int], ...]
    peak: Instant
    at_peak: tuple[Held, ...]
    loops: tuple[tuple[int, int, int], ...] = ()


def check_trace(trace: StepTrace | None, memory: MemoryOverStep | None) -> None:
    """Refuse columns of unequal lengths, and positions that point nowhere.

    Raises:
        WrongFieldError: naming the field.
    """
    if memory is not None and sum(parts for _, parts in memory.phases) != len(memory.live_bytes):
        raise WrongFieldError("memory.phases", f"must have {len(memory.live_bytes)} parts together")
    if trace is None:
        return
    kernels, sent = trace.kernels, trace.collectives
    lanes = (
        ("kernels", (kernels.place, kernels.start_ns, kernels.ns)),
        ("collectives", (sent.kind, sent.place, sent.start_ns, sent.ns, sent.exposed_ns, sent.num_bytes, sent.count)),
    )
    for name, columns in lanes:
        if len(set(map(len, columns))) > 1:
            raise WrongFieldError(f"trace.{name}", f"has columns of {sorted(set(map(len, columns)))} entries")
    for name, positions, size in (
        ("kernels.place", kernels.place, len(trace.places)),
        ("collectives.place", sent.place, len(trace.places)),
        ("collectives.kind", sent.kind, len(trace.kinds)),
    ):
        if any(not 0 <= position < size for position in positions):
            raise WrongFieldError(f"trace.{name}", f"points outside a list of {size}")
