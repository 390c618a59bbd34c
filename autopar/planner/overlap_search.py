"""What a plan's collectives leave exposed, made less: by prices that count on overlap, by how XLA merges them, and by what
waits for reductions before it needs them.

In: a plan as made. Out: whether it is worth looking for one that hides more; the same plan with the limit to which XLA's GPU
compiler merges collectives that suits it; and with reductions awaited early (`early`). The solver adds up kernels and
collectives, as if nothing hid anything; merged into few, collectives start late, and into many they each pay for their
start. The timeline of a whole plan tells which is best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.cost.collectives import collective
from autopar.cost.resharding_matrix import Hideable
from autopar.planner.candidate import Candidate
from autopar.planner.early_reductions import Early
from autopar.planner.plan_assembly import hiding
from autopar.plans.records import Awaited
from autopar.xla_model.buffer_assignment import device_program
from autopar.xla_model.simulation import Simulation

Prices = Mapping[Hideable, float]

#: What counts, for the solver, of collectives for which nothing need wait, where it is to count on overlap.
_LEVEL: Prices = {"gather": 0.2, "sum": 0.2}
#: And where more of one is exposed than of the other, in turn: gathers have the forward pass to hide behind, sums the backward
#: pass, which has twice the kernels.
_DEARER: Mapping[Hideable, tuple[Prices, ...]] = {
    "gather": ({"gather": 0.6, "sum": 0.4}, {"gather": 0.6, "sum": 0.2}),
    "sum": ({"gather": 0.4, "sum": 0.6},),
}
#: The part of the step that has to be exposed for it to be worth another plan, and that this one spares at the most.
_WORTH, _MOST_SPARED = 0.01, 0.25
#: Limits that are tried, over the profile's own. Of smaller ones the timeline knows less well what XLA makes.
_LIMITS = (1 / 4, 1 / 2, 2, 4)
#: Limits with which reductions are awaited early, and by how much more than their own time after they can start.
_EARLY, _SLACK = (1 / 2, 1), (0.25, 1.0, 2.0)
#: A limit of ours has to be better than XLA's by so much of the step.
_LEAST_GAIN = 0.005


def is_worth_hiding(made: Candidate, to_beat: float = math.inf) -> bool:
    """Whether kernels and collectives run side by side there, enough of these is exposed, and the plan could be faster than
    another's `compared_s` (`least_s`)."""
    told = made.parts.prediction
    if not _overlaps(made) or not told.step_time_s or not told.xla_step_time_s:
        return False
    if (1 - _MOST_SPARED) * made.compared_s >= to_beat:
        return False
    own = sum(told.exposed_s.values()) / told.step_time_s
    estimated = sum((told.xla_exposed_s or {}).values()) / (told.xla_step_time_s + made.parts.simulation.unestimated_s)
    return max(own, estimated) > _WORTH and least_s(made) < to_beat


def counting_on_overlap(
    begun: Candidate, other: Callable[[Prices, float], Candidate | None], to_beat: float, *, at_once: bool
) -> list[Candidate]:
    """Plans by prices that count on overlap, until one is better by those that make dearer what is exposed.

    Args:
        begun: the plan to be better than. other: makes one by prices that is to beat a `compared_s`; None where it is one
            that was made before.
        to_beat: another plan's `compared_s`. at_once: one plan will do.
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
    """What a plan leaves exposed most."""
    told = made.parts.prediction
    estimated_s = (
        math.inf if told.xla_step_time_s is None else told.xla_step_time_s + made.parts.simulation.unestimated_s
    )
    both = ((told.exposed_s, told.step_time_s or math.inf), (told.xla_exposed_s or {}, estimated_s or math.inf))
    of_kinds = [(collective(kind), seconds / step) for exposed, step in both for kind, seconds in exposed.items()]
    gathers = sum(part for kind, part in of_kinds if kind.change == "all-gather")
    sums = sum(part for kind, part in of_kinds if kind.is_sum)
    return "gather" if gathers > sums else "sum"


def least_s(made: Candidate) -> float:
    """What a plan's `compared_s` cannot be below, however its collectives are merged and whatever waits for them."""
    simulation, program = made.parts.simulation, made.program
    by_rates = simulation.least_s(by_rates=True)
    if made.parts.prediction.xla_step_time_s is None or program.graph.loops:
        return by_rates
    return math.sqrt(by_rates * (simulation.least_s() + simulation.unestimated_s))


def best_hidden(made: Candidate, budget: float, to_beat: float = math.inf) -> Candidate:
    """The same plan with what is best for it of how its collectives are merged and awaited, within a memory budget if it
    is so now."""
    return _awaited_early(_best_merged(made, budget, to_beat), budget, to_beat)


def _best_merged(made: Candidate, budget: float, to_beat: float) -> Candidate:
    """The same plan with the limit of merging that is best for it, within a memory budget if it is so now."""
    if not is_worth_hiding(made, to_beat) or not made.parts.device.ops:
        return made
    limits = [round(share * made.formulation.profile.combine_threshold_bytes) for share in _LIMITS]
    return _best(made, budget, [(limit, made.parts.simulation, ()) for limit in limits])


def _awaited_early(made: Candidate, budget: float, to_beat: float) -> Candidate:
    """The same plan with reductions awaited early, and the limit of merging that goes with it, where that is better."""
    told, f = made.parts.prediction, made.formulation
    exposed = told.exposed_s.keys() | (told.xla_exposed_s or {}).keys()
    if not is_worth_hiding(made, to_beat) or not any(collective(kind).is_sum for kind in exposed):
        return made
    own = f.profile.combine_threshold_bytes
    programs = [made.parts.device]
    if made.parts.device.joined:
        programs.append(device_program(f, made.parts.explicit, joins=False))
    tried: list[_Tried] = []
    for one in programs:
        early = Early(one, f.graph, f.mesh, f.profile)
        for share in _EARLY:
            for slack in _SLACK:
                program, awaited = early.tied(share * own, slack)
                if awaited and (one.joined or _stay_apart(made.parts.device.joined, awaited)):
                    limit = None if share == 1 else round(share * own)
                    tried.append((limit, Simulation(program, f.mesh, f.profile), awaited))
    return _best(made, budget, tried)


def _stay_apart(joined: Sequence[Sequence[int]], awaited: Sequence[Awaited]) -> bool:
    """Whether XLA leaves sums that are added up as they are, since something else waits for all but one of them."""
    values = {value for one in awaited for value in one.values}
    return all(len(values.intersection(sums)) >= len(sums) - 1 for sums in joined)


#: A limit of merging (None: the profile's), the program, and what waits in it.
_Tried = tuple[int | None, Simulation, tuple[Awaited, ...]]


def _best(made: Candidate, budget: float, tried: Iterable[_Tried]) -> Candidate:
    """The plan with the parts that are best, if these are better by enough."""
    most = max(budget, made.peak_bytes)
    best, to_beat = made, (1 - _LEAST_GAIN) * made.compared_s
    for merge_bytes, simulation, awaited in tried:
        parts = hiding(made.formulation, made.parts, merge_bytes, simulation, awaited, to_beat)
        if parts is None:
            continue
        one = replace(made, parts=parts)
        if one.peak_bytes <= most and one.compared_s <= to_beat and (best is made or one.compared_s < to_beat):
            best, to_beat = one, one.compared_s
    return best


def _overlaps(made: Candidate) -> bool:
    """Beside a loop XLA runs nothing."""
    profile, mesh, loops = made.formulation.profile, made.formulation.mesh, made.program.graph.loops
    return profile.platform == "gpu" and profile.xla_estimator is not None and mesh.num_devices > 1 and not loops
