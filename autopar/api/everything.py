"""Choose everything in one call: devices, mesh, sharding, rematerialization, microbatches, stages and schedule.

    one program, by microbatches and meshes ┐
                                            ├ the faster plan that fits, with all alternatives and why they were not chosen
    stages, by microbatches and schedules   ┘

In: options with `everything="auto"`; a traced program. Out: options with what the user left open set to its automatic value; a `Plan`
or a `PipelinePlan` with its record `considered`. Both searches are those of `planner` and `pipeline.search`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import (
    AutoparError,
    BudgetError,
    MeshError,
    MicrobatchError,
    OptionError,
    PinError,
    TimeLimitError,
)
from autopar.pipeline.plan import AnyPlan, PipelinePlan, StagesTried
from autopar.pipeline.search.request import SlowStagesError
from autopar.planner import planner
from autopar.planner.cache import plans as plan_cache
from autopar.planner.fewer_devices import least_s, parts_of
from autopar.planner.layout_hints import layout_hints
from autopar.planner.mesh_search import Found
from autopar.planner.microbatch_count import MicrobatchSearch
from autopar.planner.request import PlanRequest
from autopar.planner.simplest_plan import TIE
from autopar.planner.ways_out import NothingFitsError
from autopar.plans.considered import Considered
from autopar.plans.plan import Plan
from autopar.system.units import human_bytes, human_seconds
from autopar.transforms.program import Program

#: The memory budget of a plan without a memory limit.
_NO_LIMIT_BYTES = 1e18
_WAYS_OUT = ". Ways out: "


def with_everything(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `autopar.plan`; with `everything="auto"`, those that the user leaves open have their automatic values.

    The stages of `like` are kept, so `stages` stays open there.

    Raises:
        OptionError: `everything` has another value.
    """
    given = {name: value for name, value in options.items() if name != "stages" or value is not None}
    if given.get("everything") is None:
        return given
    if given["everything"] != "auto":
        raise OptionError(
            f'`everything` is {given["everything"]!r}: give "auto" to have autopar choose devices, mesh, sharding,'
            " rematerialization, microbatches, stages and schedule, or leave it out; single options fix a part of it"
        )
    if given.get("like") is None:
        given.setdefault("stages", "auto")
    if given.get("num_microbatches") is None:
        given["num_microbatches"] = "auto"
    return given


def check_no_plan(options: Mapping[str, Any], plan: object) -> None:
    """Refuse `everything` for a step that runs a given plan.

    Raises:
        OptionError: both are given.
    """
    if plan is not None and options.get("everything") is not None:
        raise OptionError("`plan` is run as it is, so `everything` has nothing to choose: leave one of the two out")


@dataclass
class _OneProgram:
    """The search for one program.

    Args:
        plan: the fastest plan; None if there is none.
        rows: what was considered.
        failure: why there is no plan.
    """

    plan: Plan | None = None
    rows: list[Considered] = field(default_factory=list)
    failure: AutoparError | None = None


def decided(
    program: Program,
    one: PlanRequest | None,
    in_stages: Callable[[float], PipelinePlan] | None,
    plan_bytes: float,
    left_out: str = "",
) -> AnyPlan:
    """The faster of the plans as one program and in stages, with what was considered.

    Args:
        one: the request for one program; None to plan stages only.
        in_stages: plans in stages that are faster than a limit in seconds; None to plan one program only.
        plan_bytes: what the plan of a stage may fill of a device's memory.
        left_out: why only one of them is planned.

    Raises:
        AutoparError: neither can be planned.
    """
    alone = _OneProgram() if one is None else _one_program(program, one)
    staged, failure, slow = None, None, None
    if in_stages is not None:
        try:
            staged = in_stages(math.inf if alone.plan is None else alone.plan.prediction.step_time_s)
        except SlowStagesError as error:
            slow = error
        except (BudgetError, MicrobatchError, PinError, MeshError, TimeLimitError) as error:
            failure = error
    if alone.plan is None and staged is None:
        if isinstance(failure, BudgetError) and isinstance(alone.failure, BudgetError):
            raise BudgetError(f"{alone.failure} Nor in stages: {failure}")
        raise failure or alone.failure or AssertionError("one of them is planned")
    chosen = faster_of(alone.plan, staged)
    rows = alone.rows
    if one is None:
        rows = [_without_plan(1, f"not planned: {left_out}")]
    if staged is not None:
        rows = [*rows, *_of_stages(staged)]
    elif slow is not None:
        rows = [
            *rows,
            *map(_of_tried, slow.tried),
            _without_plan(0, "no stages are faster, by the prices of planned layers"),
        ]
    elif failure is not None:
        rows = [*rows, _without_plan(0, f"no stages can be: {_in_short(failure)}")]
    else:
        rows = [*rows, _without_plan(0, f"stages are not planned: {left_out}")]
    return replace(chosen, considered=_with_reasons(rows, chosen, staged, plan_bytes))


def plan_one_program(program: Program, request: PlanRequest) -> Plan:
    """The plan of one program, where the user leaves no other choice (`stages=1`, or `like` of one program), with what was considered.

    Raises:
        AutoparError: see `planner.plan_program`.
    """
    key = request.as_of(request.like).key() | {"everything": "auto"}
    hints = layout_hints(program, request.as_of(request.like))
    folder = plan_cache.folder_of(request.cache)
    entry = plan_cache.entry_of(program, key | {"layouts": hints}, folder, Plan.from_json)
    plan = entry.read()
    if plan is None:
        left_out = "`stages` is 1" if request.like is None else "`like` is the plan of one program"
        found = decided(program, request, None, request.budget.plan_bytes, left_out)
        assert isinstance(found, Plan), "nothing else is planned"
        plan = found
        entry.keep(plan)
    return plan


def faster_of(one: Plan | None, staged: PipelinePlan | None) -> AnyPlan:
    """The faster plan; one program where one stage is about as fast, because it is simpler."""
    if one is None or staged is None:
        found = one or staged
        assert found is not None, "the caller checks this"
        return found
    own_s, staged_s = one.prediction.step_time_s, staged.prediction.step_time_s
    is_tied = len(staged.stages) == 1 and own_s <= (1 + TIE) * staged_s
    return one if own_s <= staged_s or is_tied else staged


# -- one program -------------------------------------------------------------------------------


def _one_program(program: Program, request: PlanRequest) -> _OneProgram:
    """The fastest plan as one program over the numbers of microbatches, like `num_microbatches="auto"` of one program, and the plans
    on each mesh. If memory decides, the fastest plan without a memory limit is among the rows."""
    counts, found = MicrobatchSearch(program, request.num_microbatches), _OneProgram()
    completed = request.as_of(request.like)  # the planner completes the request itself, and only once
    budget = completed.budget
    is_short = False
    for count in counts:
        try:
            plan = planner.plan_program(program, replace(request, num_microbatches=count, cache=False))
        except (PinError, MeshError) as error:  # the meshes of stages may have what no mesh of all devices has
            found.failure = error
            found.rows.append(_without_plan(1, _in_short(error), count))
            return found
        except (BudgetError, MicrobatchError, TimeLimitError) as error:
            is_short |= isinstance(error, BudgetError)
            found.failure = error
            found.rows.append(_without_plan(1, _in_short(error), count))
            try:
                counts.fail(count, _as_noted(error))
            except (BudgetError, MicrobatchError, TimeLimitError) as final:
                found.failure = final
                break
            continue
        is_short |= plan.outcome.memory_bound
        found.rows += [*_of_program(plan, budget.total_bytes, budget.plan_bytes), *_bounded(plan, completed)]
        counts.note(count, Found(plan, program, None))
    try:
        found.plan = counts.fastest().plan
    except (BudgetError, AssertionError) as error:
        found.failure = error if isinstance(error, BudgetError) else found.failure
    if is_short:
        found.rows += _without_limit(program, request, budget.total_bytes, budget.plan_bytes)
    return found


def _as_noted(error: AutoparError) -> NothingFitsError | MicrobatchError | TimeLimitError:
    """The error in the form that `MicrobatchSearch` notes."""
    if isinstance(error, MicrobatchError | TimeLimitError):
        return error
    text, _, ways = str(error).partition(_WAYS_OUT)
    ways = ways.removesuffix("a smaller batch or model.").strip("; ")
    return NothingFitsError(text, lambda accumulate: [ways] if ways else [], math.inf)


def _of_program(plan: Plan, total_bytes: float, plan_bytes: float) -> Iterator[Considered]:
    """The plan of one program and those on other meshes, by its search."""
    count, own = plan.num_microbatches, plan.prediction
    yield Considered(
        num_devices=plan.num_devices,
        mesh=plan.mesh,
        num_microbatches=count,
        rematerializes=bool(plan.rematerialized),
        step_time_s=own.step_time_s,
        peak_bytes=own.peak_bytes,
        certainty="planned",
    )
    if plan.tie is not None and plan.tie.mesh == plan.mesh:
        seconds = own.step_time_s * (1 - plan.tie.faster)
        yield Considered(
            num_devices=plan.num_devices,
            mesh=plan.mesh,
            num_microbatches=count,
            step_time_s=seconds,
            peak_bytes=math.inf,
            certainty="planned",
            reason=f"within {100 * TIE:g} % of this mesh, and shards more arguments ({plan.tie.num_split})",
        )
    for other in plan.rejected:
        reason = ""
        if not math.isfinite(other.step_time_s):
            reason = f"does not fit: {other.strategy}"
        elif other.peak_bytes > plan_bytes:
            reason = _does_not_fit(other.peak_bytes, total_bytes)
        yield Considered(
            num_devices=other.mesh.num_devices,
            mesh=other.mesh,
            num_microbatches=count,
            step_time_s=other.step_time_s,
            peak_bytes=other.peak_bytes,
            certainty="planned",
            reason=reason,
        )


def _bounded(plan: Plan, request: PlanRequest) -> Iterator[Considered]:
    """The numbers of devices of which no mesh was planned to the end, because a bound or a first solution was too slow."""
    if "any_part" not in request.key():
        return
    seen = {plan.mesh: plan.prediction.step_time_s} | {one.mesh: one.step_time_s for one in plan.rejected}
    numbers = {mesh.num_devices for mesh in seen}
    one_device_s = min((seconds for mesh, seconds in seen.items() if mesh.num_devices == 1), default=math.inf)
    for number in parts_of(request.meshes[0].num_devices, request.profile):
        if number not in numbers:
            bound_s = least_s(one_device_s, number)
            yield Considered(
                num_devices=number,
                num_microbatches=plan.num_microbatches,
                step_time_s=bound_s if bound_s > plan.prediction.step_time_s else math.inf,
                peak_bytes=math.inf,
                certainty="bounded",
                reason="not faster by a bound: the step of one device divided evenly, or the solver's optimum, is slower than another mesh",
            )


def _without_limit(program: Program, request: PlanRequest, total_bytes: float, plan_bytes: float) -> list[Considered]:
    """The plans in one batch without rematerialization and without a memory limit, as far as they do not fit the budget."""
    fixed = request.num_microbatches
    count = 1 if fixed == "auto" else fixed
    free = replace(
        request, num_microbatches=count, memory_budget_bytes=_NO_LIMIT_BYTES, rematerialize=False, cache=False
    )
    try:
        plan = planner.plan_program(program, free)
    except (MicrobatchError, TimeLimitError, BudgetError):
        return []  # the rows with a memory limit say why
    return [
        replace(row, rematerializes=False, reason=_does_not_fit(row.peak_bytes, total_bytes))
        for row in _of_program(plan, total_bytes, plan_bytes)
        if plan_bytes < row.peak_bytes < math.inf
    ]


# -- stages ------------------------------------------------------------------------------------


def _of_stages(plan: PipelinePlan) -> list[Considered]:
    """The plan in stages, and the stages that were priced or planned."""
    return [
        _of_tried(
            StagesTried(
                schedule=plan.schedule,
                num_stages=len(plan.stages),
                num_microbatches=plan.num_microbatches,
                step_time_s=plan.prediction.step_time_s,
                peak_bytes=plan.prediction.peak_bytes,
                planned=True,
            )
        ),
        *(_of_tried(one) for one in plan.tried if not one.planned or not _is_plan(one, plan)),
    ]


def _is_plan(one: StagesTried, plan: PipelinePlan) -> bool:
    figures = one.step_time_s, one.peak_bytes, one.num_microbatches, one.schedule
    prediction = plan.prediction
    return figures == (prediction.step_time_s, prediction.peak_bytes, plan.num_microbatches, plan.schedule)


def _of_tried(one: StagesTried) -> Considered:
    return Considered(
        schedule=one.schedule,
        num_stages=one.num_stages,
        num_microbatches=one.num_microbatches,
        step_time_s=one.step_time_s,
        peak_bytes=one.peak_bytes,
        certainty="planned" if one.planned else "priced",
        reason="" if math.isfinite(one.step_time_s) else one.reason or "does not fit",
    )


# -- why not -----------------------------------------------------------------------------------


def _with_reasons(
    rows: Sequence[Considered], chosen: AnyPlan, staged: PipelinePlan | None, plan_bytes: float
) -> tuple[Considered, ...]:
    """The rows, the chosen plan first and then the fastest; each other one with the reason why it was not chosen."""
    own = _own_row(chosen)
    others = list(rows)
    others.remove(own)
    searched = _Stages.of(others, own, staged)
    found = [replace(row, reason=row.reason or _reason(row, own, searched, plan_bytes)) for row in others]
    order = sorted(found, key=lambda row: (row.step_time_s, row.certainty != "planned"))
    return (own, *order)


def _own_row(plan: AnyPlan) -> Considered:
    return _of_stages(plan)[0] if isinstance(plan, PipelinePlan) else next(_of_program(plan, math.inf, math.inf))


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages that were planned, and the fastest that were priced.

    Args:
        planned: the planned ones by schedule, number of stages and of microbatches, the first attempt of each; the last attempt of
            all is `own`.
        own: the row of the plan in stages; None if there is none.
        least_s: the step time of the fastest priced ones.
    """

    planned: Mapping[tuple[str, int, int], Considered]
    own: Considered | None
    least_s: float

    @classmethod
    def of(cls, others: Iterable[Considered], chosen: Considered, staged: PipelinePlan | None) -> _Stages:
        of_stages = [row for row in (chosen, *others) if row.schedule]
        planned = {_kind(row): row for row in reversed(of_stages) if row.certainty == "planned"}
        priced = [row.step_time_s for row in of_stages if row.certainty == "priced"]
        return cls(planned, None if staged is None else _own_row(staged), min(priced, default=math.inf))


def _kind(row: Considered) -> tuple[str, int, int]:
    return row.schedule, row.num_stages, row.num_microbatches


def _reason(row: Considered, chosen: Considered, stages: _Stages, plan_bytes: float) -> str:
    """Why a row was not chosen."""
    if row.step_time_s >= chosen.step_time_s:
        slower = _relative(row.step_time_s, chosen.step_time_s)
        return f"slower: {slower}" if row.step_time_s > chosen.step_time_s else "as fast"
    faster = f"faster by {100 * (1 - row.step_time_s / chosen.step_time_s):.2g} %"
    if row.certainty == "priced":
        return f"{faster} as priced, {_once_planned(row, chosen, stages, plan_bytes)}"
    if row.schedule and row != stages.own:
        return f"its stages do not fit once planned: {_does_not_fit(row.peak_bytes, plan_bytes)}"
    simpler = "is one program" if row.schedule else "has fewer devices, sharded arguments or axes"
    return f"{faster}, which counts as equal: the chosen plan {simpler}"


def _once_planned(row: Considered, chosen: Considered, stages: _Stages, plan_bytes: float) -> str:
    """What planning says about stages whose price is below the time of the chosen plan."""
    planned = stages.planned.get(_kind(row))
    if planned is not None and planned.step_time_s < chosen.step_time_s and planned != stages.own:
        return f"but once planned it {_does_not_fit(planned.peak_bytes, plan_bytes)}"
    if planned is not None:
        change = _relative(planned.step_time_s, row.step_time_s)
        return f"but once planned it takes {human_seconds(planned.step_time_s)} ({change} against its price)"
    if stages.own is None:
        return "but no stages fit once planned"
    own_s = stages.own.step_time_s
    return (
        f"but not planned: the fastest priced stages take {human_seconds(own_s)} once planned"
        f" ({_relative(own_s, stages.least_s)} against the price), and these are priced"
        f" {_relative(row.step_time_s, stages.least_s)} against them"
    )


def _without_plan(num_stages: int, reason: str, count: int = 1) -> Considered:
    """A row for what has no plan. No stages at all are 0 stages."""
    return Considered(
        schedule="" if num_stages == 1 else "any",
        num_stages=num_stages,
        num_microbatches=count,
        step_time_s=math.inf,
        peak_bytes=math.inf,
        certainty="left out",
        reason=reason,
    )


def _does_not_fit(peak_bytes: float, budget_bytes: float) -> str:
    return f"does not fit: needs {human_bytes(peak_bytes)} of {human_bytes(budget_bytes)}"


def _relative(seconds: float, other_s: float) -> str:
    return f"{100 * (seconds / other_s - 1):+.1f} %" if other_s else f"+{human_seconds(seconds)}"


def _in_short(error: AutoparError) -> str:
    """An error without its ways out, which are other rows."""
    return str(error).partition(_WAYS_OUT)[0]
