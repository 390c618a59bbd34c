"""Bound the goodput of every placement by its rates, without queueing, as an integer programme for CP-SAT.

In: models with their times, the rates of a trace. Out: `RateSolution`: a placement with the largest rates, and a bound.

For each layout l and each group i that the devices have room for, u_li says whether the group exists, y_lim whether it runs model
m, and f_lim are the requests per second that it serves; w_lm are the seconds of a request's slowest stage, b_lm the bytes on one
device with a cache for one sequence, t_lm those of temporaries, and o_lm the share of requests whose latency meets the bounds if they are alone:

    maximize    sum f_lim
    subject to  sum_li size_l u_li <= devices
                sum_m b_lm y_lim + t_lm' y_lim' <= budget u_li for each m',    sum_m w_lm f_lim <= u_li
                f_lim <= rate_m o_lm y_lim,         sum_li f_lim <= rate_m
                sum_li y_lim >= 1 for each m, if there is room for a replica of every model
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

from autopar.placement.expected import Demand
from autopar.placement.layouts import Layout
from autopar.placement.placements import Group, ModelSpec, Placement

#: Rates are integers of this many per request and second, and seconds of work of this many per second.
_RATE, _WORK = 1_000, 1_000_000
#: Memory is counted in KiB, or in bytes if the budget is less than a MiB.
_KIB = 1024


class RateSolution(NamedTuple):
    """A solution of the rate problem.

    Args:
        placement: the best placement found. rate_per_s: the requests per second that it serves.
        bound_per_s: no placement serves more. is_optimal: whether the two are equal by proof.
    """

    placement: Placement
    rate_per_s: float
    bound_per_s: float
    is_optimal: bool


_NOTHING = RateSolution(Placement(()), 0.0, math.inf, is_optimal=False)


def largest_rates(
    models: Mapping[str, ModelSpec],
    demand: Demand,
    num_devices: int,
    budget_bytes: float,
    *,
    only: Placement | None = None,
    time_limit_s: float = 30.0,
) -> RateSolution:
    """Solve the rate problem.

    Args:
        only: a placement whose rates alone are chosen; None to choose the placement too.
        time_limit_s: seconds for the solver. Its work is limited by a deterministic clock, so results do not depend on the
            machine's load.
    """
    arguments = (models, demand, num_devices, budget_bytes, only, time_limit_s)
    return _solve(*arguments, places_all=only is None) or _solve(*arguments, places_all=False) or _NOTHING


def _solve(
    models: Mapping[str, ModelSpec],
    demand: Demand,
    num_devices: int,
    budget_bytes: float,
    only: Placement | None,
    time_limit_s: float,
    *,
    places_all: bool,
) -> RateSolution | None:
    """The solution; None if none was found.

    Args:
        places_all: whether every model must have a replica.
    """
    model = cp_model.CpModel()
    slots = _slots(models, num_devices, only)
    rates = {name: math.floor(_RATE * demand.rate_per_s[name]) for name in demand.rate_per_s}
    served: dict[str, list[Any]] = {name: [] for name in rates}
    placed: dict[tuple[int, str], Any] = {}
    unit = _KIB if budget_bytes >= _KIB**2 else 1
    exists = [model.new_bool_var(f"group {number}") for number in range(len(slots))]
    for number, (layout, fixed) in enumerate(slots):
        flows, weights, temporaries = [], [], []
        for name, rate in rates.items():
            times = models[name].times.get(layout)
            if times is None or (fixed is not None and name not in fixed):
                continue
            need = demand.needs[name, layout]
            runs = model.new_bool_var(f"{name} on {number}")
            most = math.floor(rate * need.on_time)
            flow = model.new_int_var(0, most, f"rate of {name} on {number}")
            model.add(flow <= most * runs)
            placed[number, name] = runs
            served[name].append(flow)
            flows.append(math.floor(need.work_s * _WORK) * flow)
            weights.append(math.ceil(times.least_bytes() / unit) * runs)
            temporaries.append(math.ceil(times.temporary_bytes / unit) * runs)
        model.add(sum(flows) <= _RATE * _WORK * exists[number])
        if math.isfinite(budget_bytes):
            room = math.floor(budget_bytes / unit) * exists[number]
            for most_temporary in temporaries or [0]:
                model.add(sum(weights) + most_temporary <= room)
    model.add(sum(layout.num_devices * each for (layout, _), each in zip(slots, exists, strict=True)) <= num_devices)
    for name, flows in served.items():
        model.add(sum(flows) <= rates[name])
    for name in rates if places_all else ():
        model.add_bool_or(runs for (_, other), runs in placed.items() if other == name)
    for number in range(1, len(slots)):
        if only is None and slots[number][0] == slots[number - 1][0]:
            model.add_implication(exists[number], exists[number - 1])
    total = sum(flow for flows in served.values() for flow in flows)
    model.maximize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = time_limit_s
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    groups = [
        Group(layout, tuple(sorted(n for n in rates if (number, n) in placed and solver.value(placed[number, n]))))
        for number, (layout, _) in enumerate(slots)
    ]
    return RateSolution(
        Placement(tuple(groups)).canonical(),
        solver.objective_value / _RATE,
        solver.best_objective_bound / _RATE,
        is_optimal=status == cp_model.OPTIMAL,
    )


def _slots(
    models: Mapping[str, ModelSpec], num_devices: int, only: Placement | None
) -> list[tuple[Layout, frozenset[str] | None]]:
    """The groups that may exist, each with its models if they are given."""
    if only is not None:
        return [(group.layout, frozenset(group.models)) for group in only.groups]
    layouts = sorted({layout for model in models.values() for layout in model.times})
    return [(layout, None) for layout in layouts for _ in range(num_devices // layout.num_devices)]
