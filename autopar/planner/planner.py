"""Plan a program: run the planner's passes in order.

    Program (Trace, Graph) -> groups -> Formulation (Problem) -> Solution -> Plan

In: a traced program, a `PlanRequest`. Out: `Plan`. Each pass is a module of this package, in this order:

1. `layout_hints`: shardings of inputs, from their metadata and from another plan
2. `cache.plans`: the plan of an earlier start
3. `microbatch_count`: the numbers of microbatches to plan for
4. `mesh_search`: the meshes; on each of them `one_mesh`:
   a. `program_groups`: sharding rules, and groups of nodes with one strategy
   b. `mesh_task`: the optimization problem and its solution
   c. `plan_assembly`: the explicit program, the device program, the timeline
   d. `overlap_search`, `memory_search`, `replicated_state`, `simplest_plan`: other candidates
   e. `plan_record`: the plan

Nothing is compiled and no device is touched, unless the request has neither mesh nor device count.
"""

from __future__ import annotations

from autopar.errors import BudgetError, MicrobatchError, PinError, TimeLimitError
from autopar.planner.cache import plans as plan_cache
from autopar.planner.dump import dump, make_folder
from autopar.planner.fused_attention import attention_notes, forms_to_plan
from autopar.planner.layout_hints import LayoutHints, layout_hints
from autopar.planner.mesh_search import Found, search_meshes
from autopar.planner.microbatch_count import MicrobatchSearch
from autopar.planner.request import PlanRequest
from autopar.planner.ways_out import NothingFitsError
from autopar.plans.plan import Plan
from autopar.transforms.program import Program

#: A plan that follows metadata given as a hint may be slower by this share.
_HINT_TOLERANCE = 0.05


def plan_program(program: Program, request: PlanRequest) -> Plan:
    """The plan of a traced program.

    Raises:
        AutoparError: one of its subclasses; the text says what to change.
    """
    request = request.as_of(request.like)
    hints = layout_hints(program, request)
    key = request.key() | {"layouts": hints}
    entry = plan_cache.entry_of(program, key, plan_cache.folder_of(request.cache), Plan.from_json)
    folder = None if request.dump is None else make_folder(request.dump)
    plan = entry.read() if folder is None else None
    if plan is None:
        plan_one = _plan_if_no_slower if hints.is_hint else _plan_with
        found, failures = list[Found](), list[BudgetError]()
        for form in forms_to_plan(program, request):
            try:
                found.append(plan_one(form, request, hints))
            except BudgetError as error:  # another form may fit
                failures.append(error)
        if not found:
            raise failures[-1]
        best = min(found, key=lambda one: one.plan.prediction.step_time_s)
        best = best.with_notes(*attention_notes(program, request, [one.plan for one in found], best.plan))
        if folder is not None:
            dump(folder, request, best)
        plan = best.plan
        entry.keep(plan)
    return plan


def _plan_with(program: Program, request: PlanRequest, hints: LayoutHints) -> Found:
    """The fastest plan with these shardings, over all numbers of microbatches that the request allows."""
    counts = MicrobatchSearch(program, request.num_microbatches)
    for count in counts:
        try:
            split = program.as_traced.in_microbatches(count, own_statistics=request.per_microbatch_statistics)
            counts.note(count, search_meshes(split, request, hints.pins, may_fork=request.dump is None))
        except (NothingFitsError, MicrobatchError, TimeLimitError) as error:
            counts.fail(count, error)
        except PinError as error:
            if hints.is_hint or not any(repr(path) in str(error) for path in hints.metadata.pins):
                raise
            way_out = 'It is metadata of the argument: `metadata="ignore"` plans without it'
            raise PinError(f"{error}. {way_out}") from None
    return counts.fastest().with_notes(*hints.notes)


def _plan_if_no_slower(program: Program, request: PlanRequest, hints: LayoutHints) -> Found:
    """The plan that follows the metadata; where none fits or it is too slow, the fastest plan without the metadata."""
    other = _plan_with(program, request, hints.without_metadata)
    try:
        found = _plan_with(program, request, hints)
    except (PinError, BudgetError) as error:
        return other.with_notes(f"the metadata of the arguments were not followed: {error}")
    fastest_s = other.plan.prediction.step_time_s  # 0 for a step that computes nothing
    slower = found.plan.prediction.step_time_s / fastest_s - 1 if fastest_s else 0.0
    if slower <= _HINT_TOLERANCE:
        return found.with_notes(f"follows the metadata of the arguments, at {slower:+.1%} step time")
    return other.with_notes(f"following the metadata of the arguments would cost {slower:+.1%} step time")
