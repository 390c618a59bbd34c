"""Where the time of a step and the memory of a device go: parts that sum up to what a plan predicts.

In: a plan. Out: `StepTime` and `MemoryUse`, and in words what a headline must not leave out; every report of a plan reads them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.ir.graph import Phase
from autopar.plans.plan import Plan
from autopar.plans.records import num_split
from autopar.plans.step_trace import Held, Instant
from autopar.system.text_tables import share_text
from autopar.system.units import human_flops, human_number, human_seconds

#: Operations named of those that run replicated; the notes name all.
MAX_NAMED = 4
#: What the two step times of a plan are called, wherever one is told, and what each is.
PREDICTED, SIMULATED = "predicted step time", "XLA's estimate, simulated"
PREDICTED_IS = "by the planner's own model of the device: what a clock is expected to show"
SIMULATED_IS = "what XLA's latency estimator should say; `verify` compares it"


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


# -- in words --------------------------------------------------------------------------------


def efficiency_words(plan: Plan) -> str:
    """MFU, model FLOPs, throughput and what bounds the step; "" where the plan's file is too old to know."""
    found, step_s = plan.efficiency, plan.prediction.step_time_s
    if found is None or step_s <= 0:
        return ""
    parts = []
    if found.model_flops:
        parts.append(f"{100 * found.ideal_s / step_s:.0f} % MFU ({human_flops(found.model_flops)} a step)")
    if found.num_tokens:
        parts.append(f"{human_number(found.num_tokens / step_s)} tokens/s")
    if found.num_examples:
        parts.append(f"{human_number(found.num_examples / step_s)} examples/s")
    if found.bound_s:
        bound, seconds = max(found.bound_s.items(), key=lambda one: one[1])
        parts.append(f"bound by {bound} ({share_text(seconds, sum(found.bound_s.values()))} of the time)")
    return "; ".join(parts)


def replicated_words(plan: Plan) -> str:
    """What runs replicated for lack of a sharding rule, and its share of the step; "" where nothing does."""
    count = sum(one.count for one in plan.replicated)
    if not count or plan.mesh.num_devices == 1:
        return ""
    named = [f"`{one.name}`" + (f" x{one.count}" if one.count > 1 else "") for one in plan.replicated]
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    seconds, step_s = sum(one.time_s for one in plan.replicated), plan.prediction.step_time_s
    part = 100 * seconds / step_s if step_s > 0 else 0.0
    have = "operation has no sharding rule and runs" if count == 1 else "operations have no sharding rule and run"
    return (
        f"{count} {have} replicated on all {plan.mesh.num_devices} devices: {', '.join(named[:MAX_NAMED])}{more};"
        f" {f'{part:.0f} %' if part >= 1 else 'under 1 %'} of the step"
    )


def tie_words(plan: Plan) -> str:
    """By how much the fastest plan found is faster than this simpler one; "" where none is."""
    tie = plan.tie
    if tie is None:
        return ""
    where = "" if tie.mesh == plan.mesh else f", on mesh {tie.mesh}"
    faster = f"{100 * tie.faster:.2f} %" if tie.faster >= 5e-5 else "under 0.01 %"
    return (
        f"of the plans within 0.5 % of the fastest this is the simplest, with {num_split(plan.inputs)} arguments split."
        f" {faster} faster, with {tie.num_split} split: {tie.words}{where}"
    )


def simulated_words(plan: Plan) -> str:
    """What XLA's latency estimator is expected to say, where the plan has that: the other of two step times."""
    told = plan.prediction
    return "" if told.xla_step_time_s is None else f"{SIMULATED}: {human_seconds(told.xla_step_time_s)}"
