"""Break a plan's step time and memory down into parts that sum up to the prediction.

In: a plan. Out: `StepTime` and `MemoryUse`, and the sentences of a summary; every report of a plan reads them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.cost.kernel_time import ALIGNED_BYTES, UNALIGNED
from autopar.ir.graph import Phase
from autopar.pipeline.plan import AnyPlan
from autopar.plans.plan import Plan
from autopar.plans.records import num_split
from autopar.plans.step_trace import Instant, LiveBuffer
from autopar.system.text_tables import share_text
from autopar.system.units import human_flops, human_number, human_seconds

#: The number of replicated operations that a summary names; the notes name all.
MAX_NAMED = 4
#: The least share of the step that a summary says is lost.
_WORTH_A_WORD = 0.01
#: The names of a plan's two step times in every report, and their descriptions.
PREDICTED, SIMULATED = "predicted step time", "XLA's estimate, simulated"
PREDICTED_TEXT = "by the planner's own model of the device: the expected wall-clock time"
SIMULATED_TEXT = "expected from XLA's latency estimator; `verify` compares it"


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Seconds of the collectives of one kind: exposed ones lengthen the step, hidden ones overlap with kernels."""

    kind: str
    exposed_s: float
    hidden_s: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """The step time is `compute_s` plus all exposed communication; the most exposed kind is first."""

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
    """The memory of one device, in bytes.

    Args:
        parts: names and bytes that sum up to the peak; temporaries are those live at the peak.
        steady_bytes: the bytes that are live throughout the step: all parts but the temporaries.
        over_step: the peak of live bytes in each of several equal intervals of the step; their maximum is the peak.
            Empty if the plan has no such data.
        phases: the phases in order, and the number of intervals of each.
        loops: for each loop, its first interval, the one after its last, and its trip count; all iterations are drawn
            as one.
        peak: the operation that runs at the peak.
        at_peak: the largest temporaries live at the peak.
    """

    peak_bytes: float
    budget_bytes: float | None
    parts: tuple[tuple[str, float], ...]
    steady_bytes: float
    over_step: tuple[float, ...] = ()
    phases: tuple[tuple[Phase, int], ...] = ()
    loops: tuple[tuple[int, int, int], ...] = ()
    peak: Instant | None = None
    at_peak: tuple[LiveBuffer, ...] = ()


def step_time(plan: Plan) -> StepTime:
    """Break a step's time down.

    Hidden communication comes from the plan's timeline, after XLA's combining. For a plan without a timeline, it is the
    sum of its collectives' times minus the exposed time.
    """
    prediction, trace = plan.prediction, plan.trace
    hidden: dict[str, float] = defaultdict(float)
    if trace is None:
        hidden |= {
            kind: max(0.0, all_s - prediction.exposed_s.get(kind, 0.0))
            for kind, all_s in prediction.collective_s.items()
        }
    else:
        sent = trace.collectives
        for kind, ns, exposed_ns in zip(sent.kind, sent.ns, sent.exposed_ns, strict=True):
            hidden[trace.kinds[kind][0]] += 1e-9 * max(0, ns - exposed_ns)
    kinds = sorted({*prediction.exposed_s, *hidden}, key=lambda kind: (-prediction.exposed_s.get(kind, 0.0), kind))
    times = (CollectiveTime(kind, prediction.exposed_s.get(kind, 0.0), hidden.get(kind, 0.0)) for kind in kinds)
    return StepTime(
        prediction.step_time_s,
        prediction.compute_s,
        tuple(one for one in times if one.exposed_s > 0 or one.hidden_s > 0),
    )


def memory_use(plan: Plan) -> MemoryUse:
    """Break the memory of a device down by part and over the step."""
    prediction, timeline = plan.prediction, plan.memory
    parts = [
        ("parameters", prediction.parameter_bytes),
        ("optimizer state", prediction.optimizer_bytes),
        ("data", prediction.data_bytes),
        ("temporaries", prediction.temporary_bytes),
        ("outputs", prediction.output_bytes),
    ]
    use = MemoryUse(
        peak_bytes=prediction.peak_bytes,
        budget_bytes=plan.memory_budget_bytes,
        parts=tuple(parts),
        steady_bytes=prediction.peak_bytes - prediction.temporary_bytes,
    )
    if timeline is None:
        return use
    # Subtract from the peak, so that the maximum of the curve equals the peak to the byte.
    live = (prediction.peak_bytes - (prediction.temporary_bytes - temporaries) for temporaries in timeline.live_bytes)
    return MemoryUse(
        use.peak_bytes,
        use.budget_bytes,
        use.parts,
        use.steady_bytes,
        over_step=tuple(live),
        phases=timeline.phases,
        loops=timeline.loops,
        peak=timeline.peak,
        at_peak=timeline.at_peak,
    )


# -- text ------------------------------------------------------------------------------------


def efficiency_text(plan: AnyPlan) -> str:
    """MFU, model FLOPs, throughput and the bottleneck of the step; "" if the plan's file is too old to have them."""
    efficiency, step_s = plan.efficiency, plan.prediction.step_time_s
    if efficiency is None or step_s <= 0:
        return ""
    parts = []
    if efficiency.model_flops:
        parts.append(f"{100 * efficiency.ideal_s / step_s:.0f} % MFU ({human_flops(efficiency.model_flops)} a step)")
    if efficiency.num_tokens:
        parts.append(f"{human_number(efficiency.num_tokens / step_s)} tokens/s")
    if efficiency.num_examples:
        parts.append(f"{human_number(efficiency.num_examples / step_s)} examples/s")
    if efficiency.bound_s:
        bound, seconds = max(efficiency.bound_s.items(), key=lambda one: one[1])
        whole_s = sum(efficiency.bound_s.values())
        parts.append(f"main bottleneck: {bound} ({share_text(seconds, whole_s)} of the time)")
        lost_s = efficiency.bound_s.get(UNALIGNED, 0.0)
        if lost_s > _WORTH_A_WORD * whole_s:
            parts.append(
                f"{share_text(lost_s, whole_s)} of the time lost on matmuls over rows that are not aligned to {ALIGNED_BYTES}"
                f" bytes: pad their dims to a multiple of {ALIGNED_BYTES // 2} bfloat16 elements, as a vocabulary of 50,257 to"
                " 50,264"
            )
    return "; ".join(parts)


def replicated_text(plan: Plan) -> str:
    """The operations that run replicated because they have no sharding rule, and their share of the step; "" without
    any."""
    count = sum(one.count for one in plan.replicated)
    if not count or plan.mesh.num_devices == 1:
        return ""
    step_s = plan.prediction.step_time_s

    def share(seconds: float) -> str:
        part = 100 * seconds / step_s if step_s > 0 else 0.0
        return f"{part:.0f} %" if part >= 1 else "under 1 %"

    named = [
        f"`{one.name}`"
        + (f" x{one.count}" if one.count > 1 else "")
        + (f" ({share(one.time_s)})" if len(plan.replicated) > 1 and 100 * one.time_s >= step_s else "")
        for one in plan.replicated
    ]
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    have = "operation has no sharding rule and runs" if count == 1 else "operations have no sharding rule and run"
    return (
        f"{count} {have} replicated on all {plan.mesh.num_devices} devices: {', '.join(named[:MAX_NAMED])}{more};"
        f" {share(sum(one.time_s for one in plan.replicated))} of the step"
    )


def number_of_devices(plan: AnyPlan) -> str:
    """The number of devices; and of how many, if the plan uses a part of them."""
    available = plan.available_devices if isinstance(plan, Plan) else None
    return str(plan.num_devices) if available is None else f"{plan.num_devices} of {available}"


def tie_text(plan: Plan) -> str:
    """How much faster the fastest plan is than this simpler one; "" if this plan is the fastest."""
    tie = plan.tie
    if tie is None:
        return ""
    where = "" if tie.mesh == plan.mesh else f", on mesh {tie.mesh}"
    faster = f"{100 * tie.faster:.2f} %" if tie.faster >= 5e-5 else "under 0.01 %"
    fewest = f" and the fewest devices, {plan.num_devices}" if tie.mesh.num_devices > plan.num_devices else ""
    return (
        f"the simplest plan within 0.5 % of the fastest, with {num_split(plan.inputs)} sharded arguments{fewest}. {faster} faster,"
        f" with {tie.num_split} sharded: {tie.strategy}{where}"
    )


def simulated_text(plan: Plan) -> str:
    """The simulated output of XLA's latency estimator; "" if the plan does not have it."""
    prediction = plan.prediction
    return "" if prediction.xla_step_time_s is None else f"{SIMULATED}: {human_seconds(prediction.xla_step_time_s)}"
