"""Reduce exposed communication: by prices that anticipate overlap, by combine thresholds, and by early reductions.

In: a plan. Out: whether it is worth a search; plans by other prices; the same plan with the combine threshold of XLA's GPU
compiler that suits it, and with barriers that make reductions start early (`early_reductions`). The solver adds up kernels
and collectives, as if nothing overlapped. Collectives combined into few start late; left as many they each pay a launch. The
timeline of a whole plan decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.cost.collectives import collective
from autopar.cost.resharding_matrix import Hideable
from autopar.planner.candidate import Candidate
from autopar.planner.early_reductions import EarlyStart
from autopar.planner.plan_assembly import hiding
from autopar.plans.records import EarlyReduction
from autopar.xla_model.buffer_assignment import device_program
from autopar.xla_model.simulation import Simulation

Prices = Mapping[Hideable, float]

#: The exposed share of hideable collectives that the solver is given first.
_LEVEL: Prices = {"gather": 0.2, "sum": 0.2}
#: The shares that it is given next, one after the other, by the kind that is exposed most. All-gathers hide behind the forward
#: pass, reductions behind the backward pass, which has twice the kernels.
_DEARER: Mapping[Hideable, tuple[Prices, ...]] = {
    "gather": ({"gather": 0.6, "sum": 0.4}, {"gather": 0.6, "sum": 0.2}),
    "sum": ({"gather": 0.4, "sum": 0.6},),
}
#: Another plan is searched where this part of the step is exposed; it is taken to save this part at the most.
_WORTH, _MOST_SPARED = 0.01, 0.25
#: Combine thresholds that are tried, relative to the profile's. The timeline is less accurate for smaller ones.
_LIMITS = (1 / 4, 1 / 2, 2, 4)
#: Combine thresholds for plans with early reductions, and the slack that a reduction gets, relative to its own time.
_EARLY, _SLACK = (1 / 2, 1), (0.25, 1.0, 2.0)
#: A plan must gain this part of the step to be taken over XLA's default.
_LEAST_GAIN = 0.005


def is_worth_hiding(made: Candidate, to_beat: float = math.inf) -> bool:
    """Whether kernels and collectives overlap, enough communication is exposed, and the plan could become faster than
    `to_beat` (`least_s`)."""
    prediction = made.parts.prediction
    if not _overlaps(made) or not prediction.step_time_s or not prediction.xla_step_time_s:
        return False
    if (1 - _MOST_SPARED) * made.compared_s >= to_beat:
        return False
    own = sum(prediction.exposed_s.values()) / prediction.step_time_s
    estimated = sum((prediction.xla_exposed_s or {}).values()) / (
        prediction.xla_step_time_s + made.parts.simulation.unestimated_s
    )
    return max(own, estimated) > _WORTH and least_s(made) < to_beat


def counting_on_overlap(
    begun: Candidate, other: Callable[[Prices, float], Candidate | None], to_beat: float, *, at_once: bool
) -> list[Candidate]:
    """Plan with prices that anticipate overlap, and then with higher prices for what stays exposed, until one is better.

    Args:
        begun: the plan to improve on. other: plans by given prices; it returns None if that plan is known already.
        to_beat: `compared_s` of the fastest plan on any mesh. at_once: stop after one plan.
    """
    tried, best = list[Candidate](), begun

    def is_better(prices: Prices) -> bool:
        nonlocal best
        before = best
        made = other(prices, min(best.compared_s, to_beat))
        tried.extend([] if made is None else [made])
        best = min([best, *tried], key=lambda one: one.compared_s)
        return best is not before

    if is_worth_hiding(best, to_beat):
        is_better(_LEVEL)
    dear = _most_exposed(best)
    for prices in () if at_once else _DEARER[dear]:
        if not is_worth_hiding(best, to_beat) or is_better(prices):
            break
        if tried and _most_exposed(tried[-1]) != dear:
            break
    return tried


def _most_exposed(made: Candidate) -> Hideable:
    """The kind of collective with the most exposed time."""
    prediction = made.parts.prediction
    estimated_s = (
        math.inf
        if prediction.xla_step_time_s is None
        else prediction.xla_step_time_s + made.parts.simulation.unestimated_s
    )
    both = (
        (prediction.exposed_s, prediction.step_time_s or math.inf),
        (prediction.xla_exposed_s or {}, estimated_s or math.inf),
    )
    of_kinds = [(collective(kind), seconds / step) for exposed, step in both for kind, seconds in exposed.items()]
    gathers = sum(part for kind, part in of_kinds if kind.change == "all-gather")
    sums = sum(part for kind, part in of_kinds if kind.is_sum)
    return "gather" if gathers > sums else "sum"


def least_s(made: Candidate) -> float:
    """A lower bound of a plan's `compared_s` over all combine thresholds and early reductions."""
    simulation, program = made.parts.simulation, made.program
    by_rates = simulation.least_s(by_rates=True)
    if made.parts.prediction.xla_step_time_s is None or program.graph.loops:
        return by_rates
    return math.sqrt(by_rates * (simulation.least_s() + simulation.unestimated_s))


def best_hidden(made: Candidate, budget: float, to_beat: float = math.inf) -> Candidate:
    """The same plan with the best combine threshold and early reductions; it stays within the budget if it is now."""
    return _with_early_reductions(_best_combined(made, budget, to_beat), budget, to_beat)


def _best_combined(made: Candidate, budget: float, to_beat: float) -> Candidate:
    """The same plan with the best combine threshold."""
    if not is_worth_hiding(made, to_beat) or not made.parts.device.ops:
        return made
    limits = [round(share * made.formulation.profile.combine_threshold_bytes) for share in _LIMITS]
    return _best(made, budget, [(limit, made.parts.simulation, ()) for limit in limits])


def _with_early_reductions(made: Candidate, budget: float, to_beat: float) -> Candidate:
    """The same plan with early reductions and the combine threshold for them, where that is faster."""
    prediction, f = made.parts.prediction, made.formulation
    exposed = prediction.exposed_s.keys() | (prediction.xla_exposed_s or {}).keys()
    if not is_worth_hiding(made, to_beat) or not any(collective(kind).is_sum for kind in exposed):
        return made
    own = f.profile.combine_threshold_bytes
    programs = [made.parts.device]
    if made.parts.device.reassociated:
        programs.append(device_program(f, made.parts.explicit, reassociate=False))
    tried: list[_Tried] = []
    for one in programs:
        early = EarlyStart(one, f.graph, f.mesh, f.profile)
        for share in _EARLY:
            for slack in _SLACK:
                program, reductions = early.with_barriers(share * own, slack)
                if reductions and (one.reassociated or _stay_separate(made.parts.device.reassociated, reductions)):
                    limit = None if share == 1 else round(share * own)
                    tried.append((limit, Simulation(program, f.mesh, f.profile), reductions))
    return _best(made, budget, tried)


def _stay_separate(reassociated: Sequence[Sequence[int]], reductions: Sequence[EarlyReduction]) -> bool:
    """Whether XLA cannot reassociate reductions whose results are added, because barriers wait for all but one of them."""
    values = {value for one in reductions for value in one.values}
    return all(len(values.intersection(sums)) >= len(sums) - 1 for sums in reassociated)


#: A combine threshold (None: the profile's), the program, and its early reductions.
_Tried = tuple[int | None, Simulation, tuple[EarlyReduction, ...]]


def _best(made: Candidate, budget: float, tried: Iterable[_Tried]) -> Candidate:
    """The plan with the fastest of the variants, if it gains enough."""
    most = max(budget, made.peak_bytes)
    best, to_beat = made, (1 - _LEAST_GAIN) * made.compared_s
    for combine_threshold_bytes, simulation, reductions in tried:
        parts = hiding(made.formulation, made.parts, combine_threshold_bytes, simulation, reductions, to_beat)
        if parts is None:
            continue
        one = replace(made, parts=parts)
        if one.peak_bytes <= most and one.compared_s <= to_beat and (best is made or one.compared_s < to_beat):
            best, to_beat = one, one.compared_s
    return best


def _overlaps(made: Candidate) -> bool:
    """Whether XLA overlaps kernels and collectives of this program: it does not with loops, which it never overlaps."""
    profile, mesh, loops = made.formulation.profile, made.formulation.mesh, made.program.graph.loops
    return profile.platform == "gpu" and profile.xla_estimator is not None and mesh.num_devices > 1 and not loops
