"""Reduce exposed communication: by prices that anticipate overlap, by combine thresholds, and by early reductions.

In: a candidate plan. Out: plans by other prices; the same plan with weights of scans gathered one iteration ahead, with the
best combine threshold of XLA's GPU compiler, and with barriers that start reductions early (`early_reductions`). The solver adds up kernels and collectives, as if nothing overlapped;
the timeline of a whole plan decides which is faster. Few large collectives start late; many small ones each pay a launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.cost.collectives import collective, collective_time
from autopar.cost.resharding_matrix import Hideable
from autopar.ir.device_program import Reassociated
from autopar.planner.candidate import Candidate
from autopar.planner.early_reductions import EarlyStart
from autopar.planner.plan_assembly import predicted_again
from autopar.plans.records import EarlyReduction
from autopar.xla_model.buffer_assignment import device_program
from autopar.xla_model.collective_pipeliner import gathered_bytes, pipeline_gathers
from autopar.xla_model.simulation import Simulation

Prices = Mapping[Hideable, float]

#: The least exposed share by which the solver plans: what is hidden now need not be in another plan.
_LEAST_SHARE = 0.2
#: The shares that are tried once where those of the fastest plan so far gain nothing, by the kind that is exposed most.
_OTHER_SHARES: Mapping[Hideable, Prices] = {"gather": {"gather": 0.6, "sum": 0.4}, "sum": {"gather": 0.4, "sum": 0.6}}
#: Another plan is searched if more than this share of the step is exposed.
_WORTH = 0.01
#: The largest share of the step that another plan is assumed to save.
_MOST_SAVED = 0.25
#: Combine thresholds to try, relative to the profile's. The timeline is less accurate for smaller ones.
_THRESHOLDS = (1 / 4, 1 / 2, 2, 4)
#: Combine thresholds for plans with early reductions, and the slack of a reduction, relative to its own time.
_EARLY_THRESHOLDS, _SLACK = (1 / 2, 1), (0.25, 1.0, 2.0)
#: A plan with other options than XLA's defaults must save this share of the step.
_LEAST_GAIN = 0.005
#: The same for prefetch. A gain of 0.5 % was a loss of 3 % in XLA's schedule of a step, whose gathers were hidden before.
_LEAST_GAIN_OF_PREFETCH = 0.02


def is_worth_hiding(plan: Candidate, to_beat: float = math.inf) -> bool:
    """Whether XLA overlaps kernels and collectives of the plan, enough communication is exposed, and the plan could become
    faster than `to_beat` seconds."""
    return overlaps(plan) and _is_exposed(plan, to_beat)


def _is_exposed(plan: Candidate, to_beat: float = math.inf) -> bool:
    """Whether enough communication is exposed, and the plan could become faster than `to_beat` seconds."""
    if (1 - _MOST_SAVED) * plan.step_time_s >= to_beat:
        return False
    exposed_s = sum(plan.parts.prediction.exposed_s.values())
    return exposed_s > _WORTH * plan.step_time_s and lower_bound_s(plan) < to_beat


def search_overlap_prices(
    first: Candidate,
    other: Callable[[Prices, float], Candidate | None],
    to_beat: float,
    *,
    only_one: bool,
    even_slower: bool = False,
) -> list[Candidate]:
    """Plans by prices that anticipate overlap: the shares of hideable communication that are exposed in the plan before, as long as
    each plan is faster than the one before. If none is, other prices are tried once. A plan slower than `to_beat` is not improved
    this way (decision 110).

    Args:
        first: the plan to improve.
        other: plans by given prices, if faster than given seconds; returns None for an assignment planned before.
        to_beat: `step_time_s` of the fastest plan on other meshes.
        only_one: whether to stop after one plan.
        even_slower: whether `first` is improved once even if it is slower than `to_beat`.
    """
    tried, best, before = list[Candidate](), first, dict[Hideable, float]()

    def is_open(plan: Candidate) -> bool:
        if plan.step_time_s <= to_beat:
            return is_worth_hiding(plan, to_beat)
        return plan is first and even_slower and overlaps(plan) and _is_exposed(plan)

    while is_open(best):
        prices = _exposed_shares(best)
        plan = None if prices == before else other(prices, min(best.step_time_s, to_beat))
        if plan is None:
            break
        tried.append(plan)
        if only_one or plan.step_time_s >= best.step_time_s:
            break
        best, before = plan, prices
    if best is first and not only_one and first.step_time_s <= to_beat and is_worth_hiding(first, to_beat):
        plan = other(_OTHER_SHARES[_most_exposed(first)], first.step_time_s)
        tried.extend([] if plan is None else [plan])
    return tried


def _most_exposed(plan: Candidate) -> Hideable:
    """The kind of collective that is exposed most."""
    exposed_s = _exposed_s(plan)
    return "gather" if exposed_s["gather"] > exposed_s["sum"] else "sum"


def _exposed_shares(plan: Candidate) -> Prices:
    """The share of each hideable kind of communication that is exposed, if all other communication of this kind is."""
    f, exposed_s = plan.formulation, _exposed_s(plan)
    hideable_s: dict[Hideable, float] = {"gather": 0.0, "sum": 0.0}
    for op in plan.parts.explicit.communications:
        if op.kind == "cut":
            continue
        seconds = op.num_times * collective_time(op.collective, op.num_bytes, op.axes, f.mesh, f.profile)
        hidden: set[Hideable | None] = {f.flows[flow].hideable for flow in op.flows} or {None}
        own = hidden.pop() if len(hidden) == 1 else None
        if own is not None:
            hideable_s[own] += seconds
        elif (name := _hideable_as(op.collective)) is not None:
            exposed_s[name] -= seconds
    return {
        name: min(1.0, max(_LEAST_SHARE, exposed_s[name] / seconds)) if seconds else _LEAST_SHARE
        for name, seconds in hideable_s.items()
    }


def _exposed_s(plan: Candidate) -> dict[Hideable, float]:
    """Exposed seconds of all collectives of each hideable kind."""
    found: dict[Hideable, float] = {"gather": 0.0, "sum": 0.0}
    for kind, seconds in plan.parts.prediction.exposed_s.items():
        if (name := _hideable_as(kind)) is not None:
            found[name] += seconds
    return found


def _hideable_as(kind: str) -> Hideable | None:
    """The hideable kind of communication that a collective is; None if it is neither."""
    if collective(kind).is_sum:
        return "sum"
    return "gather" if collective(kind).change == "all-gather" else None


def lower_bound_s(plan: Candidate) -> float:
    """A lower bound of a plan's step time over all combine thresholds and early reductions."""
    return plan.parts.simulation.least_s


def with_best_overlap(plan: Candidate, budget: float, to_beat: float = math.inf) -> Candidate:
    """The same plan with prefetched gathers, the best combine threshold and early reductions; a plan within the budget stays
    within it."""
    prefetching = _with_prefetched_gathers(plan, budget, to_beat)
    return _with_early_reductions(_with_best_threshold(prefetching, budget, to_beat), budget, to_beat)


def _with_prefetched_gathers(plan: Candidate, budget: float, to_beat: float) -> Candidate:
    """The same plan whose scans gather the weights of an iteration during the one before, where that is faster.

    With XLA's combine threshold, each weight has its own gather; with a larger one, all weights of an iteration share one.
    XLA overestimates the time of a gather and starts the first ones when no kernel is left to hide them; a shared one
    starts with the iteration.
    """
    f, device, gathers_s = plan.formulation, plan.parts.device, _exposed_s(plan)["gather"]
    is_open = device.loops and _on_gpus(plan) and not plan.parts.prefetched_gathers
    if not is_open or gathers_s <= _LEAST_GAIN_OF_PREFETCH * plan.step_time_s or lower_bound_s(plan) >= to_beat:
        return plan
    program = pipeline_gathers(device, f.graph)
    shared = math.ceil(gathered_bytes(program))
    if not shared:
        return plan
    simulation = Simulation(program, f.mesh, f.profile)
    thresholds = [None, shared] if shared > f.profile.combine_threshold_bytes else [None]
    return _best(plan, budget, [(threshold, simulation, ()) for threshold in thresholds], _LEAST_GAIN_OF_PREFETCH)


def _with_best_threshold(plan: Candidate, budget: float, to_beat: float) -> Candidate:
    """The same plan with the best combine threshold. Prefetched gathers have the one of a layer's weights already."""
    is_open = plan.parts.device.ops and not plan.parts.prefetched_gathers
    if not is_open or not _on_gpus(plan) or not _is_exposed(plan, to_beat):
        return plan
    thresholds = [round(share * plan.formulation.profile.combine_threshold_bytes) for share in _THRESHOLDS]
    return _best(plan, budget, [(threshold, plan.parts.simulation, ()) for threshold in thresholds])


def _with_early_reductions(plan: Candidate, budget: float, to_beat: float) -> Candidate:
    """The same plan with early reductions and the combine threshold for them, where that is faster."""
    exposed, f, device = plan.parts.prediction.exposed_s, plan.formulation, plan.parts.device
    if not is_worth_hiding(plan, to_beat) or not any(collective(kind).is_sum for kind in exposed):
        return plan
    own = f.profile.combine_threshold_bytes
    programs = [device]
    if device.reassociated:
        programs.append(device_program(f, plan.parts.explicit, reassociate=False))
    variants: list[_Variant] = []
    for one in programs:
        early = EarlyStart(one, f.graph, f.mesh, f.profile)
        for share in _EARLY_THRESHOLDS:
            for slack in _SLACK:
                program, reductions = early.with_barriers(share * own, slack)
                if reductions and (one.reassociated or _stay_separate(device.reassociated, reductions)):
                    threshold = None if share == 1 else round(share * own)
                    variants.append((threshold, Simulation(program, f.mesh, f.profile), reductions))
    return _best(plan, budget, variants)


def _stay_separate(reassociated: Sequence[Reassociated], reductions: Sequence[EarlyReduction]) -> bool:
    """Whether XLA cannot reassociate the reductions whose results are added, because barriers wait for all but one of them."""
    values = {value for one in reductions for value in one.values}
    return all(len(values.intersection(one.values)) >= len(one.values) - 1 for one in reassociated)


#: A combine threshold in bytes (None: the profile's), the program of one device, and its early reductions.
_Variant = tuple[int | None, Simulation, tuple[EarlyReduction, ...]]


def _best(plan: Candidate, budget: float, variants: Iterable[_Variant], least_gain: float = _LEAST_GAIN) -> Candidate:
    """The fastest variant of a plan, or the plan itself if no variant saves enough time within the memory."""
    most = max(budget, plan.peak_bytes)
    best, to_beat = plan, (1 - least_gain) * plan.step_time_s
    for combine_threshold_bytes, simulation, reductions in variants:
        parts = predicted_again(plan.formulation, plan.parts, combine_threshold_bytes, simulation, reductions, to_beat)
        if parts is None:
            continue
        one = replace(plan, parts=parts)
        if one.peak_bytes <= most and one.step_time_s <= to_beat and (best is plan or one.step_time_s < to_beat):
            best, to_beat = one, one.step_time_s
    return best


def overlaps(plan: Candidate) -> bool:
    """Whether XLA overlaps kernels and collectives: on several GPUs, in a program without loops."""
    return _on_gpus(plan) and not plan.program.graph.loops


def _on_gpus(plan: Candidate) -> bool:
    return plan.formulation.profile.platform == "gpu" and plan.formulation.mesh.num_devices > 1
