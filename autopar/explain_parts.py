"""Where the time of a step and the memory of a device go: parts that sum up to what a plan predicts.

In: a plan. Out: `StepTime` and `MemoryUse`, which every report of a plan reads.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.graph.ir import Phase
from autopar.plan import Plan
from autopar.step_trace import Held, Instant


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Seconds of a step that collectives of one kind take: exposed ones make it longer, hidden ones run beside kernels."""

    kind: str
    exposed_s: float
    hidden_s: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """The step time is `compute_s` and what of all collectives is exposed; the most exposed are first."""

    step_time_s: float
    compute_s: float
    collectives: tuple[CollectiveTime, ...]

    @property
    def parts(self) -> list[tuple[str, float]]:
        """Names and seconds that sum up to the step time."""
        exposed = [(one.kind, one.exposed_s) for one in self.collectives if one.exposed_s]
        return [("compute", self.compute_s), *exposed]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device.

    Args:
        parts: names and bytes that sum up to the peak; the temporaries are those of the peak.
        steady_bytes: of these, what is held throughout: all but the temporaries.
        over_step: all that is held, the most in each of equal parts of the step time; its largest is the peak. Empty
            where the plan does not say.
        phases: what runs in how many of these parts, one after the other.
        loops: the first part, the one after the last, and the number of trips; all trips are drawn as one.
        at_peak: the most of the temporaries at the peak, the largest first. peak: what runs then.
    """

    peak_bytes: float
    budget_bytes: float | None
    parts: tuple[tuple[str, float], ...]
    steady_bytes: float
    over_step: tuple[float, ...] = ()
    phases: tuple[tuple[Phase, int], ...] = ()
    loops: tuple[tuple[int, int, int], ...] = ()
    peak: Instant | None = None
    at_peak: tuple[Held, ...] = ()


def step_time(plan: Plan) -> StepTime:
    """Where the time of a step goes.

    What is hidden is that of the plan's schedule, in which XLA's merging has been done; of a plan that has none, what its
    collectives take one by one beyond what is exposed.
    """
    told, trace = plan.prediction, plan.trace
    hidden: dict[str, float] = defaultdict(float)
    if trace is None:
        hidden |= {kind: max(0.0, all_s - told.exposed_s.get(kind, 0.0)) for kind, all_s in told.collective_s.items()}
    else:
        sent = trace.collectives
        for kind, ns, exposed_ns in zip(sent.kind, sent.ns, sent.exposed_ns, strict=True):
            hidden[trace.kinds[kind][0]] += 1e-9 * max(0, ns - exposed_ns)
    kinds = sorted({*told.exposed_s, *hidden}, key=lambda kind: (-told.exposed_s.get(kind, 0.0), kind))
    each = (CollectiveTime(kind, told.exposed_s.get(kind, 0.0), hidden.get(kind, 0.0)) for kind in kinds)
    return StepTime(
        told.step_time_s, told.compute_s, tuple(one for one in each if one.exposed_s > 0 or one.hidden_s > 0)
    )


def memory_use(plan: Plan) -> MemoryUse:
    """What a device holds, and when."""
    told, kept = plan.prediction, plan.memory
    parts = [
        ("parameters", told.parameter_bytes),
        ("optimizer state", told.optimizer_bytes),
        ("data", told.data_bytes),
        ("temporaries", told.temporary_bytes),
        ("outputs", told.output_bytes),
    ]
    use = MemoryUse(
        peak_bytes=told.peak_bytes,
        budget_bytes=plan.memory_budget_bytes,
        parts=tuple(parts),
        steady_bytes=told.peak_bytes - told.temporary_bytes,
    )
    if kept is None:
        return use
    # Temporaries are less at all times but the peak: counted down from it, the curve's largest is the peak to the byte.
    least = (told.peak_bytes - (told.temporary_bytes - live) for live in kept.live_bytes)
    return MemoryUse(
        use.peak_bytes,
        use.budget_bytes,
        use.parts,
        use.steady_bytes,
        over_step=tuple(least),
        phases=kept.phases,
        loops=kept.loops,
        peak=kept.peak,
        at_peak=kept.at_peak,
    )
