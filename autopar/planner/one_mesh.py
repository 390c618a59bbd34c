"""Plan on one mesh in two steps: solve without a memory budget, then reduce exposed communication and fit the budget.

In: the forms of a program with their groups, a mesh, a `MeshTask`. Out: `Begun`, whose time shows whether the mesh is
worth the second step; then `Finished`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.resharding_matrix import ReshardingTimes
from autopar.formulate.formulation import formulate
from autopar.ir.mesh import MeshShape
from autopar.planner.candidate import Candidate
from autopar.planner.fork_pool import Least
from autopar.planner.memory_search import within_budget
from autopar.planner.mesh_task import Form, MeshTask
from autopar.planner.overlap_search import Prices, best_hidden, counting_on_overlap, least_s
from autopar.planner.plan_record import plan_of
from autopar.planner.simplest_plan import Fastest, simplest
from autopar.planner.ways_out import NothingFitsError
from autopar.plans.plan import Plan
from autopar.plans.records import split_dims
from autopar.transforms.split_dims.undo import sees_two

#: Plans whose times differ by no more are close.
_CLOSE = 0.03
#: A mesh that promises a plan slower by more has never been the fastest by other prices.
FAR = 0.1


@dataclass(frozen=True, slots=True)
class Begun:
    """The plan on one mesh after the first step, before memory and overlap are searched.

    Args:
        forms: the other forms of the program, to plan if no plan of this form fits. seconds: planning time so far.
    """

    mesh: MeshShape
    form: Form
    forms: Sequence[Form]
    task: MeshTask
    made: Candidate
    seconds: float

    @property
    def promise(self) -> float:
        """A sort key: the predicted time, with a small penalty per axis, so that of two close meshes the one with fewer
        axes is planned first."""
        axes = sum(size > 1 for size in self.mesh.axis_sizes)
        return self.made.compared_s * (1 + _CLOSE * axes)


@dataclass(frozen=True, slots=True)
class Finished:
    """The plan on one mesh, its candidate, and the fastest candidate, which differs if a simpler one is tied with
    it."""

    plan: Plan
    made: Candidate
    fastest: Fastest


def begin(mesh: MeshShape, forms: Sequence[Form], task: MeshTask) -> Begun:
    """Solve for the form with split dims. If its plan does not shard between two such dims, solve for the step as
    written, which has shardings that the other form lacks.

    Args:
        forms: the forms of the program; the last is the step as written.

    Raises:
        TimeLimitError: the solver found no plan.
    """
    (program, grouped), *others = forms
    started = time.perf_counter()
    f = formulate(program.graph, grouped.groups, mesh, task.profile, pins=task.pins, held=task.request.held)
    made = task.planning.made(program, f, task.solver.solve(f.problem))
    if others and not sees_two(program.trace, split_dims(made.parts.constraints)):
        return begin(mesh, others, task)
    return Begun(mesh, forms[0], others, task, made, time.perf_counter() - started)


def finish(begun: Begun, fastest: Least, least_promise: float) -> Finished:
    """Reduce exposed communication, and fit the memory budget.

    Args:
        fastest: seconds of the fastest plan so far; a plan that cannot become faster is not refined.
        least_promise: the lowest `promise` of all meshes.

    Raises:
        NothingFitsError: no plan fits.
    """
    try:
        return _finish(begun, fastest, least_promise)
    except NothingFitsError:
        if not begun.forms:
            raise
    return finish(begin(begun.mesh, begun.forms, begun.task), fastest, least_promise)


def _finish(begun: Begun, fastest: Least, least_promise: float) -> Finished:
    started, task = time.perf_counter(), begun.task
    candidates = _hidden(begun, fastest, least_promise)
    free = min(candidates, key=_compared_s)
    memory_bound = free.peak_bytes > task.budget_bytes
    if memory_bound and begun.made.peak_bytes > task.budget_bytes and least_s(free) < fastest.value:
        candidates += _within_budget(candidates, free, task, fastest)  # only now is memory worth its constraints
    best = min(candidates, key=lambda one: (one.peak_bytes > task.budget_bytes, one.compared_s))
    made = best
    if not task.request.any_that_fits:
        made = simplest(best, candidates, fastest.value, task)
    program, grouped = begun.form
    plan = plan_of(
        made,
        program,
        grouped.unknown,
        budget_bytes=task.budget_bytes,
        seconds=begun.seconds + time.perf_counter() - started,
        memory_bound=memory_bound,
    )
    return Finished(plan, made, Fastest.of(min(best, made, key=_compared_s)))


def _within_budget(candidates: Sequence[Candidate], free: Candidate, task: MeshTask, fastest: Least) -> list[Candidate]:
    """The candidate of the memory search, in a list; empty if it finds none and another candidate fits.

    Raises:
        NothingFitsError: no candidate fits.
    """
    budget, request = task.budget_bytes, task.request
    try:
        limited = within_budget(
            budget,
            free,
            task.planning,
            rematerialize=request.rematerialize,
            any_that_fits=request.any_that_fits,
            time_limit_s=request.time_limit_s,
            fastest=fastest,
        )
    except NothingFitsError:
        if all(one.peak_bytes > budget for one in candidates):
            raise
        return []
    return [best_hidden(limited, budget, fastest.value)]


def _hidden(begun: Begun, fastest: Least, least_promise: float) -> list[Candidate]:
    """The plan of the first step, and plans by prices that anticipate overlap, each with its exposed communication
    reduced."""
    task, seen = begun.task, {begun.made.solution.choices}
    budget, (program, grouped) = task.budget_bytes, begun.form
    graph, groups = program.graph, grouped.groups

    def other(exposed: Prices, to_beat: float) -> Candidate | None:
        times = ReshardingTimes(begun.mesh, task.profile, exposed)
        f = formulate(graph, groups, begun.mesh, task.profile, pins=task.pins, resharding=times, held=task.request.held)
        solution = task.limited.solve(f.problem)  # for prices that are a guess, near the optimum will do
        if not solution.choices or solution.choices in seen:
            return None
        seen.add(solution.choices)
        return best_hidden(task.planning.made(program, f, solution), budget, to_beat)

    first = best_hidden(begun.made, budget, fastest.value)
    if begun.promise > (1 + FAR) * least_promise:
        return [first]
    short = first.peak_bytes > budget  # memory will be what costs, not what is exposed
    return [first, *counting_on_overlap(first, other, fastest.value, at_once=short)]


def _compared_s(made: Candidate) -> float:
    return made.compared_s
